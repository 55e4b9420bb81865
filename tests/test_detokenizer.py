"""Text from tokens: every kind of tokenizer that mlx-lm loads, built small."""

from __future__ import annotations

import json
import random

import mlx.core as mx
import mlx_lm.tokenizer_utils
import pytest
from exactspec.detokenizer import INVALID, Detokenizer
from exactspec.generate import generate, stream_generate
from mlx_lm.models.cache import make_prompt_cache
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from toy_models import TableModel, toy_tokenizer
from transformers import PreTrainedTokenizerFast

WORDS = ["\u2581", "\u2581\u2581", *(f"\u2581{word}" for word in ("Paris", "The", "is"))]
WORDS += ["Paris", "a", ".", "\u00e9"]
SPM = {
    # With and without the space before the first word of a text, and SentencePiece's own name.
    "spm": [decoders.Strip(" ", 1, 0)],
    "spm, no space": [],
}


def byte_level():
    """Id b is byte b, in GPT-2's alphabet; words and an added token follow."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    alphabet = {byte: chr(byte) for byte in plain}
    alphabet |= {byte: chr(256 + i) for i, byte in enumerate(others)}
    pieces = [alphabet[byte] for byte in range(256)]
    for word in (" Paris", " the", " ,", "\u00e9t", " \U0001f600"):
        pieces.append("".join(alphabet[byte] for byte in word.encode()))
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<\uff5cEnd\uff5c>")])
    # As Llama 3's files say; it would make " ," a ",".
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=True)


def spm(kind):
    """Id 3 + b is byte b; words follow."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(parts + SPM[kind])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $0", None, [("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def metaspace():
    vocab = {word: i for i, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="a"))
    tokenizer.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def word_piece():
    words = ["hello", "##ly", "world", ".", "a"]
    vocab = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="a"))
    tokenizer.decoder = decoders.WordPiece()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def end_of_word():
    words = ["hel", "lo</w>", "world</w>", "a</w>"]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    tokenizer.decoder = decoders.BPEDecoder("</w>")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


TOKENIZERS = {
    "byte level": byte_level,
    **{kind: lambda kind=kind: spm(kind) for kind in SPM},
    "metaspace": metaspace,
    "word piece": word_piece,
    "end of word": end_of_word,
    "words": lambda: toy_tokenizer(9)._tokenizer,
}


def pieces(tokenizer, prompt, tokens):
    detokenizer = Detokenizer(tokenizer, prompt)
    return [detokenizer.add(token) for token in tokens] + [detokenizer.finish()]


def decode(tokenizer, tokens):
    return tokenizer.decode(tokens, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_pieces_joined_are_what_decode_adds_to_the_prompt(name):
    tokenizer = TOKENIZERS[name]()
    generator = random.Random(0)
    # Of byte tokens only whole characters here: see the tests of bytes below.
    first_byte = {"byte level": 0, "spm": 3, "spm, no space": 3}.get(name)
    words = [i for i in range(len(tokenizer)) if first_byte is None or i >= first_byte + 256]
    units = [[word] for word in words]
    if first_byte is not None:
        units += [[first_byte + b for b in c.encode()] for c in "A\u00e9\u2603\U0001f600\n \x00"]
    for _ in range(200):
        prompt = generator.choice(units)
        tokens = sum(generator.choices(units, k=generator.randrange(12)), [])
        whole, start = decode(tokenizer, prompt + tokens), decode(tokenizer, prompt)
        text = pieces(tokenizer, prompt, tokens)
        if name == "end of word" and tokens:
            # Its decode ends every text without the space that the next word brings.
            assert "".join(text).split() == whole[len(start) :].split()
            continue
        assert whole == start + "".join(text)
        assert not any(INVALID in piece for piece in text)
        assert len(text) == len(tokens) + 1


def test_any_bytes_of_a_byte_level_tokenizer():
    tokenizer = byte_level()
    generator = random.Random(1)
    characters = [list(c.encode()) for c in "A\u00e9\u2603\U0001f600\ufffd"]
    broken = [character[:cut] for character in characters for cut in range(1, len(character))]
    junk = [[generator.randrange(256)] for _ in range(8)]
    words = [[i] for i in range(256, len(tokenizer))]
    for _ in range(1000):
        tokens = sum(generator.choices(characters + broken + junk + words, k=9), [])
        assert "".join(pieces(tokenizer, [65], tokens)) == decode(tokenizer, tokens)


@pytest.mark.parametrize("kind", SPM)
def test_bytes_of_sentencepiece(kind):
    tokenizer = spm(kind)
    paris = tokenizer.convert_tokens_to_ids("\u2581Paris")

    def text(byte_string, after=()):
        tokens = [paris, *(3 + byte for byte in byte_string), *after]
        return "".join(pieces(tokenizer, [paris], tokens))

    assert text("\u2603\U0001f600".encode(), [paris]) == " Paris\u2603\U0001f600 Paris"
    assert text(b"\xff", [paris]) == " Paris\ufffd Paris"
    # Here decode would lose the snowman as well, which was out already.
    assert text("\u2603".encode() + b"\xff", [paris]) == " Paris\u2603\ufffd Paris"
    assert text(b"\xe2\x98") == " Paris\ufffd\ufffd"


@pytest.mark.parametrize("name", ["byte level", "spm"])
def test_a_character_comes_when_it_is_complete(name):
    tokenizer = TOKENIZERS[name]()
    first_byte = 0 if name == "byte level" else 3
    tokens = [first_byte + byte for byte in "a\U0001f600\u00e9".encode()]
    text = pieces(tokenizer, [first_byte + 65], tokens)
    assert text == ["a", "", "", "", "\U0001f600", "", "\u00e9", ""]
    cut = pieces(tokenizer, [first_byte + 65], tokens[:3])
    assert cut[:-1] == ["a", "", ""] and set(cut[-1]) == {INVALID}


def test_bytes_that_are_no_character_do_not_pile_up(monkeypatch):
    tokenizer, most = byte_level(), 0

    def count(tokens, **options):
        nonlocal most
        most = max(most, len(tokens))
        return PreTrainedTokenizerFast.decode(tokenizer, tokens, **options)

    monkeypatch.setattr(tokenizer, "decode", count)
    text = pieces(tokenizer, [65], [0xFF, 0xF0] * 100 + [65])
    assert "".join(text) == INVALID * 200 + "A" and INVALID in "".join(text[150:154])
    assert most <= 8


def test_a_prompt_that_ends_inside_a_character():
    snowman = list("\u2603".encode())
    text = pieces(byte_level(), snowman[:1], [*snowman[1:], 65])
    assert "".join(text) == INVALID * 2 + "A"  # its own bytes are none


def chain(tokens, vocab_size):
    """A model that says one token after the other."""
    table = mx.zeros((2, vocab_size, vocab_size))
    for before, after in zip(tokens, tokens[1:]):
        table[:, before, after] = 99
    return TableModel(table)


def test_the_loop_keeps_the_first_space_and_every_byte(tmp_path):
    tokenizer = byte_level()
    tokenizer.save_pretrained(tmp_path)
    loaded = mlx_lm.tokenizer_utils.load(tmp_path)
    paris = tokenizer.convert_tokens_to_ids("\u0120Paris")
    # Each id once. Byte 0 is U+0100 in GPT-2's alphabet, which must not be shown.
    tokens = [65, paris, 0, 190, 10, *"\u00e9".encode(), 9, *"\U0001f600".encode()]
    model = chain(tokens, len(tokenizer))
    result = generate(model, loaded, tokens[:1], max_tokens=len(tokens) - 1)
    assert result.tokens == tokens[1:]
    assert result.text == " Paris\x00\ufffd\n\u00e9\t\U0001f600" == decode(tokenizer, tokens)[1:]
    cut = generate(model, loaded, tokens[:1], max_tokens=len(tokens) - 2)
    assert cut.text == " Paris\x00\ufffd\n\u00e9\t\ufffd"
    items = list(stream_generate(model, loaded, tokens[:1], max_tokens=5, stop_tokens=[10]))
    assert [item.text for item in items] == [" Paris", "\x00", "", "\ufffd"]


def test_a_text_that_continues_a_cache_begins_only_once():
    tokenizer = spm("spm, no space")
    model = chain([0] * 2, len(tokenizer))
    assert tokenizer.encode("a") == [1, *tokenizer.encode("a", add_special_tokens=False)]
    cache = make_prompt_cache(model)
    for text, count in (("a", 2), ("a", 1), ("<s>a", 2)):
        before = cache[0].offset
        result = generate(model, tokenizer, text, max_tokens=1, prompt_cache=cache)
        assert result.statistics.prompt_tokens == count == cache[0].offset - before - 1
    # A new text begins with the token, also in a cache that is still empty.
    assert generate(model, tokenizer, "<s>a", max_tokens=1).statistics.prompt_tokens == 2


def test_the_kinds_that_mlx_lm_tells_apart_are_here(tmp_path):
    kinds = {}
    for name, build in TOKENIZERS.items():
        build().save_pretrained(tmp_path / name)
        decoder = json.loads((tmp_path / name / "tokenizer.json").read_text())["decoder"]
        kinds[name] = [
            mlx_lm.tokenizer_utils._is_bpe_decoder(decoder),
            mlx_lm.tokenizer_utils._is_spm_decoder(decoder),
            mlx_lm.tokenizer_utils._is_spm_decoder_no_space(decoder),
        ]
    assert kinds["byte level"] == [True, False, False]
    assert kinds["spm"] == [False, True, False]
    assert kinds["spm, no space"] == [False, False, True]
