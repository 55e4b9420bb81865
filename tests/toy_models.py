"""Models small enough for exact expectations, and a tokenizer for them."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import oracle
from exactspec.heads import DraftHead
from mlx import nn
from mlx.utils import tree_flatten, tree_map
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


class HiddenTableModel(TableModel):
    """A ``TableModel`` by way of hidden states: one-hot vectors of parity and token."""

    def __init__(self, table: mx.array):
        vocab_size = table.shape[1]
        super().__init__(table)
        inner = TableModel(mx.eye(2 * vocab_size).reshape(2, vocab_size, 2 * vocab_size))
        self.model = inner

    def __call__(self, tokens: mx.array, cache: list[KVCache] | None = None) -> mx.array:
        # Each sum has one term that is not 0: no logit is rounded.
        return self.model(tokens, cache) @ self.table.reshape(-1, self.table.shape[2])


class TableHead:
    """The head of a ``HiddenTableModel`` that is always right, as far as its vocabulary goes.

    Its cache holds the ids of its entries.
    """

    def __init__(self, model: HiddenTableModel, draft_vocab: list[int] | None = None):
        self.table = model.table
        self.hidden_size = 2 * model.table.shape[1]
        self.draft_vocab = None if draft_vocab is None else mx.array(draft_vocab, mx.int32)

    def make_cache(self) -> list[KVCache]:
        return [KVCache()]

    def __call__(self, tokens: mx.array, hidden: mx.array, cache: list[KVCache]) -> mx.array:
        ids = tokens.reshape(1, 1, -1, 1)
        tokens = cache[0].update_and_fetch(ids, ids)[0][0, 0, -tokens.size :, 0]
        vocab_size = self.table.shape[1]
        parity = 1 - mx.argmax(hidden, axis=1) // vocab_size  # of the token's position
        return mx.eye(2 * vocab_size)[parity * vocab_size + tokens]

    def logits(self, outputs: mx.array, ids: mx.array | None = None) -> mx.array:
        logits = outputs @ self.table.reshape(-1, self.table.shape[2])
        ids = self.draft_vocab if ids is None else ids
        return logits if ids is None else logits[:, ids]


def tiny_head(
    target: Model, draft_vocab: list[int] | None = None, *, layers: int = 1, seed: int = 0
) -> DraftHead:
    """A random head of a ``tiny_llama`` or a ``HiddenTableModel``."""
    if isinstance(target, Model):
        embedding = target.model.embed_tokens
    else:
        mx.random.seed(seed + 7)
        embedding = nn.Embedding(target.table.shape[1], 2 * target.table.shape[1])
        embedding.weight = mx.random.normal(embedding.weight.shape)
    vocab_size, size = embedding.weight.shape
    vocab = list(range(vocab_size)) if draft_vocab is None else draft_vocab
    mx.random.seed(seed)
    config = {**LLAMA_CONFIG, "hidden_size": size, "num_hidden_layers": layers}
    args = ModelArgs(**config, vocab_size=vocab_size)
    head = DraftHead(args, embedding, mx.array(vocab, mx.int32))
    head.update(tree_map(lambda w: 4 * w if w.ndim == 2 else w, head.parameters()))
    mx.eval(head.parameters())
    return head


def save_head(path: Path, target: Model, draft_vocab: list[int], **changes: Any) -> DraftHead:
    """Save a ``tiny_head`` as a file; ``changes`` are of its configuration."""
    head = tiny_head(target, draft_vocab)
    weights = {k: v.astype(mx.float16) for k, v in tree_flatten(head.parameters())}
    weights["draft_vocab"] = head.draft_vocab
    config = {name: value for name, value in LLAMA_CONFIG.items() if name != "model_type"}
    del config["num_hidden_layers"]
    config |= {"num_layers": 1, "rope_theta": 10000.0, "rope_traditional": True}
    config |= {"vocab_size": target.args.vocab_size, **changes}
    mx.save_safetensors(str(path), weights, {"config": json.dumps(config), "target": "a llama"})
    return head


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


_LONGCAT = {
    "hidden_size": 32,
    "ffn_hidden_size": 32,
    "moe_topk": 2,
    "expert_ffn_hidden_size": 16,
    "n_routed_experts": 2,
    "zero_expert_num": 2,
    "num_layers": 2,
    "vocab_size": 32,
    "max_position_embeddings": 1000,
    "num_attention_heads": 2,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "routed_scaling_factor": 1.0,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
    "attention_bias": False,
    "zero_expert_type": "identity",
}

# Two layers each, with every kind of cache that mlx-lm has for one sequence.
ARCHITECTURES = {
    "llama": {**LLAMA_CONFIG, "vocab_size": 32},
    "gemma3_text": {  # RotatingKVCache, KVCache
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "vocab_size": 32,
        "sliding_window": 8,
        "sliding_window_pattern": 2,
    },
    "deepseek_v32": {  # CacheList(KVCache, KVCache) twice
        "vocab_size": 32,
        "hidden_size": 32,
        "index_head_dim": 16,
        "index_n_heads": 2,
        "index_topk": 4,
        "intermediate_size": 32,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "qk_nope_head_dim": 8,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
    },
    "longcat_flash": {**_LONGCAT, "attention_method": "MLA"},
    "longcat_flash_ngram": {  # ArraysCache, then CacheList
        **_LONGCAT,
        "ngram_vocab_size_ratio": 4,
        "emb_neighbor_num": 2,
        "emb_split_num": 2,
    },
    "qwen3_next": {  # ArraysCache, KVCache
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "linear_num_value_heads": 2,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 3,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 16,
        "mlp_only_layers": [],
        "moe_intermediate_size": 16,
        "rms_norm_eps": 1e-5,
        "vocab_size": 32,
        "num_key_value_heads": 1,
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
        "max_position_embeddings": 1000,
        "head_dim": 16,
        "full_attention_interval": 2,
    },
    "mamba": {  # ArraysCache alone
        "vocab_size": 32,
        "hidden_size": 32,
        "intermediate_size": 32,
        "state_size": 8,
        "num_hidden_layers": 2,
        "conv_kernel": 3,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_rank": 4,
    },
}


def tiny_model(architecture: str) -> nn.Module:
    """A random model of one of ``ARCHITECTURES``."""
    module = importlib.import_module(f"mlx_lm.models.{architecture}")
    mx.random.seed(0)
    config = {"model_type": architecture, **ARCHITECTURES[architecture]}
    model = module.Model(module.ModelArgs(**config))
    # Large weights, so that greedy text does not settle on one token.
    model.update(tree_map(lambda w: 4 * w if w.ndim == 2 else w, model.parameters()))
    mx.eval(model.parameters())
    return model
