"""Training of the head on shards of texts, resumable from a checkpoint."""

from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from head import DraftLoss, Head
from rich.progress import Progress
from safetensors.torch import load_file
from sampling import shard_paths
from target import Target
from torch import Tensor

DRAFT_VOCAB = 8192
# Entries of one optimiser step.
BATCH = 4096
LEARNING_RATE = 1.2e-3
WARM_UP = 0.03
# Parts of the training after which the second step and the total variation come in.
SECOND_STEP_FROM, TV_FROM, TV_WEIGHT = 0.5, 0.7, 2.0
CHECKPOINT_SECONDS = 120


class Texts:
    """All texts of a data folder in memory."""

    def __init__(self, folder: Path, limit: int | None = None) -> None:
        shards, starts, total = [], [], 0
        for path in shard_paths(folder):
            shard = load_file(path)
            shards.append(shard)
            starts.append(shard["starts"].long() + total)
            total += len(shard["ids"])
            if limit is not None and total >= limit:
                break
        if not shards:
            raise FileNotFoundError(f"[Texts] folder: expected shards, got none in {folder}")
        self.ids, self.hidden, self.log_sum = (
            torch.cat([shard[name] for shard in shards]) for name in ("ids", "hidden", "log_sum")
        )
        self.starts = torch.cat(starts)
        self.lengths = torch.diff(self.starts, append=torch.tensor([total]))
        self.temperatures = torch.cat([shard["temperatures"] for shard in shards])
        self.prompts = torch.cat([shard["prompts"] for shard in shards])

    def num_entries(self, skip: int) -> int:
        """Entries with a loss, those of the first ``skip`` tokens left out."""
        return int((self.lengths - 1 - skip).sum())

    def summary(self) -> dict:
        temperatures, counts = self.temperatures.unique(return_counts=True)
        return {
            "texts": len(self.lengths),
            "tokens": len(self.ids),
            "answer_tokens": int((self.lengths - self.prompts).sum()),
            "texts_by_temperature": {
                f"{t:.1f}": n for t, n in zip(temperatures.tolist(), counts.tolist())
            },
        }

    def frequent_ids(self, count: int) -> Tensor:
        counts = torch.bincount(self.ids.long())
        return counts.topk(count).indices.sort().values

    def batches(self, entries: int, rng: random.Random) -> list[list[int]]:
        """An epoch: every text once, those of a batch of about the same length."""
        order = sorted(range(len(self.lengths)), key=lambda i: self.lengths[i] + 24 * rng.random())
        batches, batch = [], []
        for i in order:
            if batch and (len(batch) + 1) * int(self.lengths[i]) > entries:
                batches.append(batch)
                batch = []
            batch.append(i)
        batches.append(batch)
        rng.shuffle(batches)
        return batches

    def padded(self, batch: list[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """ids, hidden states, logarithms of sums and lengths, padded at the end."""
        lengths = self.lengths[batch]
        offsets = torch.arange(int(lengths.max())).clamp_max((lengths - 1)[:, None])
        index = self.starts[batch][:, None] + offsets
        return self.ids[index].long(), self.hidden[index], self.log_sum[index], lengths


@dataclass
class State:
    """What a checkpoint holds besides the weights."""

    trained: int = 0
    seconds: float = 0.0
    updates: int = 0
    epoch: int = 0
    batch: int = 0
    log: list[dict] = field(default_factory=list)


def optimizers(head: Head) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(head.parameters(), LEARNING_RATE, (0.9, 0.95), weight_decay=0.01)]


def learning_rate(progress: float) -> float:
    """Relative: a linear warm-up, then a cosine to 0."""
    rising = min(1.0, (progress + 1e-3) / WARM_UP)
    return rising * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def loss_of_batch(head, target, texts, batch, vocab, skip, steps, tv_weight):
    """Loss summed over entries and steps; per step its three sums and its number of entries."""
    ids, hidden, log_sum, lengths = texts.padded(batch)
    # Ids of the batch join the vocabulary, as those of the context do in use.
    vocab_matrix = target.embedding[torch.cat((vocab, ids.view(-1))).unique()]
    embeddings = target.embedding[ids[:, 1:]]
    inputs, memory, loss, sums = hidden[:, :-1], head.new_memory(), 0.0, []
    entries = torch.arange(inputs.shape[1])
    for step in range(steps):
        out = head(embeddings, inputs, memory)
        counted = (entries >= skip + step) & (entries < (lengths - 1)[:, None])
        step_loss, step_sums = DraftLoss.apply(
            out[counted].to(hidden.dtype),
            hidden[:, 1:][counted],
            log_sum[:, 1:][counted],
            vocab_matrix,
            tv_weight,
        )
        loss = loss + step_loss
        sums.append(torch.cat((step_sums, counted.sum()[None])))
        inputs = torch.cat((inputs[:, :1], out[:, :-1]), 1)
    return loss, torch.stack(sums)


def train(
    head: Head,
    target: Target,
    texts: Texts,
    vocab: Tensor,
    skip: int,
    tokens: int,
    seed: int,
    checkpoint: Path | None,
    progress: Progress,
    export=lambda state: None,
) -> State:
    """Train on ``tokens`` tokens, several epochs if need be.

    Args:
        skip: tokens that all texts begin with; nothing is learned from them.
        checkpoint: a file to go on from and to save to.
        export: called at every checkpoint.
    """
    state, makers = State(), optimizers(head)
    if checkpoint is not None and checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        head.load_state_dict(saved["head"])
        for maker, maker_state in zip(makers, saved["optimizers"]):
            maker.load_state_dict(maker_state)
        state = State(**saved["state"])
    rates = [[group["lr"] for group in maker.param_groups] for maker in makers]
    if "initial_lr" in makers[0].param_groups[0]:
        rates = [[group["initial_lr"] for group in maker.param_groups] for maker in makers]

    def save() -> None:
        if checkpoint is None:
            return
        torch.save(
            {
                "head": head.state_dict(),
                "optimizers": [maker.state_dict() for maker in makers],
                "state": vars(state),
            },
            checkpoint,
        )
        export(state)

    for maker, maker_rates in zip(makers, rates):
        for group, rate in zip(maker.param_groups, maker_rates):
            group["initial_lr"] = rate
    task = progress.add_task("train", total=tokens, completed=state.trained)
    saved_at, recent = time.monotonic(), []
    while state.trained < tokens:
        batches = texts.batches(BATCH, random.Random(f"{seed} {state.epoch}"))
        while state.batch < len(batches) and state.trained < tokens:
            began = time.monotonic()
            part = state.trained / tokens
            steps = 2 if part >= SECOND_STEP_FROM else 1
            tv_weight = TV_WEIGHT * max(0.0, (part - TV_FROM) / (1 - TV_FROM))
            with torch.autocast("cpu", torch.bfloat16):
                loss, sums = loss_of_batch(
                    head, target, texts, batches[state.batch], vocab, skip, steps, tv_weight
                )
            (loss / sums[:, 3].sum()).backward()
            nn_norm = torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
            for maker in makers:
                for group in maker.param_groups:
                    group["lr"] = group["initial_lr"] * learning_rate(part)
                maker.step()
                maker.zero_grad()
            state.trained += int(sums[0, 3])
            state.updates += 1
            state.batch += 1
            state.seconds += time.monotonic() - began
            recent.append((sums, float(nn_norm)))
            if len(recent) == 25 or state.trained >= tokens:
                state.log.append(_summary(recent, state))
                progress.console.print(_line(state.log[-1]))
                recent = []
            progress.update(task, completed=state.trained)
            if time.monotonic() - saved_at > CHECKPOINT_SECONDS:
                save()
                saved_at = time.monotonic()
        if state.batch == len(batches):
            state.epoch, state.batch = state.epoch + 1, 0
    save()
    return state


def _summary(recent: list, state: State) -> dict:
    entry = {"trained": state.trained, "seconds": round(state.seconds)}
    for step in range(len(recent[-1][0])):
        sums = torch.stack([sums[step] for sums, _ in recent if len(sums) > step]).sum(0)
        values = (sums[:3] / sums[3]).tolist()
        names = ("cross_entropy", "acceptance", "mass")
        entry |= {f"{n}_{step + 1}": round(v, 4) for n, v in zip(names, values)}
    entry["gradient_norm"] = round(sum(norm for _, norm in recent) / len(recent), 3)
    return entry


def _line(entry: dict) -> str:
    return "  ".join(f"{name} {value}" for name, value in entry.items())
