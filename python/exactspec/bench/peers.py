"""What ``exactspec bench`` compares ``verify_draft`` with: the same law by other means.

Every peer takes the same problem: B sequences of K draft tokens with their rows of logits, and the
coins that accept them. Peers that draw the last token by their own random numbers have the same
law; the others give the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from .. import Sampling, reference, verify_draft

BLOCK = reference.DRAW_BLOCK

OURS = "verify_draft"


class Peer(NamedTuple):
    """Another way to verify a draft.

    Attributes:
        prepare: brings ``verify_draft``'s arguments into the form the peer takes; not timed.
        run: from that to ``(tokens, num_accepted)``, nested lists or arrays, evaluated.
        same_tokens: whether it draws by the given uniforms alone.
        part: what it does of the whole, if not all: then it has no tokens to compare.
    """

    prepare: Callable[[dict[str, mx.array]], Any]
    run: Callable[[Any], tuple[Any, Any]]
    same_tokens: bool = True
    part: str | None = None


class Absent(NamedTuple):
    """Why a peer is not measured."""

    reason: str


def make_peers(sampling: Sampling, draft: str) -> dict[str, Peer | Absent]:
    """Every peer there is, ours first.

    Args:
        sampling: the target's and the draft's.
        draft: ``"dense"``, ``"dense with stats"`` or ``"one-hot"``.
    """
    is_plain = sampling.top_k <= 0 and sampling.top_p in (0, 1)
    is_dense = draft != "one-hot"
    peers: dict[str, Peer | Absent] = {}
    peers[OURS] = _mlx_peer(lambda x: verify_draft(**x, sampling=sampling)[:2])

    def composed(x: dict) -> tuple:
        return reference.verify_draft(**x, sampling=sampling)[:2]

    peers["composed mx ops"] = _mlx_peer(composed)
    peers["composed mx ops, mx.compile"] = _mlx_peer(mx.compile(composed))
    rule = NumpyRule(sampling)
    peers["NumPy"] = Peer(rule.prepare, rule.run)
    for name, make in (
        ("Hugging Face's rule, PyTorch", hugging_face),
        ("vLLM's rule, PyTorch", vllm),
    ):
        if not is_plain:
            peers[name] = Absent("measured without filters only")
        elif not is_dense:
            peers[name] = Absent("measured with dense drafts only")
        else:
            peers[name] = _optional("torch", lambda make=make: make(sampling))
    name = "flashspec-asm-kernel, residual only"
    if is_dense and is_plain:
        peers[name] = _optional("flashspec_asm_kernel", lambda: flashspec(sampling))
    else:
        peers[name] = Absent("has no filters" if is_dense else "has no one-hot drafts")
    if is_dense:
        peers["MTPLX's host rule"] = _optional("mtplx", lambda: mtplx(sampling))
    else:
        peers["MTPLX's host rule"] = Absent("measured with dense drafts only")
    return peers


def _optional(module: str, make: Callable[[], Peer]) -> Peer | Absent:
    if find_spec(module) is None:
        return Absent(f"not installed: pip install {module.replace('_', '-')}")
    try:
        return make()
    except (ImportError, OSError, RuntimeError) as error:
        return Absent(f"cannot be used here: {' '.join(str(error).split())}")


def _mlx_peer(function: Callable[[dict], tuple]) -> Peer:
    def run(inputs: dict) -> tuple:
        outputs = function(inputs)
        mx.eval(outputs)
        return outputs

    return Peer(lambda inputs: inputs, run)


# NumPy


def numpy_arrays(inputs: dict[str, mx.array]) -> dict[str, np.ndarray]:
    """The same memory as NumPy arrays; bfloat16, which NumPy lacks, as its bits in uint16."""
    return {
        name: np.array(x.view(mx.uint16) if x.dtype == mx.bfloat16 else x, copy=False)
        for name, x in inputs.items()
    }


def _float32(rows: np.ndarray) -> np.ndarray:
    if rows.dtype == np.uint16:
        return np.left_shift(rows, 16, dtype=np.uint32).view(np.float32)
    return rows if rows.dtype == np.float32 else rows.astype(np.float32)


class NumpyRule:
    """The rule as NumPy does it best: row by row up to the rejection, in buffers that stay."""

    def __init__(self, sampling: Sampling):
        self.sampling = sampling
        self._buffers: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def prepare(self, inputs: dict[str, mx.array]) -> dict[str, np.ndarray]:
        inputs = {name: x for name, x in inputs.items() if name != "draft_stats"}
        return numpy_arrays(inputs)

    def run(self, x: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        batch, num_rows, _ = x["target_logits"].shape
        tokens = np.full((batch, num_rows), -1, np.int32)
        num_accepted = np.zeros(batch, np.int32)
        for b in range(batch):
            draft = x["draft_logits"][b] if "draft_logits" in x else None
            num_accepted[b], last = self._sequence(
                x["target_logits"][b], draft, x["draft_tokens"][b], x["uniforms"][b]
            )
            n = num_accepted[b]
            tokens[b, :n] = x["draft_tokens"][b, :n]
            tokens[b, n] = last
        return tokens, num_accepted

    def _sequence(self, target, draft, tokens, uniforms) -> tuple[int, int]:
        buffers = self._buffers.setdefault(
            target.shape[1], tuple(np.empty(target.shape[1], np.float32) for _ in range(2))
        )
        weigh = self._weigh if self.sampling.top_k <= 0 else self._weigh_kept
        for slot, token in enumerate(tokens):
            p, p_sum = weigh(target[slot], buffers[0])
            if draft is None:
                if uniforms[slot] < p[token] / p_sum:
                    continue
                p[token] = 0
            else:
                q, q_sum = weigh(draft[slot], buffers[1])
                # u < p / q without dividing by a draft probability of 0
                if uniforms[slot] * (q[token] / q_sum) < p[token] / p_sum:
                    continue
                p *= 1 / p_sum
                q *= 1 / q_sum
                p -= q
                np.maximum(p, 0, out=p)
            return slot, _draw(p, uniforms[-2:])
        p, _ = weigh(target[-1], buffers[0])
        return len(tokens), _draw(p, uniforms[-2:])

    def _weigh(self, row: np.ndarray, out: np.ndarray) -> tuple[np.ndarray, np.float32]:
        row = _float32(row)
        np.subtract(row, row.max(), out=out)
        out *= np.float32(1 / self.sampling.temperature)
        np.exp(out, out=out)
        return out, out.sum()

    def _weigh_kept(self, row: np.ndarray, out: np.ndarray) -> tuple[np.ndarray, np.float32]:
        """As ``_weigh``, after top_k and top_p of the whole row's mass."""
        row = _float32(row)
        weights, total = self._weigh(row, out)
        count = min(self.sampling.top_k, len(row))
        least = row[np.argpartition(row, len(row) - count)[len(row) - count]]
        ids = np.flatnonzero(row >= least)  # ascending, with all that tie at the end
        ids = ids[np.argsort(-row[ids], kind="stable")][:count]
        kept = weights[ids]
        if 0 < self.sampling.top_p < 1:
            before = np.cumsum(kept) - kept
            ids = ids[before < self.sampling.top_p * total]
            kept = weights[ids]
        out[:] = 0
        out[ids] = kept
        return out, kept.sum()


def _draw(masses: np.ndarray, uniforms: np.ndarray) -> int:
    """In two levels, as the operation draws: a block, then an id of it."""
    blocks = np.cumsum(np.add.reduceat(masses, np.arange(0, len(masses), BLOCK)))
    start = BLOCK * min(np.searchsorted(blocks, uniforms[0] * blocks[-1], "right"), len(blocks) - 1)
    inside = np.cumsum(masses[start : start + BLOCK])
    return start + min(np.searchsorted(inside, uniforms[1] * inside[-1], "right"), len(inside) - 1)


# PyTorch: the rules as their definitions have them, all rows at once


def _torch_arrays(inputs: dict[str, mx.array]) -> dict[str, Any]:
    import torch

    tensors = {name: torch.from_numpy(x) for name, x in numpy_arrays(inputs).items()}
    for name, x in inputs.items():
        if x.dtype == mx.bfloat16:
            tensors[name] = tensors[name].view(torch.bfloat16)
    tensors["draft_tokens"] = tensors["draft_tokens"].long()
    return tensors


def hugging_face(sampling: Sampling) -> Peer:
    """Speculative sampling for one sequence at a time: Leviathan et al. 2211.17192, algorithm 1."""
    import torch

    def verify(target, draft, tokens, coins):
        p = torch.softmax(target.float() / sampling.temperature, dim=-1)
        q = torch.softmax(draft.float() / sampling.temperature, dim=-1)
        at = torch.arange(len(tokens)), tokens
        accepted = coins <= p[at] / q[at]
        n = int((~accepted).cumsum(0).lt(1).sum())
        law = p[n]
        if n < len(tokens):
            law = torch.clamp(p[n] - q[n], min=0)
            law = law / law.sum()
        last = torch.multinomial(law, 1)
        unused = torch.full((len(tokens) - n,), -1)
        return torch.cat([tokens[:n], last, unused]), n

    def run(x: dict) -> tuple:
        num_slots = x["draft_tokens"].shape[1]
        with torch.inference_mode():
            rows = zip(x["target_logits"], x["draft_logits"], x["draft_tokens"], x["uniforms"])
            results = [verify(p, q, t, u[:num_slots]) for p, q, t, u in rows]
        tokens, num_accepted = zip(*results)
        return torch.stack(tokens).numpy(), np.array(num_accepted)

    return Peer(_torch_arrays, run, same_tokens=False)


def vllm(sampling: Sampling) -> Peer:
    """Batched rejection sampling: a recovered token for every slot by an exponential race."""
    import torch

    def race(law):
        return torch.argmax(law / torch.empty_like(law).exponential_(), dim=-1)

    def run(x: dict) -> tuple:
        with torch.inference_mode():
            tokens = x["draft_tokens"]
            num_slots = tokens.shape[1]
            p = torch.softmax(x["target_logits"].float() / sampling.temperature, dim=-1)
            q = torch.softmax(x["draft_logits"].float() / sampling.temperature, dim=-1)
            p_token, q_token = (
                law[:, :num_slots].gather(2, tokens[..., None])[..., 0] for law in (p, q)
            )
            accepted = x["uniforms"][:, :num_slots] <= p_token / q_token
            residual = torch.clamp(p[:, :num_slots] - q, min=torch.finfo(torch.float32).tiny)
            recovered = race(residual / residual.sum(-1, keepdim=True))
            bonus = race(p[:, num_slots:])
            n = accepted.int().cumprod(1).sum(1)
            slots = torch.arange(num_slots + 1)
            padded = torch.cat([tokens, tokens[:, :1]], 1)
            instead = torch.cat([recovered, bonus], 1)
            result = torch.where(slots < n[:, None], padded, instead)
            result = torch.where(slots <= n[:, None], result, -1)
        return result.numpy(), n.numpy()

    return Peer(_torch_arrays, run, same_tokens=False)


# Packages


def flashspec(sampling: Sampling) -> Peer:
    """The residual of one row from two finished distributions: what the package offers."""
    import flashspec_asm_kernel

    rule = NumpyRule(sampling)

    def prepare(inputs: dict[str, mx.array]) -> tuple:
        x = rule.prepare(inputs)
        pairs = []
        for b, slot in enumerate(_rejections(x, rule)):
            rows = x["target_logits"][b, slot], x["draft_logits"][b, slot]
            weighed = [rule._weigh(row, np.empty(len(row), np.float32)) for row in rows]
            pairs.append([weights / total for weights, total in weighed])
        out = np.empty_like(pairs[0][0])
        return pairs, out

    def run(x: tuple) -> tuple:
        pairs, out = x
        for p, q in pairs:
            flashspec_asm_kernel.residual_dist(p, q, out)
        return out, None

    return Peer(prepare, run, part="the residual of two finished distributions")


def _rejections(x: dict[str, np.ndarray], rule: NumpyRule) -> np.ndarray:
    """Of each sequence the slot whose residual is drawn from (the last one, if none is)."""
    return np.minimum(rule.run(x)[1], x["draft_tokens"].shape[1] - 1)


def mtplx(sampling: Sampling) -> Peer:
    """Its sampling module on the host, slot by slot until one is rejected."""
    from mtplx.sampling import (
        SamplerConfig,
        distribution_from_logits,
        sample_from_distribution,
        verify_one_token,
    )

    config = SamplerConfig(sampling.temperature, sampling.top_p, max(sampling.top_k, 0))

    class Noise:
        """The given coin, then a generator's draw."""

        generator = np.random.default_rng(0)

        def random(self) -> float:
            return self.coin

        def choice(self, a, p):
            return self.generator.choice(a, p=p)

    noise = Noise()

    def run(x: dict) -> tuple:
        batch, num_rows, _ = x["target_logits"].shape
        tokens = np.full((batch, num_rows), -1, np.int32)
        num_accepted = np.zeros(batch, np.int32)
        for b in range(batch):
            for slot in range(num_rows):
                p = distribution_from_logits(_float32(x["target_logits"][b, slot]), config)
                if slot == num_rows - 1:
                    tokens[b, slot] = sample_from_distribution(p, noise)
                    break
                q = distribution_from_logits(_float32(x["draft_logits"][b, slot]), config)
                noise.coin = x["uniforms"][b, slot]
                decision = verify_one_token(p, q, x["draft_tokens"][b, slot], noise)
                tokens[b, slot] = decision.token_id
                if not decision.accepted:
                    break
                num_accepted[b] += 1
        return tokens, num_accepted

    return Peer(NumpyRule(sampling).prepare, run, same_tokens=False)
