"""Training of the head on shards of texts, resumable from a checkpoint."""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from head import DraftLoss, Head, save_head, start_from
from rich.progress import Progress
from safetensors.torch import load_file
from sampling import ChatTemplate, shard_paths
from target import Target
from torch import Tensor
from torch.distributed.optim import ZeroRedundancyOptimizer

DRAFT_VOCAB = 8192
VOCAB_ROWS = 40_000
# Entries of one optimiser step.
BATCH = 1024
# Of matrices, by Muon, and of norms, by AdamW.
MATRIX_RATE, NORM_RATE = 0.02, 1.2e-3
WARM_UP = 0.03
# Of both, when training goes on from trained weights.
CONTINUED_RATE = 0.5
# Parts of the training after which the second step and the total variation come in.
SECOND_STEP_FROM, TV_FROM, TV_WEIGHT = 0.6, 0.7, 4.0
LOG_UPDATES, CHECKPOINT_UPDATES = 100, 200


class Texts:
    """All texts of a data folder in memory."""

    def __init__(self, folder: Path) -> None:
        shards, starts, total = [], [], 0
        for path in shard_paths(folder):
            shard = load_file(path)
            shards.append(shard)
            starts.append(shard["starts"].long() + total)
            total += len(shard["ids"])
        if not shards:
            raise FileNotFoundError(f"[Texts] folder: expected shards, got none in {folder}")
        self.ids, self.hidden, self.log_sum = (
            torch.cat([shard[name] for shard in shards]) for name in ("ids", "hidden", "log_sum")
        )
        self.starts = torch.cat(starts)
        self.lengths = torch.diff(self.starts, append=torch.tensor([total]))
        self.temperatures = torch.cat([shard["temperatures"] for shard in shards])
        self.prompts = torch.cat([shard["prompts"] for shard in shards])

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

    @torch.inference_mode()
    def likely_ids(self, target: Target, count: int, seed: int) -> Tensor:
        """Ids with the most of the target's probability, sorted; over a sample of positions.

        Probabilities count rather than tokens: they rank rare ids by far fewer texts.
        """
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randperm(len(self.ids), generator=generator)[:VOCAB_ROWS]
        mass = torch.zeros(target.args.vocab_size)
        for part in rows.split(256):
            logits = target.logits(self.hidden[part]).float()
            mass += (logits - self.log_sum[part, None]).exp_().sum(0)
        return mass.topk(count).indices.sort().values

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
    """What a checkpoint holds besides the weights; it is of one folder, schedule and beginning."""

    data_tokens: int
    wanted: int
    # Data and training of the stages whose weights this one began with.
    before: list[dict] = field(default_factory=list)
    vocab: Tensor | None = None
    trained: int = 0
    seconds: float = 0.0
    updates: int = 0
    epoch: int = 0
    batch: int = 0
    log: list[dict] = field(default_factory=list)

    def about(self) -> str:
        begun = sum(stage["training"]["tokens"] for stage in self.before)
        return (
            f"{self.data_tokens} tokens of data and {self.wanted} to train on, after {begun} before"
        )


def optimizers(head: Head, rate: float) -> list[torch.optim.Optimizer]:
    matrices = [w for w in head.parameters() if w.ndim == 2]
    norms = [w for w in head.parameters() if w.ndim < 2]
    return [
        # Half of a small batch's time; each process does its part of the matrices.
        ZeroRedundancyOptimizer(
            matrices, torch.optim.Muon, lr=rate * MATRIX_RATE, weight_decay=0.1
        ),
        torch.optim.AdamW(norms, rate * NORM_RATE, (0.9, 0.95), weight_decay=0),
    ]


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
    skip: int,
    tokens: int,
    seed: int,
    checkpoint: Path,
    progress: Progress | None,
    export: Callable[[State], None],
    vocab: Tensor | None = None,
    before: Sequence[dict] = (),
) -> State:
    """Train on ``tokens`` tokens, several epochs if need be.

    Every process of the group takes its share of each step's batch, and they add up their
    gradients; the one of rank 0 saves and shows progress.

    Args:
        skip: tokens that all texts begin with; nothing is learned from them.
        checkpoint: a file to go on from, if it exists, and to save to.
        export: called after every save.
        vocab, before: the draft vocabulary and the making of the weights that ``head`` has, if
            they are trained ones.

    Raises:
        ValueError: the checkpoint is of other data, of another number of tokens, or of another
            beginning.
    """
    rate = CONTINUED_RATE if before else 1.0
    rank, size = dist.get_rank(), dist.get_world_size()
    state, makers = State(len(texts.ids), tokens, [*before]), optimizers(head, rate)
    # Before a checkpoint is loaded: they keep the rates that the optimisers began with.
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(maker, lambda _: learning_rate(state.trained / tokens))
        for maker in makers
    ]
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        state, wanted = State(**saved["state"]), state
        if state.about() != wanted.about():
            raise ValueError(
                f"[train] checkpoint: expected one of {wanted.about()}, got {state.about()}; "
                f"delete {checkpoint} to train anew"
            )
        head.load_state_dict(saved["head"])
        for maker, maker_state in zip(makers, saved["optimizers"]):
            maker.load_state_dict(maker_state)
    else:
        state.vocab = texts.likely_ids(target, DRAFT_VOCAB, seed) if vocab is None else vocab
    task = progress.add_task("train", total=tokens) if progress else None

    def save() -> None:
        makers[0].consolidate_state_dict()
        if rank == 0:
            makers_state = [maker.state_dict() for maker in makers]
            saved = {"head": head.state_dict(), "optimizers": makers_state, "state": vars(state)}
            unfinished = checkpoint.with_suffix(".part")
            torch.save(saved, unfinished)
            os.replace(unfinished, checkpoint)
            export(state)

    recent = []
    while state.trained < tokens:
        batches = texts.batches(BATCH // size, random.Random(f"{seed} {state.epoch}"))
        # Every process has a batch in every step.
        batches = batches[: len(batches) // size * size]
        while state.batch < len(batches) and state.trained < tokens:
            began = time.monotonic()
            done = state.trained / tokens
            steps = 2 if done >= SECOND_STEP_FROM else 1
            tv_weight = TV_WEIGHT * max(0.0, (done - TV_FROM) / (1 - TV_FROM))
            batch = batches[state.batch + rank]
            with torch.autocast("cpu", torch.bfloat16):
                loss, sums = loss_of_batch(
                    head, target, texts, batch, state.vocab, skip, steps, tv_weight
                )
            loss.backward()
            for shared in (*(w.grad for w in head.parameters()), sums):
                dist.all_reduce(shared)
            for w in head.parameters():
                w.grad /= sums[:, 3].sum()
            norm = torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
            state.trained += int(sums[0, 3])
            for maker, schedule in zip(makers, schedules):
                maker.step()
                maker.zero_grad()
                schedule.step()
            state.updates += 1
            state.batch += size
            state.seconds += time.monotonic() - began
            recent.append((sums, float(norm)))
            if len(recent) == LOG_UPDATES or state.trained >= tokens:
                state.log.append(_summary(recent, state))
                recent = []
                if progress:
                    progress.console.print(_line(state.log[-1]))
            if progress:
                progress.update(task, completed=state.trained)
            if state.updates % CHECKPOINT_UPDATES == 0:
                save()
        if state.batch >= len(batches):
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


def train_on_folder(
    folder: Path,
    tokens: int,
    seed: int,
    workers: int,
    head_file: Path | None = None,
    progress: Progress | None = None,
    rank: int = 0,
) -> tuple[Head, Target, Texts, State]:
    """Train a head on the shards in ``folder``, with a process a worker, this one included.

    It goes on from the weights in ``head_file``, if given. Its checkpoint, and the weights as they
    are so far, are kept in ``folder``.
    """
    # Threads of one process would wait for each other after every operation.
    torch.set_num_threads(1)
    context = torch.multiprocessing.get_context("spawn")
    others = [
        context.Process(
            target=train_on_folder,
            args=(folder, tokens, seed, workers, head_file, None, r),
            daemon=True,
        )
        for r in range(1, workers if rank == 0 else 0)
    ]
    meeting = folder / "meeting"
    if rank == 0:
        meeting.unlink(missing_ok=True)
    for other in others:
        other.start()
    dist.init_process_group(
        "gloo", init_method=meeting.absolute().as_uri(), rank=rank, world_size=workers
    )
    target, texts = Target(torch.bfloat16), Texts(folder)
    torch.manual_seed(seed)
    head = Head(target.args, target.norm.float())
    vocab, before = start_from(head_file, head) if head_file else (None, [])
    skip = len(ChatTemplate(target.tokenizer).before)

    def export(state: State) -> None:
        save_head(folder / "head.safetensors", head, state.vocab, target, {})

    checkpoint = folder / "checkpoint.pt"
    state = train(
        head, target, texts, skip, tokens, seed, checkpoint, progress, export, vocab, before
    )
    for other in others:
        other.join()
    dist.destroy_process_group()
    return head, target, texts, state
