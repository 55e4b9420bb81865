"""Make the draft head of the default model: sample data, train, measure, write weights and card.

    python training/train_head.py DATA [--tokens N] [--trained-tokens N] [--start-from HEAD]

DATA is a folder for shards, texts and the checkpoint. Run it again and it goes on: missing data is
sampled with new seeds, training resumes from the checkpoint, which is of one amount of data.
"""

from __future__ import annotations

import os
import platform
import time
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import torch
import typer
from card import write_card
from evaluation import MAX_LENGTH, STRIDE, evaluate, load_held_out_texts
from head import save_head
from progress import make_progress
from rich.console import Console
from sampling import sample_data
from target import check_against_mlx
from train import train_on_folder

NAME = "smollm2-135m-head.safetensors"


def main(
    data: Annotated[Path, typer.Argument(help="Folder of shards, texts and the checkpoint.")],
    tokens: Annotated[int, typer.Option(help="Sample until there are so many.")] = 1_000_000,
    trained_tokens: Annotated[int, typer.Option(help="Over all epochs.")] = 2_000_000,
    start_from: Annotated[
        Path | None,
        typer.Option(
            exists=True, dir_okay=False, help="Go on from these weights, on data of another seed."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of prompts, texts, weights and batches.")] = 1,
    workers: Annotated[int, typer.Option(help="Processes, of a thread each.")] = os.cpu_count()
    or 1,
    slots: Annotated[int, typer.Option(help="Texts that a process samples at once.")] = 256,
    out: Annotated[
        Path | None,
        typer.Option(
            help=f"The weights; the card goes beside them. Default: {NAME} in DATA, so that the "
            "package's head stays as it is."
        ),
    ] = None,
) -> None:
    """Make the draft head of the default model."""
    console = Console()
    out = data / NAME if out is None else out
    difference = check_against_mlx()
    console.print(f"logits differ from MLX's by at most {difference:.1e}")
    data.mkdir(parents=True, exist_ok=True)
    with make_progress(console) as progress:
        sample_data(data, tokens, seed, workers, slots, progress)
        head, target, texts, state = train_on_folder(
            data, trained_tokens, seed, workers, start_from, progress
        )
        # As it will be used: weights rounded to float16, everything computed in float32.
        for weight in head.parameters():
            weight.data = weight.data.half().float()
        held_out = load_held_out_texts(data / "held_out_texts.safetensors", target)
        rates = evaluate(head, state.vocab, held_out, workers, progress)
    about = {
        "acceptance": rates,
        "before": state.before,
        "data": texts.summary(),
        "training": {
            "tokens": state.trained,
            "updates": state.updates,
            "epochs_begun": state.epoch + 1,
            "seconds": round(state.seconds),
            "seed": seed,
            "log": state.log[: -1 : max(1, len(state.log) // 12)] + state.log[-1:],
        },
        "made": {
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "mlx": version("mlx"),
            "logits_difference": difference,
            "max_length": MAX_LENGTH,
            "stride": STRIDE,
        },
    }
    save_head(out, head, state.vocab, target, about)
    write_card(out)
    console.print(f"wrote {out} and {out.with_suffix('.md')}")


if __name__ == "__main__":
    typer.run(main)
