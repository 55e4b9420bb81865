"""How far a forward over four tokens moves the logits of four forwards over one, by kind of cache.

    python benchmarks/bench_rounding.py [TEXT_FILE ...]
"""

import argparse
from pathlib import Path

from exactspec_openblas import use_openblas

use_openblas()

import mlx.core as mx  # noqa: E402
from exactspec.models import load  # noqa: E402
from mlx_lm.models.cache import make_prompt_cache  # noqa: E402

PROMPT, END, WIDTH, GROUP_SIZE = 256, 288, 4, 64


def main(files: list[str]) -> None:
    model, tokenizer = load()
    texts = [tokenizer.encode(Path(file).read_text())[:END] for file in files]

    def prefilled(ids: list[int], bits: int | None) -> list:
        cache = make_prompt_cache(model)
        mx.eval(model(mx.array(ids[:PROMPT])[None], cache=cache))
        return [c if bits is None else c.to_quantized(GROUP_SIZE, bits) for c in cache]

    for bits in (None, 8, 4):
        largest, changed, total = [], 0, 0
        for ids in texts:
            wide_cache, one_cache = prefilled(ids, bits), prefilled(ids, bits)
            moved = 0.0
            for start in range(PROMPT, len(ids) - WIDTH + 1, WIDTH):
                tokens = mx.array(ids[start : start + WIDTH])
                wide = model(tokens[None], cache=wide_cache)[0]
                one = mx.concatenate([model(t[None, None], cache=one_cache)[0] for t in tokens])
                moved = max(moved, mx.abs(wide - one).max().item())
                changed += mx.sum(mx.argmax(wide, -1) != mx.argmax(one, -1)).item()
                total += WIDTH
            largest.append(f"{moved:.2g}")
        kind = "float32" if bits is None else f"{bits} bits"
        differences = ", ".join(largest)
        print(f"{kind}: largest difference {differences}; argmax changed {changed} of {total}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    texts = ["README.md", "docs/algorithm.md", "docs/decoding.md", "docs/rules.md"]
    parser.add_argument("files", nargs="*", default=texts, help="texts of 288 tokens or more")
    main(parser.parse_args().files)
