"""Draws the pictures of docs/rules.md, all from results of the operations themselves.

python docs/draw_rules.py
"""

from __future__ import annotations

from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import mlx.core as mx
import numpy as np
from exactspec import Sampling, Typical, sample, verify_draft, verify_tree

TARGET, DRAFT = "#3b75af", "#c8872e"
ACCEPTED, REJECTED, RESIDUAL = "#4a9a5b", "#c0504d", "#d9b63a"

matplotlib.rcParams.update(
    {
        "svg.hashsalt": "exactspec",  # the same picture from the same numbers
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "figure.facecolor": "white",
    }
)


def save(figure: plt.Figure, name: str) -> None:
    figure.tight_layout()
    figure.savefig(Path(__file__).with_name(f"rule_{name}.svg"), metadata={"Date": None})
    plt.close(figure)


def random_rows(seed: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Logits of a target and of a draft that follows it."""
    rng = np.random.default_rng(seed)
    target = rng.normal(size=size) * 1.2
    return target.astype(np.float32), (target + rng.normal(size=size) * 0.9).astype(np.float32)


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def draw_token() -> None:
    """Where a token's probability comes from, and how often it is emitted."""
    logits, draft_logits = random_rows(12, 8)
    target, draft = softmax(logits), softmax(draft_logits)
    n = 20_000
    shared = [mx.broadcast_to(mx.array(x), (n, *x.shape)) for x in (logits, draft_logits)]
    drawn = sample(shared[1], keys=mx.random.split(mx.random.key(1), n)).tokens
    rows = mx.stack([shared[0], shared[0]], axis=1)
    result = verify_draft(
        rows,
        drawn[:, None],
        draft_logits=shared[1][:, None],
        keys=mx.random.split(mx.random.key(2), n),
    )
    emitted = np.bincount(np.array(result.tokens[:, 0]), minlength=8) / n
    overlap = np.minimum(target, draft)
    ids = np.arange(8)
    figure, axes = plt.subplots(figsize=(6.4, 2.8))
    axes.bar(ids, overlap, 0.62, color=ACCEPTED, label="accepted draft: min(target, draft)")
    axes.bar(ids, target - overlap, 0.62, overlap, color=RESIDUAL, label="drawn from the residual")
    axes.bar(
        *(ids, draft - overlap, 0.62, overlap),
        **{"facecolor": "none", "edgecolor": REJECTED, "hatch": "////", "linewidth": 0.8},
        label="rejected draft",
    )
    axes.plot(ids, emitted, "k_", markersize=22, label=f"emitted in {n:,} calls")
    axes.set(xlabel="token id", ylabel="probability", xticks=ids)
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    save(figure, "token")


def draw_block() -> None:
    """The mean accepted length of token and block on the same rows, by the length of the draft."""
    target, draft = np.log([1 / 3, 2 / 3]), np.log([2 / 3, 1 / 3])
    n, lengths = 100_000, range(1, 9)
    means: dict[str, list[float]] = {"token": [], "block": []}
    for K in lengths:
        rows = mx.broadcast_to(mx.array(target.astype(np.float32)), (n, K + 1, 2))
        draft_rows = mx.broadcast_to(mx.array(draft.astype(np.float32)), (n, K, 2))
        keys = mx.random.split(mx.random.key(K), n * K)
        tokens = sample(draft_rows.reshape(-1, 2), keys=keys).tokens.reshape(n, K)
        for rule, values in means.items():
            keys = mx.random.split(mx.random.key(100 + K), n)
            result = verify_draft(rows, tokens, draft_logits=draft_rows, rule=rule, keys=keys)
            values.append(mx.mean(result.num_accepted).item())
    figure, axes = plt.subplots(figsize=(6.4, 2.8))
    axes.plot(lengths, means["token"], "o-", color=DRAFT, label="token")
    axes.plot(lengths, means["block"], "s-", color=ACCEPTED, label="block")
    for K, low, high in zip(lengths, *means.values()):
        if high > low * 1.01:
            axes.annotate(f"+{high / low - 1:.0%}", (K, high), (0, 6), textcoords="offset points",
                          ha="center", color=ACCEPTED)  # fmt: skip
    axes.set(xlabel="draft tokens", ylabel="mean accepted length", ylim=(0, None))
    axes.legend(frameon=False, loc="lower right")
    save(figure, "block")


def draw_coupled() -> None:
    """Target and draft choose by the same noise: usually the same token."""
    size, position = 8, 5
    logits, draft_logits = random_rows(8, size)
    key = mx.random.key(4)
    at = mx.array(position, mx.int32)

    # The noise itself: of rows where one id has a large head start there is none to be seen, so it
    # is found from which of two ids wins as their logits approach each other.
    def noise_gap(a: int, b: int) -> float:
        low, high = -40.0, 40.0
        for _ in range(40):
            middle = (low + high) / 2
            row = np.full(size, -np.inf, np.float32)
            row[[a, b]] = 0, middle
            won = sample(mx.array(row), rule="coupled", keys=key, positions=at).tokens.item()
            low, high = (middle, high) if won == a else (low, middle)
        return low

    noise = np.array([0.0] + [-noise_gap(0, b) for b in range(1, size)])
    noise -= noise.min()
    figure, both = plt.subplots(1, 2, figsize=(6.4, 2.8), sharey=True)
    for axes, row, name, colour in zip(
        both, (logits, draft_logits), ("target", "draft"), (TARGET, DRAFT)
    ):
        chosen = sample(mx.array(row), rule="coupled", keys=key, positions=at).tokens.item()
        scaled = row - row.min()
        assert chosen == (scaled + noise).argmax()
        edges = [ACCEPTED if i == chosen else "none" for i in range(size)]
        axes.bar(range(size), scaled, 0.7, color=colour, label="logit")
        axes.bar(range(size), noise, 0.7, scaled, color="#bbbbbb", label="shared noise")
        total = scaled + noise
        axes.bar(range(size), total, 0.7, color="none", edgecolor=edges, linewidth=2.2)
        axes.set(title=f"{name}: chooses {chosen}", xlabel="token id", xticks=range(size))
        axes.legend(frameon=False, loc="upper left")
    both[0].set_ylim(0, 1.35 * both[0].get_ylim()[1])
    save(figure, "coupled")


def draw_tree() -> None:
    """One call of verify_tree: which nodes were accepted, rejected, or never tried."""
    parents = [-1, -1, -1, 0, 0, 1, 1, 5, 5]
    depth: list[int] = []
    for parent in parents:
        depth.append(0 if parent < 0 else depth[parent] + 1)
    rng = np.random.default_rng(5)
    rows = rng.normal(size=(len(parents) + 1, 12)).astype(np.float32) * 1.3
    children: dict[int, int] = {}
    tokens = []
    for parent in parents:
        rank = children[parent] = children.get(parent, -1) + 1
        tokens.append(int(np.argsort(-rows[parent + 1])[rank]))
    args = (mx.array(rows), mx.array(tokens), mx.array(parents))
    for seed in range(100):
        result = verify_tree(*args, keys=mx.random.key(seed))
        path = result.path.tolist()[: result.num_accepted.item()]
        if path == [1, 5]:  # a rejection on the way, and one at the end
            break
    next_token = result.tokens.tolist()[len(path)]
    reached = [-1, *path]
    rejected = {
        node
        for node, parent in enumerate(parents)
        if parent in reached and node not in path
        and (parent == reached[-1] or node < path[reached.index(parent)])
    }  # fmt: skip

    def leaves_of(node: int) -> list[int]:
        below = [c for c, parent in enumerate(parents) if parent == node]
        return [leaf for c in below for leaf in leaves_of(c)] if below else [node]

    leaves = leaves_of(-1)
    place: dict[int, float] = {leaf: float(i) for i, leaf in enumerate(leaves)}
    for node in reversed(range(-1, len(parents))):
        if node not in place:
            below = [place[c] for c, parent in enumerate(parents) if parent == node]
            place[node] = sum(below) / len(below)
    figure, axes = plt.subplots(figsize=(6.4, 3.0))

    def at(node: int) -> tuple[float, float]:
        return (0.0 if node < 0 else depth[node] + 1.0), -place[node]

    for node, parent in enumerate(parents):
        colour = ACCEPTED if node in path else "#bbbbbb"
        axes.plot(*zip(at(parent), at(node)), "-", color=colour, zorder=1, linewidth=1.8)
    kinds = {"accepted": ACCEPTED, "rejected": REJECTED, "not tried": "#bbbbbb"}
    for kind, colour in kinds.items():
        axes.scatter([], [], color=colour, label=kind)
    for node, parent in enumerate(parents):
        kind = "accepted" if node in path else "rejected" if node in rejected else "not tried"
        axes.scatter(*at(node), s=330, color=kinds[kind], zorder=2)
        axes.text(*at(node), str(tokens[node]), ha="center", va="center", color="white", zorder=3)
        prob = softmax(rows[parent + 1])[tokens[node]]
        axes.text(at(node)[0], at(node)[1] - 0.42, f"target {prob:.2f}", ha="center", va="center",
                  fontsize=7)  # fmt: skip
    axes.scatter(*at(-1), s=480, color=TARGET, zorder=2)
    axes.text(*at(-1), "text", ha="center", va="center", color="white", fontsize=8, zorder=3)
    end = at(path[-1])
    axes.annotate(f"next: {next_token}", end, (end[0] + 1, end[1] - 1.5), ha="center", va="center",
                  arrowprops={"arrowstyle": "<-", "color": RESIDUAL, "linewidth": 1.8},
                  bbox={"boxstyle": "round", "fc": RESIDUAL, "ec": "none"})  # fmt: skip
    axes.legend(frameon=False, loc="upper right")
    axes.set(xlim=(-0.4, 4.2), ylim=(-len(leaves) + 0.2, 0.6))
    axes.axis("off")
    save(figure, "tree")


def draw_typical() -> None:
    """Which target probabilities are accepted at which entropy of the target."""
    rng = np.random.default_rng(1)
    n, size = 3000, 64
    scales = rng.uniform(0.2, 6, size=(n, 1))
    rows = (rng.normal(size=(n, size)) * scales).astype(np.float32)
    tokens = sample(mx.array(rows), Sampling(1.3), keys=mx.random.split(mx.random.key(0), n)).tokens
    both = mx.broadcast_to(mx.array(rows)[:, None], (n, 2, size))
    keys = mx.random.split(mx.random.key(1), n)
    result = verify_draft(both, tokens[:, None], rule=Typical(), keys=keys, stats=True)
    entropy, prob = (np.array(x[:, 0]) for x in (result.stats.target_entropy, result.stats.overlap))
    accepted = np.array(result.num_accepted) == 1
    figure, axes = plt.subplots(figsize=(6.4, 2.8))
    for chosen, colour, label in (
        (accepted, ACCEPTED, "accepted"),
        (~accepted, REJECTED, "rejected"),
    ):
        axes.scatter(entropy[chosen], prob[chosen], 3, color=colour, label=label, rasterized=True)
    x = np.linspace(0, np.log(size), 200)
    axes.plot(x, np.minimum(0.09, 0.3 * np.exp(-x)), "k-", linewidth=1.2,
              label="min(epsilon, delta exp(-entropy))")  # fmt: skip
    axes.set(yscale="log", ylim=(1e-4, 1.2), xlabel="entropy of the target (nats)",
             ylabel="target(x)")  # fmt: skip
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    save(figure, "typical")


def draw_cascade() -> None:
    """Who decides a slot, by the confidence of both."""
    alpha = 0.2
    figure, axes = plt.subplots(figsize=(4.4, 3.0))
    x = np.linspace(0, 1, 100)
    border = np.clip(x + alpha, 0, 1)
    axes.fill_between(x, border, 1, color=TARGET, alpha=0.75, linewidth=0)
    axes.fill_between(x, 0, border, color=DRAFT, alpha=0.75, linewidth=0)
    axes.text(0.28, 0.83, "target decides:\ntoken rule", color="white", ha="center", va="center")
    axes.text(0.66, 0.35, "draft decides:\naccepted", color="white", ha="center", va="center")
    axes.annotate("alpha", (0.015, alpha / 2), (0.07, alpha / 2), va="center", color="white",
                  arrowprops={"arrowstyle": "-[, widthB=1.6", "color": "white"})  # fmt: skip
    axes.set(xlim=(0, 1), ylim=(0, 1), xlabel="largest draft probability",
             ylabel="largest target probability")  # fmt: skip
    save(figure, "cascade")


if __name__ == "__main__":
    draw_token()
    draw_block()
    draw_coupled()
    draw_tree()
    draw_typical()
    draw_cascade()
