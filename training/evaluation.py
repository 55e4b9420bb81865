"""Acceptance of the head's drafts, by depth, on the target's answers to held-out prompts."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from head import Head
from rich.progress import Progress
from sampling import ChatTemplate, Request, Text, load_shard, sample_texts, save_shard
from target import Target
from torch import Tensor

HELD_OUT = Path(__file__).with_name("held_out.json")
TEMPERATURES = (0.0, 0.7, 1.0)
DEPTH = 4
MAX_LENGTH = 320
# Of a text's positions, every one so many starts a draft.
STRIDE = 8
# Not the training's: heads of different seeds are measured on the same texts.
SEED = 1


def load_held_out_texts(path: Path, target: Target) -> list[tuple[str, Text]]:
    """The target's answers at each temperature, each with the kind of its prompt.

    They are sampled once and kept in ``path``, a shard.
    """
    template = ChatTemplate(target.tokenizer)
    prompts = json.loads(HELD_OUT.read_text())
    wanted = [(row, temperature) for row in prompts for temperature in TEMPERATURES]
    if not path.exists():
        requests = [Request(template.ids(row["prompt"]), t) for row, t in wanted]
        generator = torch.Generator().manual_seed(SEED)
        num_slots = len(requests)
        save_shard(
            path,
            list(sample_texts(target, iter(requests), template, generator, num_slots, MAX_LENGTH)),
        )
    kinds = {tuple(template.ids(row["prompt"])): row["kind"] for row in prompts}
    texts = load_shard(path)
    return [(kinds[tuple(text.ids[: text.prompt].tolist())], text) for text in texts]


def _distribution(logits: Tensor, temperature: float) -> Tensor:
    if temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).float()
    return torch.softmax(logits / temperature, -1)


@torch.inference_mode()
def acceptance(
    head: Head, target: Target, vocab: Tensor, text: Text, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """For each depth, the sum of weights and of weighted acceptances of drafts in the answer.

    Drafts are drawn from the head, at every ``STRIDE``-th token. At each depth a draft counts with
    the probability that all its tokens before were accepted, and its acceptance is 1 - total
    variation; that is the mean over coins of counting accepted tokens. The draft vocabulary has,
    besides ``vocab``, the ids in the text before the draft.
    """
    ids, temperature = text.ids.long(), text.temperature
    length = len(ids)
    hidden = target.forward(ids, torch.arange(length))
    # Entry j's first draft follows token j + 1.
    entries = torch.arange(text.prompt - 2, length - DEPTH, STRIDE)
    columns, first = _columns(ids, vocab)
    known = first <= entries[:, None] + 1
    matrix = target.embedding[columns]

    tokens, drafts, memory = [], [], head.new_memory()
    embeddings, inputs = target.embedding[ids[1:]][None], hidden[None, :-1]
    for depth in range(DEPTH):
        out = head(embeddings, inputs, memory)
        logits = (out[0, entries + depth] @ matrix.T).float()
        draft = _distribution(logits.masked_fill(~known, float("-inf")), temperature)
        drawn = columns[torch.multinomial(draft, 1, generator=generator)[:, 0]]
        tokens.append(drawn)
        drafts.append(draft)
        # The next entry takes the drafted token, and this one's output.
        embeddings = embeddings.clone()
        embeddings[0, (entries + depth + 1).clamp_max(length - 2)] = target.embedding[drawn]
        inputs = torch.cat((inputs[:, :1], out[:, :-1]), 1)

    after = target_after_chains(target, ids, entries + 1, torch.stack(tokens, 1))
    weight, weights, accepted = torch.ones(len(entries)), [], []
    for depth, (drawn, draft) in enumerate(zip(tokens, drafts)):
        wanted = _distribution(target.logits(after[:, depth]).float(), temperature)
        overlap = torch.minimum(wanted[:, columns], draft).sum(-1)
        weights.append(weight.sum())
        accepted.append((weight * overlap).sum())
        at, column = torch.arange(len(entries)), torch.searchsorted(columns, drawn)
        weight = weight * (wanted[at, drawn] / draft[at, column]).clamp_max(1)
    return torch.stack(weights), torch.stack(accepted)


def _columns(ids: Tensor, vocab: Tensor) -> tuple[Tensor, Tensor]:
    """Ids of the draft vocabulary, sorted, and the position from which on each belongs to it."""
    columns = torch.cat((vocab, ids)).unique()
    first = torch.full((int(columns.max()) + 1,), len(ids))
    first.scatter_reduce_(0, ids, torch.arange(len(ids)), "amin")
    first[vocab] = 0
    return columns, first[columns]


def target_after_chains(target: Target, ids: Tensor, last: Tensor, chains: Tensor) -> Tensor:
    """Hidden states ``[P, K, d]`` after ``ids[: last + 1]`` and the first 0 to K - 1 of a chain.

    One forward of the text and all chains ``[P, K]``, each of which sees the text up to ``last``.
    """
    (count, depth), length = chains.shape, len(ids)
    steps = torch.arange(1, depth + 1)
    positions = torch.cat((torch.arange(length), (last[:, None] + steps).flatten()))
    total = len(positions)
    mask = torch.zeros(total, total, dtype=torch.bool)
    mask[:length, :length] = True
    mask[:length, :length].tril_()
    mask[length:, :length] = torch.arange(length) <= last.repeat_interleave(depth)[:, None]
    chain = torch.ones(depth, depth, dtype=torch.bool).tril()
    mask[length:, length:] = torch.block_diag(*[chain] * count)
    hidden = target.forward(torch.cat((ids, chains.flatten())), positions, mask)
    first = hidden[last].unsqueeze(1)
    return torch.cat((first, hidden[length:].view(count, depth, -1)[:, :-1]), 1)


def _start(weights: dict[str, Tensor], vocab: Tensor) -> None:
    global _acceptance_of
    # Threads of one process would wait for each other after every operation.
    torch.set_num_threads(1)
    target = Target(torch.float32)
    head = Head(target.args, target.norm)
    head.load_state_dict(weights)

    def _acceptance_of(text: Text, number: int) -> Tensor:
        generator = torch.Generator().manual_seed(SEED + number)
        return torch.stack(acceptance(head, target, vocab, text, generator))


def _measure(job: tuple[int, str, Text]) -> tuple[str, float, Tensor]:
    number, kind, text = job
    return kind, text.temperature, _acceptance_of(text, number)


def evaluate(
    head: Head,
    vocab: Tensor,
    texts: list[tuple[str, Text]],
    workers: int,
    progress: Progress,
) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """For each temperature, of all texts and of every kind, by depth: acceptance, and of how many
    drafts that is the mean. All in float32.
    """
    jobs = [
        (number, kind, text._replace(hidden=None, log_sum=None))
        for number, (kind, text) in enumerate(texts)
        if text.prompt + DEPTH < len(text.ids)
    ]
    sums: dict[str, dict[str, Tensor]] = {}
    context = torch.multiprocessing.get_context("spawn")
    with context.Pool(workers, _start, (head.state_dict(), vocab)) as pool:
        measured = pool.imap(_measure, jobs)
        for kind, temperature, counts in progress.track(
            measured, total=len(jobs), description="evaluate"
        ):
            by_kind = sums.setdefault(f"{temperature:g}", {})
            for name in ("all", kind):
                by_kind[name] = by_kind.get(name, 0) + counts
    return {
        temperature: {
            kind: [(round(float(a / w), 4), round(float(w), 1)) for w, a in zip(weights, accepted)]
            for kind, (weights, accepted) in by_kind.items()
        }
        for temperature, by_kind in sorted(sums.items())
    }
