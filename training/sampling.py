"""Training data: texts that the target samples itself, with its hidden states.

A shard is one safetensors file of whole texts, end to end: ``ids`` int32 ``[N]``, ``hidden``
bfloat16 ``[N, d]`` (after the final norm), ``log_sum`` float32 ``[N]`` (logsumexp of the target's
logits), and for each text ``starts`` int32 (where it begins), ``prompts`` int32 (tokens before the
answer) and ``temperatures`` float32.
"""

from __future__ import annotations

import multiprocessing
import os
import random
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from prompts import write_prompt
from rich.progress import Progress
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from target import Cache, Target
from torch import Tensor

MAX_LENGTH = 288
MAX_USER_TURN = 96
SHARD_TOKENS = 20_000
# Of texts whose prompt is a written one; the other prompts are sampled from the bare user turn.
WRITTEN_PART = 0.6
TEMPERATURES, TEMPERATURE_WEIGHTS = (0.0, 0.8, 1.0), (0.2, 0.45, 0.35)
PROMPT_TEMPERATURES = (0.8, 1.0)


class Text(NamedTuple):
    """A finished text; ``prompt`` counts the tokens before the answer."""

    ids: Tensor
    hidden: Tensor
    log_sum: Tensor
    prompt: int
    temperature: float


class Request(NamedTuple):
    """What a slot shall write: ``forced`` ids, and if they end in a user turn, that as well."""

    forced: list[int]
    temperature: float
    prompt_temperature: float | None = None


class ChatTemplate:
    """Ids around a user turn."""

    def __init__(self, tokenizer) -> None:
        def ids(content: str) -> list[int]:
            message = [{"role": "user", "content": content}]
            return tokenizer.apply_chat_template(message, add_generation_prompt=True)

        one, other = ids("A"), ids("B")
        split = next(i for i, (a, b) in enumerate(zip(one, other)) if a != b)
        self.ids, self.before, self.after = ids, one[:split], one[split + 1 :]
        self.end = tokenizer.eos_token_id


def draw(logits: Tensor, temperatures: Tensor, generator: torch.Generator) -> Tensor:
    """One id a row of float32 ``logits [B, V]``; temperature 0 takes the largest."""
    scaled = logits / temperatures.clamp_min(1e-6)[:, None]
    weights = torch.softmax(scaled, -1).unflatten(-1, (-1, 256))
    blocks = weights.sum(-1).cumsum(-1)
    coins = torch.rand(len(logits), 1, generator=generator) * blocks[:, -1:]
    block = torch.searchsorted(blocks, coins, right=True).clamp_max(blocks.shape[-1] - 1)
    below = torch.where(block > 0, blocks.gather(-1, (block - 1).clamp_min(0)), 0)
    inside = weights[torch.arange(len(logits)), block[:, 0]].cumsum(-1)
    item = torch.searchsorted(inside, coins - below, right=True).clamp_max(255)
    sampled = (block * 256 + item)[:, 0]
    return torch.where(temperatures > 0, sampled, logits.argmax(-1))


@torch.inference_mode()
def sample_texts(
    target: Target,
    requests: Iterator[Request],
    template: ChatTemplate,
    generator: torch.Generator,
    num_slots: int,
    max_length: int = MAX_LENGTH,
) -> Iterator[Text]:
    """Texts in the order in which they end, until ``requests`` do; slots are filled again.

    Prompts go through the same steps as answers, one token at a time: a slot's next id is forced as
    long as it has any left, else drawn. What all prompts begin with is read only once.
    """
    shared = Cache(target, 1, len(template.before))
    shared_hidden = []
    for position, token in enumerate(template.before):
        at = torch.tensor([position])
        shared_hidden.append(target.decode(torch.tensor([token]), at, shared))
    num_shared = len(template.before)
    cache = Cache(target, num_slots, max_length)
    for ours, theirs in zip(cache.keys + cache.values, shared.keys + shared.values):
        ours[:, :, :num_shared] = theirs
    ids = torch.zeros(num_slots, max_length, dtype=torch.long)
    ids[:, :num_shared] = torch.tensor(template.before)
    hidden = torch.zeros(num_slots, max_length, target.args.hidden_size, dtype=target.dtype)
    hidden[:, :num_shared] = torch.cat(shared_hidden)
    log_sum = torch.zeros(num_slots, max_length)
    log_sum[:, :num_shared] = target.logits(torch.cat(shared_hidden)).float().logsumexp(-1)

    active: list[Request | None] = [None] * num_slots
    forced = [deque() for _ in active]
    # While a slot samples its user turn: where that began. Then None.
    turn: list[int | None] = [None] * num_slots
    prompts = [0] * num_slots
    positions = torch.full((num_slots,), num_shared)
    temperatures = torch.zeros(num_slots)

    def fill(slot: int) -> None:
        request = active[slot] = next(requests, None)
        positions[slot] = num_shared
        if request is None:
            forced[slot] = deque([template.end])
            return
        forced[slot] = deque(request.forced[num_shared:])
        turn[slot] = None if request.prompt_temperature is None else num_shared
        prompts[slot] = len(request.forced)
        own = request.temperature if turn[slot] is None else request.prompt_temperature
        temperatures[slot] = own

    for slot in range(num_slots):
        fill(slot)
    # The first drawn token of a sampled user turn follows the shared tokens.
    last_logits = target.logits(shared_hidden[-1]).float()
    for slot in range(num_slots):
        ids[slot, num_shared] = _first(forced[slot], last_logits, temperatures[slot], generator)
    rows = torch.arange(num_slots)
    while any(request is not None for request in active):
        step = target.decode(ids[rows, positions], positions, cache)
        hidden[rows, positions] = step
        logits = target.logits(step).float()
        log_sum[rows, positions] = logits.logsumexp(-1)
        drawn = draw(logits, temperatures, generator).tolist()
        for slot, request in enumerate(active):
            if request is None:
                continue
            position = int(positions[slot])
            if turn[slot] is not None:
                ended = ids[slot, position] == template.end
                if ended or position - turn[slot] >= MAX_USER_TURN:
                    forced[slot].extend(template.after[1:] if ended else template.after)
                    turn[slot] = None
                    prompts[slot] = position + 1 + len(forced[slot])
                    temperatures[slot] = request.temperature
            elif not forced[slot] and (
                position + 1 == max_length
                or (position >= prompts[slot] and ids[slot, position] == template.end)
            ):
                n = position + 1
                yield Text(
                    ids[slot, :n].int(),
                    hidden[slot, :n].clone(),
                    log_sum[slot, :n].clone(),
                    prompts[slot],
                    request.temperature,
                )
                fill(slot)
                ids[slot, num_shared] = _first(
                    forced[slot], last_logits, temperatures[slot], generator
                )
                continue
            positions[slot] += 1
            token = forced[slot].popleft() if forced[slot] else drawn[slot]
            ids[slot, position + 1] = token


def _first(
    forced: deque, logits: Tensor, temperature: Tensor, generator: torch.Generator
) -> Tensor | int:
    return forced.popleft() if forced else draw(logits, temperature[None], generator)[0]


def training_requests(template: ChatTemplate, rng: random.Random) -> Iterator[Request]:
    while True:
        temperature = rng.choices(TEMPERATURES, TEMPERATURE_WEIGHTS)[0]
        if rng.random() < WRITTEN_PART:
            yield Request(template.ids(write_prompt(rng)), temperature)
        else:
            yield Request(template.before, temperature, rng.choice(PROMPT_TEMPERATURES))


def save_shard(path: Path, texts: list[Text]) -> None:
    lengths = torch.tensor([len(text.ids) for text in texts])
    tensors = {
        "ids": torch.cat([text.ids for text in texts]),
        "hidden": torch.cat([text.hidden for text in texts]),
        "log_sum": torch.cat([text.log_sum for text in texts]),
        "starts": (lengths.cumsum(0) - lengths).int(),
        "prompts": torch.tensor([text.prompt for text in texts], dtype=torch.int32),
        "temperatures": torch.tensor([text.temperature for text in texts]),
    }
    # Under its name only when whole.
    unfinished = path.with_suffix(".part")
    save_file(tensors, unfinished)
    os.replace(unfinished, path)


def load_shard(path: Path) -> list[Text]:
    shard = load_file(path)
    sizes = torch.diff(shard["starts"], append=torch.tensor([len(shard["ids"])])).tolist()
    parts = (shard[name].split(sizes) for name in ("ids", "hidden", "log_sum"))
    return [
        Text(*rows, int(prompt), round(float(temperature), 3))
        for *rows, prompt, temperature in zip(*parts, shard["prompts"], shard["temperatures"])
    ]


def shard_paths(folder: Path) -> list[Path]:
    return sorted(folder.glob("shard-*.safetensors"))


def count_tokens(folder: Path) -> int:
    total = 0
    for path in shard_paths(folder):
        with safe_open(path, "pt") as shard:
            total += shard.get_slice("ids").get_shape()[0]
    return total


def _write_shards(folder: Path, seed: int, worker: int, workers: int, slots: int) -> None:
    # Threads of one process would wait for each other after every operation.
    torch.set_num_threads(1)
    target = Target(torch.bfloat16)
    template = ChatTemplate(target.tokenizer)

    def path(number: int) -> Path:
        return folder / f"shard-{number:05d}.safetensors"

    number = worker
    while path(number).exists():
        number += workers
    # A new run goes on with new seeds.
    rng = random.Random(f"{seed} {number}")
    generator = torch.Generator().manual_seed(rng.getrandbits(62))
    texts, num_tokens = [], 0
    requests = training_requests(template, rng)
    for text in sample_texts(target, requests, template, generator, slots):
        texts.append(text)
        num_tokens += len(text.ids)
        # A parent that was killed cannot end its workers.
        if not multiprocessing.parent_process().is_alive():
            return
        if num_tokens >= SHARD_TOKENS:
            save_shard(path(number), texts)
            number += workers
            texts, num_tokens = [], 0


def sample_data(
    folder: Path, tokens: int, seed: int, workers: int, slots: int, progress: Progress
) -> None:
    """Sample until ``folder`` has ``tokens`` tokens; shards that it has count."""
    task = progress.add_task("sample", total=tokens, completed=count_tokens(folder))
    if count_tokens(folder) >= tokens:
        return
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=_write_shards, args=(folder, seed, i, workers, slots), daemon=True)
        for i in range(workers)
    ]
    for process in processes:
        process.start()
    try:
        while (done := count_tokens(folder)) < tokens:
            progress.update(task, completed=done)
            for process in processes:
                process.join(1)
                if process.exitcode is not None:
                    raise RuntimeError(f"[sample_data] a worker ended with {process.exitcode}")
        progress.update(task, completed=done)
    finally:
        for process in processes:
            process.terminate()
            process.join()
