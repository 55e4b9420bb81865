"""The target model in PyTorch: the default model's weights, and a check against MLX's logits."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import torch
import torch.nn.functional as F
from exactspec.models import load_default_model
from mlx.utils import tree_flatten
from torch import Tensor

# The most that logits of the two implementations may differ, both in float32.
LOGITS_TOLERANCE = 1e-3


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE of adjacent pairs (``rope_traditional``); ``cos`` and ``sin`` end in head_dim / 2."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


def rope_tables(length: int, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines, float32 ``[length, head_dim / 2]``."""
    frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float64), frequencies)
    return angles.cos().float(), angles.sin().float()


class Cache:
    """Keys and values of every layer: ``[slots, kv_heads, length, head_dim]``."""

    def __init__(self, target: Target, slots: int, length: int) -> None:
        args = target.args
        shape = (slots, args.num_key_value_heads, length, target.head_dim)
        layers = range(args.num_hidden_layers)
        self.keys = [torch.zeros(shape, dtype=target.dtype) for _ in layers]
        self.values = [torch.zeros(shape, dtype=target.dtype) for _ in layers]


class Target:
    """The default model's forward, without gradients."""

    def __init__(self, dtype: torch.dtype, max_length: int = 1024) -> None:
        model, self.tokenizer = load_default_model()
        self.args, self.dtype = model.args, dtype
        args = self.args
        weights = {
            name: torch.from_numpy(np.array(weight))
            for name, weight in tree_flatten(model.parameters())
        }
        self.head_dim = args.hidden_size // args.num_attention_heads
        self.embedding = weights["model.embed_tokens.weight"].to(dtype)
        self.norm = weights["model.norm.weight"].to(dtype)
        self.layers = []
        for i in range(args.num_hidden_layers):

            def part(name: str, i: int = i) -> Tensor:
                return weights[f"model.layers.{i}.{name}.weight"]

            self.layers.append(
                {
                    "attention_norm": part("input_layernorm"),
                    "qkv": torch.cat([part(f"self_attn.{n}_proj") for n in "qkv"]),
                    "o": part("self_attn.o_proj"),
                    "mlp_norm": part("post_attention_layernorm"),
                    "gate_up": torch.cat([part("mlp.gate_proj"), part("mlp.up_proj")]),
                    "down": part("mlp.down_proj"),
                }
            )
            self.layers[-1] = {name: w.to(dtype) for name, w in self.layers[-1].items()}
        cos, sin = rope_tables(max_length, self.head_dim, args.rope_theta)
        self.cos, self.sin = cos.to(dtype), sin.to(dtype)

    def rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.args.rms_norm_eps)

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.embedding.T

    def _layers(self, tokens: Tensor, attend) -> Tensor:
        """Final hidden states of ``tokens`` (any shape); ``attend(i, qkv)`` mixes positions."""
        x = self.embedding[tokens]
        for i, layer in enumerate(self.layers):
            qkv = F.linear(self.rms_norm(x, layer["attention_norm"]), layer["qkv"])
            x = x + F.linear(attend(i, qkv), layer["o"])
            gate, up = F.linear(self.rms_norm(x, layer["mlp_norm"]), layer["gate_up"]).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, layer["down"])
        return self.rms_norm(x, self.norm)

    def _split(self, qkv: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        heads, kv_heads = self.args.num_attention_heads, self.args.num_key_value_heads
        qkv = qkv.unflatten(-1, (heads + 2 * kv_heads, self.head_dim))
        q, k, v = qkv.split((heads, kv_heads, kv_heads), -2)
        cos, sin = self.cos[positions].unsqueeze(-2), self.sin[positions].unsqueeze(-2)
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    @torch.inference_mode()
    def forward(self, tokens: Tensor, positions: Tensor, mask: Tensor | None = None) -> Tensor:
        """Hidden states ``[T, d]`` of ``tokens [T]``; ``mask [T, T]`` is True where one is seen."""

        def attend(i: int, qkv: Tensor) -> Tensor:
            q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in self._split(qkv, positions))
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True
            )
            return out[0].transpose(0, 1).flatten(-2)

        return self._layers(tokens, attend)

    @torch.inference_mode()
    def decode(self, tokens: Tensor, positions: Tensor, cache: Cache) -> Tensor:
        """Hidden states ``[B, d]`` of one token a slot, ``tokens [B]`` at ``positions [B]``."""
        length = cache.keys[0].shape[2]
        slots = torch.arange(len(tokens))
        mask = torch.zeros(len(tokens), 1, 1, length, dtype=self.dtype)
        hidden_keys = torch.arange(length) > positions[:, None]
        mask.masked_fill_(hidden_keys[:, None, None], float("-inf"))

        def attend(i: int, qkv: Tensor) -> Tensor:
            q, k, v = self._split(qkv, positions)
            cache.keys[i][slots, :, positions] = k
            cache.values[i][slots, :, positions] = v
            # The query heads of a key head are one query each: no key is copied.
            q = q.unflatten(1, (self.args.num_key_value_heads, -1))
            keys, values = cache.keys[i], cache.values[i]
            # Faster here than the fused kernel, which is made for many queries.
            scores = torch.softmax(q @ keys.mT * self.head_dim**-0.5 + mask, -1)
            return (scores @ values).flatten(1)

        return self._layers(tokens, attend)


def check_against_mlx(text: str = "The ratio test accepts a draft when") -> float:
    """The largest difference of logits from MLX's, both float32, over a chat prompt.

    Raises:
        RuntimeError: it is more than ``LOGITS_TOLERANCE``.
    """
    model, tokenizer = load_default_model()
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True
    )
    theirs = torch.tensor(model(mx.array([ids]))[0].tolist())
    target = Target(torch.float32)
    ours = target.logits(target.forward(torch.tensor(ids), torch.arange(len(ids))))
    difference = (ours - theirs).abs().max().item()
    if not difference <= LOGITS_TOLERANCE:
        raise RuntimeError(
            f"[check_against_mlx] logits: expected to differ from MLX's by at most "
            f"{LOGITS_TOLERANCE}, got {difference:.3g}"
        )
    return difference
