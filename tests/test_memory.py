"""Memory that runs out inside an operation: an error in Python, and the next call is right.

The extension's allocations fail one after the other, on its own threads and on those of MLX's
streams. A few dozen errors of any operation are all that MLX survives in one process.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent

# More blocks than one thread takes, so that a row is read by several.
WIDE = 97 * 2048

# The rest is left to `make prove`.
QUICK = ((2, "once"), (3, "for good"))

SCRIPT = """
import ctypes, sys
import mlx.core as mx, numpy as np
from exactspec import Sampling, _ext, sample, verify_draft, verify_tree

allocator = ctypes.CDLL(sys.argv[1])
allocator.fail_at.argtypes = [ctypes.c_long, ctypes.c_bool, ctypes.c_size_t, ctypes.c_size_t]
allocator.has_failed.restype = ctypes.c_bool
code = [line.split()[0] for line in open("/proc/self/maps") if _ext.__file__ in line]
ends = [[int(x, 16) for x in part.split("-")] for part in code]
library = min(begin for begin, _ in ends), max(end for _, end in ends)

mx.set_default_device(mx.cpu)
mx.random.seed(0)


def problem(B, K, V, **options):
    target = 2 * mx.random.normal((B, K + 1, V))
    draft = target[:, :K] + 0.5 * mx.random.normal((B, K, V))
    given = {
        "target_logits": target,
        "draft_tokens": mx.random.categorical(draft).astype(mx.int32),
        "draft_logits": draft,
        "uniforms": mx.random.uniform(shape=(B, K + 2)),
        **options,
    }
    mx.eval([x for x in given.values() if isinstance(x, mx.array)])
    return given


def calls():
    wide = int(sys.argv[2])
    order = mx.random.permutation(500).astype(mx.int32)
    token = problem(3, 3, 500, stats=True, logprobs="raw", draft_vocab=order)
    yield lambda: verify_draft(**token)
    block = problem(2, 2, 500, rule="block", sampling=Sampling(0.8, top_p=0.9))
    yield lambda: verify_draft(**block)
    alone = problem(1, 2, wide, sampling=Sampling(0.7, top_k=40))
    yield lambda: verify_draft(**alone)
    row, pair = alone["target_logits"][:, 0], mx.array([[0.3, 0.6]])
    yield lambda: sample(row, Sampling(0.9, top_p=0.95), uniforms=pair)
    rows, pairs = token["target_logits"][:, 0], mx.full((3, 2), 0.4)
    yield lambda: sample(rows, uniforms=pairs, logprobs="raw")
    tree = problem(3, 3, 500)
    del tree["draft_logits"]
    support = mx.stack([tree["draft_tokens"]] * 4, axis=-2)[..., :3]
    probs = mx.full((3, 4, 3), 0.3)
    parents = mx.array([[-1, -1, 0]] * 3, mx.int32)
    sparse = {"draft_ids": support, "draft_probs": probs, "replacement": False}
    yield lambda: verify_tree(**tree, parents=parents, **sparse)


def arrays(result):
    for x in result:
        if isinstance(x, tuple):
            yield from arrays(x)
        elif isinstance(x, mx.array):
            yield x


def values(result):
    mx.eval(result)
    return [np.array(x) for x in arrays(result)]


def same(x, y):
    return all(np.array_equal(a, b, equal_nan=a.dtype.kind == "f") for a, b in zip(x, y))


def spoiled(x):
    return all(np.isnan(a).all() if a.dtype.kind == "f" else (~a == 0).all() for a in x)


index, for_good, first = int(sys.argv[3]), sys.argv[4] == "for good", int(sys.argv[5])
call = list(calls())[index]
wanted = values(call())
num_errors, is_last = 0, False
for n in range(first, first + 30):
    result, error = call(), None
    allocator.fail_at(n, for_good, *library)
    try:
        mx.eval(result)
    except (MemoryError, RuntimeError) as caught:
        error = caught
    is_last = not allocator.has_failed()
    if is_last:
        break
    got = [np.array(x) for x in arrays(result)]
    assert same(got, wanted) or (error is not None and spoiled(got)), (n, error, got)
    assert same(values(call()), wanted), n
    num_errors += error is not None
print(num_errors, int(is_last))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the allocator is put in front by LD_PRELOAD")
@pytest.mark.skipif(not shutil.which("c++"), reason="no C++ compiler")
@pytest.mark.parametrize(
    "call, failure",
    [
        pytest.param(call, failure, marks=[] if (call, failure) in QUICK else pytest.mark.prove)
        for call in range(6)
        for failure in ("once", "for good")
    ],
)
def test_every_allocation_may_fail(tmp_path, call, failure):
    library = tmp_path / "failing_allocator.so"
    source = HERE / "failing_allocator.cpp"
    compile_ = ["c++", "-std=c++17", "-O1", "-shared", "-fPIC", source, "-o", library]
    subprocess.run(compile_, check=True)
    environment = {"LD_PRELOAD": str(library), "EXACTSPEC_THREADS": "4"}
    num_errors, first, is_last = 0, 1, False
    while not is_last:
        arguments = [str(x) for x in (library, WIDE, call, failure, first)]
        result = subprocess.run(
            [sys.executable, "-c", SCRIPT, *arguments],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert result.returncode == 0, result.stdout + result.stderr
        errors, is_last = map(int, result.stdout.split())
        num_errors, first = num_errors + errors, first + 30
    assert num_errors > 0
