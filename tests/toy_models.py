"""Models small enough for exact expectations, and a tokenizer for them."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import oracle
from mlx.utils import tree_map
from mlx_lm.models.cache import KVCache
from mlx_lm.models.llama import Model, ModelArgs
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

LLAMA_CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
}


def tiny_llama(vocab_size: int = 32, *, seed: int = 0, noise: float = 0.0) -> Model:
    """A random llama; ``noise`` perturbs the weights into a draft model that is often right."""
    mx.random.seed(seed)
    model = Model(ModelArgs(**LLAMA_CONFIG, vocab_size=vocab_size))
    # Large weights, so that greedy text does not settle on one token.
    model.update(tree_map(lambda w: 4 * w if w.ndim == 2 else w, model.parameters()))
    mx.random.seed(seed + 1)
    model.update(
        tree_map(
            lambda w: w + noise * mx.random.normal(w.shape) if w.ndim == 2 else w,
            model.parameters(),
        )
    )
    mx.eval(model.parameters())
    return model


class TableModel:
    """Looks its logits up by the parity of the position and the token there.

    The cache is a real one that holds the ids themselves, so that it shows which tokens it has.

    Args:
        table: float32 ``[2, V, V]``, logits by parity, token, next token.
    """

    def __init__(self, table: mx.array):
        self.table = table

    def make_cache(self) -> list[KVCache]:
        return [KVCache()]

    def __call__(self, tokens: mx.array, cache: list[KVCache] | None = None) -> mx.array:
        length, start = tokens.shape[1], 0
        if cache is not None and isinstance(cache[0].offset, mx.array):
            # Nodes of a tree, as a batch.
            positions, ids = cache[0].offset, tokens.reshape(-1, 1, 1, 1)
            cache[0].update_and_fetch(ids, ids)
            return self.table[positions % 2, tokens[:, 0]][:, None]
        if cache is not None:
            start = cache[0].offset
            ids = tokens.reshape(1, 1, length, 1)
            # Whatever the cache does to the ids is seen by the model.
            tokens = cache[0].update_and_fetch(ids, ids)[0][0, 0, start:, 0][None]
        parity = mx.arange(start, start + length) % 2
        return self.table[parity, tokens[0]][None]


def cached_tokens(cache: list[KVCache]) -> list[int]:
    """The ids in the cache of a ``TableModel``."""
    return cache[0].state[0][0, 0, : cache[0].offset, 0].tolist() if cache[0].offset else []


def toy_tokenizer(vocab_size: int = 32) -> TokenizerWrapper:
    """Token 0 is ``</s>`` and ends a text, token i is the word ``wi``."""
    vocab = {"</s>": 0, **{f"w{i}": i for i in range(1, vocab_size)}}
    words = Tokenizer(models.WordLevel(vocab, unk_token="</s>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return TokenizerWrapper(PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>"))


# Two logits this close may change places when a forward pass covers more tokens.
NEAR_TIE = 1e-3


def first_difference_gap(
    model,
    prompt: list[int],
    plain: list[int],
    other: list[int],
    *,
    temperature: float = 1.0,
    coupled_seed: int | None = None,
):
    """Where two texts part that should be the same, how far apart the two best scores are there.

    A forward over several tokens may round a logit differently than one over a single token;
    only such a near tie excuses a difference. The scores are logits, and under the coupled rule
    ``logit / temperature`` plus noise. None if the texts are the same.
    """
    if plain == other:
        return None
    same = next((i for i, (a, b) in enumerate(zip(plain, other)) if a != b), None)
    assert same is not None, "one text is the beginning of the other"
    logits = model(mx.array([prompt + plain[:same]]))[0, -1].astype(mx.float32)
    scores = np.array(logits, np.float64) / temperature
    if coupled_seed is not None:
        key = np.array(mx.random.key(coupled_seed))
        scores += oracle.gumbel(key, len(prompt) + same, len(scores))
    best = np.sort(scores)[-2:]
    return float(best[1] - best[0])
