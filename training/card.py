"""The card beside the weights: their metadata as Markdown, and what was tried."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import safe_open

TRIED = Path(__file__).with_name("tried.md")

TEXT = """# Draft head of {target}

Licence: Apache-2.0. Derived from {target} (Apache-2.0, Hugging Face): it was trained on
that model's distributions over texts sampled from it, and uses that model's embedding as its own.
Besides them only prompts that were written for it went in (`training/prompts.py`).
`training/train_head.py` made the weights and this card.

One projection, {layers} Llama layer, a final norm: {parameters:,} parameters, float16.
Draft vocabulary: the {vocab:,} ids with the most of the target's probability on the training texts
(of the first stage); in use the ids of the context join them.

## Acceptance on held-out prompts

Of `training/held_out.json` ({temperatures}; at most {max_length} tokens a text).
Drafts begin at every {stride}th token of an answer. Depth 1 is the mean of 1 - total variation of
target and draft, both at the text's temperature; depth i that of the drafts whose earlier tokens
were accepted, each with the probability of that. At temperature 0: the same argmax. In brackets:
the number of drafts.

{acceptance}

## Data and training

{before}* {texts:,} texts of {tokens:,} tokens, {answer_tokens:,} of them in answers;
  {by_temperature}.
* {trained:,} tokens trained on, epoch {epochs} begun; {updates:,} updates, {minutes:.0f} minutes.
  Seed {seed}.
* Made {date} with Python {python}, torch {torch}, mlx {mlx}.
  Logits of the target in torch and in MLX differ by at most {logits_difference:.1e}.

Losses on the training batches, step 1 and, later on, step 2. Mass is what the draft
vocabulary holds of the target's distribution.

{log}

## What was tried

{tried}"""


def write_card(weights: Path) -> None:
    """Write ``weights`` with the ending ``.md`` from the metadata of ``weights``."""
    with safe_open(weights, "np") as file:
        metadata = file.metadata()
        names = [name for name in file.keys() if name != "draft_vocab"]
        sizes = [file.get_tensor(name).size for name in names]
        vocab = len(file.get_tensor("draft_vocab"))
    about = {name: json.loads(text) for name, text in metadata.items() if name != "target"}
    data, training = about["data"], about["training"]
    by_temperature = data["texts_by_temperature"].items()
    card = TEXT.format(
        target=metadata["target"],
        layers={1: "one", 2: "two"}[about["config"]["num_layers"]],
        parameters=sum(sizes),
        vocab=vocab,
        temperatures="temperatures " + ", ".join(about["acceptance"]),
        acceptance=_acceptance_table(about["acceptance"]),
        texts=data["texts"],
        tokens=data["tokens"],
        answer_tokens=data["answer_tokens"],
        by_temperature=", ".join(f"{n:,} at temperature {t}" for t, n in by_temperature),
        before="".join(_stage(stage) for stage in about.get("before", [])),
        trained=training["tokens"],
        epochs=training["epochs_begun"],
        updates=training["updates"],
        minutes=training["seconds"] / 60,
        seed=training["seed"],
        log=_log_table(training["log"]),
        tried=TRIED.read_text(),
        **about["made"],
    )
    weights.with_suffix(".md").write_text(card)


def _acceptance_table(acceptance: dict[str, dict[str, list]]) -> str:
    kinds = sorted({kind for rates in acceptance.values() for kind in rates})
    depth = len(acceptance[next(iter(acceptance))]["all"])
    rows = [
        [temperature, kind, *(f"{rate:.3f} ({drafts:.0f})" for rate, drafts in rates[kind])]
        for temperature, rates in acceptance.items()
        for kind in kinds
    ]
    return _table(["temperature", "prompts", *(f"depth {i + 1}" for i in range(depth))], rows)


def _stage(stage: dict) -> str:
    data, training = stage["data"], stage["training"]
    return (
        f"* Begun from a head that was trained on {training['tokens']:,} tokens, with "
        f"{data['texts']:,} texts of {data['tokens']:,} tokens\n  sampled by seed "
        f"{training['seed']}; {training['updates']:,} updates, "
        f"{training['seconds'] / 60:.0f} minutes.\n"
    )


def _log_table(log: list[dict]) -> str:
    names = ["trained", "cross_entropy_1", "acceptance_1", "mass_1"]
    names += ["cross_entropy_2", "acceptance_2"]
    rows = [[f"{entry[name]:,}" if name in entry else "" for name in names] for entry in log]
    return _table([name.replace("_", " ") for name in names], rows)


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
