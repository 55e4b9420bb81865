"""The draft head in PyTorch, its loss, and its file.

Entry j takes the text's token j + 1 and the target's hidden state j, and predicts token j + 2. A
draft's further entries take the drafted token and the head's own output of the entry before.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from target import Target, rope_tables, rotate
from torch import Tensor, nn

# Rows of logits at a time: what fits into a core's cache.
CHUNK = 256

# Keys and values of every step so far: ``[B, kv_heads, L, head_dim]`` each.
Memory = list[tuple[Tensor, Tensor]]


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


def linear(inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=inputs**-0.5)
    return layer


class Attention(nn.Module):
    def __init__(self, args, max_length: int) -> None:
        super().__init__()
        size, heads, kv_heads = args.hidden_size, args.num_attention_heads, args.num_key_value_heads
        self.head_dim, self.heads, self.kv_heads = size // heads, heads, kv_heads
        self.q_proj = linear(size, size)
        self.k_proj = linear(size, kv_heads * self.head_dim)
        self.v_proj = linear(size, kv_heads * self.head_dim)
        self.o_proj = linear(size, size)
        cos, sin = rope_tables(max_length, self.head_dim, args.rope_theta)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, x: Tensor, memory: Memory) -> Tensor:
        """Step s = ``len(memory)``. Entry e of it sees the entries up to e - s of step 0, and of
        each later step the one entry that leads to it."""
        length, step = x.shape[1], len(memory)
        q, k, v = (
            proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        cos, sin = self.cos[:length].to(q.dtype), self.sin[:length].to(q.dtype)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        memory.append((k, v))
        if step == 0:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            out = self._unrolled(q, memory)
        return self.o_proj(out.transpose(1, 2).flatten(-2))

    def _unrolled(self, q: Tensor, memory: Memory) -> Tensor:
        length, step = q.shape[2], len(memory) - 1
        q = q.unflatten(1, (self.kv_heads, -1)) * self.head_dim**-0.5
        (keys, values), drafted = memory[0], memory[1:]
        # Draft entry r of the chain that reaches entry e is entry e - (step - r).
        chain = [
            tuple(x.roll(step - r, 2).unsqueeze(2) for x in pair)
            for r, pair in enumerate(drafted, 1)
        ]
        seen = torch.ones(length, length, dtype=torch.bool).tril(-step)
        scores = (q.flatten(2, 3) @ keys.mT).view(*q.shape[:4], length)
        scores = scores.float().masked_fill(~seen, float("-inf"))
        own = torch.stack([(q * k).sum(-1).float() for k, _ in chain], -1)
        weights = torch.softmax(torch.cat((scores, own), -1), -1).to(q.dtype)
        out = (weights[..., :length].flatten(2, 3) @ values).view(q.shape)
        for i, (_, v) in enumerate(chain):
            out = out + weights[..., length + i : length + i + 1] * v
        return out.flatten(1, 2)


class MLP(nn.Module):
    def __init__(self, args) -> None:
        super().__init__()
        self.gate_proj = linear(args.hidden_size, args.intermediate_size)
        self.up_proj = linear(args.hidden_size, args.intermediate_size)
        self.down_proj = linear(args.intermediate_size, args.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, args, max_length: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(args.hidden_size, args.rms_norm_eps)
        self.self_attn = Attention(args, max_length)
        self.post_attention_layernorm = RMSNorm(args.hidden_size, args.rms_norm_eps)
        self.mlp = MLP(args)

    def forward(self, x: Tensor, memory: Memory) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), memory)
        return x + self.mlp(self.post_attention_layernorm(x))


class Head(nn.Module):
    def __init__(self, args, final_norm: Tensor, num_layers: int = 1, max_length: int = 512):
        super().__init__()
        size, eps = args.hidden_size, args.rms_norm_eps
        self.embedding_norm, self.hidden_norm = RMSNorm(size, eps), RMSNorm(size, eps)
        self.projection = linear(2 * size, size)
        self.layers = nn.ModuleList(Layer(args, max_length) for _ in range(num_layers))
        self.norm = RMSNorm(size, eps)
        self.norm.weight.data.copy_(final_norm)

    def new_memory(self) -> list[Memory]:
        return [[] for _ in self.layers]

    def forward(self, embeddings: Tensor, hidden: Tensor, memory: list[Memory]) -> Tensor:
        """One step: ``out [B, L, d]`` from the tokens' embeddings and the hidden states."""
        z = torch.cat((self.embedding_norm(embeddings), self.hidden_norm(hidden)), -1)
        z = self.projection(z)
        for layer, layer_memory in zip(self.layers, memory):
            z = layer(z, layer_memory)
        return self.norm(z)


@torch.compile(dynamic=True)
def _loss_of_rows(
    target_logits: Tensor, draft_logits: Tensor, log_sum: Tensor, tv_weight: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradient with respect to ``draft_logits``, and the three sums of ``DraftLoss``."""
    target = (target_logits.float() - log_sum[:, None]).exp()
    logits = draft_logits.float()
    largest = logits.amax(-1, keepdim=True)
    draft = (logits - largest).exp()
    total = draft.sum(-1, keepdim=True)
    draft = draft / total
    mass = target.sum(-1, keepdim=True)
    cross_entropy = (mass * (total.log() + largest)).sum() - (target * logits).sum()
    below = torch.where(draft < target, draft, 0.0)
    gradient = draft * (mass + tv_weight * below.sum(-1, keepdim=True)) - target - tv_weight * below
    sums = torch.stack((cross_entropy, torch.minimum(target, draft).sum(), mass.sum()))
    return gradient.to(draft_logits.dtype), sums


class DraftLoss(torch.autograd.Function):
    """Sum over rows of cross-entropy + ``tv_weight`` * total variation, over a draft vocabulary.

    The target's probabilities keep their values under its full vocabulary, so a row weighs as much
    as the draft vocabulary holds of it. Gradients are made with the loss, a chunk of rows at a
    time: no row of logits is kept. Also returns the sums of cross-entropy, of acceptance (1 - total
    variation) and of the target's mass on the draft vocabulary.
    """

    @staticmethod
    def forward(ctx, out, hidden, log_sum, vocab_matrix, tv_weight):
        gradient, sums = torch.empty_like(out), torch.zeros(3)
        for start in range(0, len(out), CHUNK):
            rows = slice(start, start + CHUNK)
            target_logits, draft_logits = hidden[rows] @ vocab_matrix.T, out[rows] @ vocab_matrix.T
            logits_gradient, row_sums = _loss_of_rows(
                target_logits, draft_logits, log_sum[rows], torch.tensor(tv_weight)
            )
            gradient[rows] = logits_gradient @ vocab_matrix
            sums += row_sums
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(sums)
        return sums[0] + tv_weight * (len(out) - sums[1]), sums

    @staticmethod
    def backward(ctx, loss_gradient, _):
        (gradient,) = ctx.saved_tensors
        return gradient * loss_gradient.to(gradient.dtype), None, None, None, None


def save_head(path: Path, head: Head, draft_vocab: Tensor, target: Target, about: dict) -> None:
    """Write the package's file: float16 tensors, ``draft_vocab`` int32 and the metadata."""
    args, attention = target.args, head.layers[0].self_attn
    config = {
        "hidden_size": args.hidden_size,
        "num_layers": len(head.layers),
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.kv_heads,
        "intermediate_size": args.intermediate_size,
        "rms_norm_eps": args.rms_norm_eps,
        "rope_theta": args.rope_theta,
        "rope_traditional": True,
        "vocab_size": args.vocab_size,
    }
    tensors = {name: w.detach().half().contiguous() for name, w in head.state_dict().items()}
    tensors["draft_vocab"] = draft_vocab.int()
    metadata = {name: json.dumps(value) for name, value in ({"config": config} | about).items()}
    save_file(tensors, path, metadata=metadata | {"target": target_name()})
    path.chmod(0o644)  # safetensors lets only the owner read it


def start_from(path: Path, head: Head) -> tuple[Tensor, list[dict]]:
    """Give ``head`` the weights of the file at ``path``; its draft vocabulary, and how it was made.

    Stages come in order, each with its ``data`` and ``training`` but for the log.

    Raises:
        ValueError: the file is of another target, or not of a finished training.
    """
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    if metadata["target"] != target_name():
        raise ValueError(
            f"[start_from] path: expected a head of {target_name()}, got one of "
            f"{metadata['target']} in {path}"
        )
    if "training" not in metadata:
        raise ValueError(f"[start_from] path: expected a finished head, got {path}")
    data, training = json.loads(metadata["data"]), json.loads(metadata["training"])
    before = json.loads(metadata.get("before", "[]"))
    del training["log"]
    vocab = tensors.pop("draft_vocab").long()
    head.load_state_dict(tensors)
    return vocab, [*before, {"data": data, "training": training}]


def target_name() -> str:
    from exactspec.models import DEFAULT_MODEL

    return DEFAULT_MODEL.name
