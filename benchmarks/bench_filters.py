"""How often mlx-lm's top_p and exactspec's keep other tokens than float64, by dtype of the logits.

    python benchmarks/bench_filters.py [TEXT_FILE]
"""

import argparse
from pathlib import Path

from exactspec_openblas import use_openblas

use_openblas()

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402
from exactspec import Sampling, sample  # noqa: E402
from exactspec.models import load  # noqa: E402
from mlx_lm.sample_utils import apply_top_p  # noqa: E402

TOKENS, TOP_P = 400, 0.9


def nucleus(logits: np.ndarray) -> np.ndarray:
    """By the law, in float64: probabilities ``[V]`` after the filter."""
    weights = np.exp(logits.astype(np.float64) - logits.max())
    order = np.argsort(-logits, kind="stable")
    before = np.cumsum(weights[order]) - weights[order]
    weights[order[before >= TOP_P * weights.sum()]] = 0
    return weights / weights.sum()


def main(file: str) -> None:
    model, tokenizer = load()
    rows = model(mx.array([tokenizer.encode(Path(file).read_text())[:TOKENS]]))[0]
    for dtype in (mx.float32, mx.bfloat16):
        theirs, ours = [], []
        for start in range(0, len(rows), 40):
            logits = rows[start : start + 40].astype(dtype)
            log_probs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
            kept = mx.softmax(apply_top_p(log_probs, TOP_P).astype(mx.float32), axis=-1)
            top, log_norm, cutoff, cutoff_id = mx.split(
                sample(logits, Sampling(top_p=TOP_P)).row_stats, 4, axis=-1
            )
            x, ids = logits.astype(mx.float32), mx.arange(logits.shape[-1])
            within = (x > cutoff) | ((x == cutoff) & (ids <= cutoff_id))
            law = mx.where(within, mx.exp(x - top - log_norm), 0)
            exact = [nucleus(row) for row in np.array(x)]
            for results, side in ((theirs, kept), (ours, law)):
                for probs, wanted in zip(np.array(side), exact):
                    other = bool(((probs > 0) != (wanted > 0)).any())
                    results.append((other, np.abs(probs - wanted).sum() / 2))
        for name, results in (("mlx-lm", theirs), ("exactspec", ours)):
            others, distances = np.array(results).T
            print(
                f"{dtype}, {name}: another set in {100 * others.mean():.1f} % of {len(results)} "
                f"rows, total variation distance at most {distances.max():.2g}, "
                f"mean {distances.mean():.2g}"
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", nargs="?", default="README.md", help="a text of 400 tokens or more")
    main(parser.parse_args().file)
