"""The project's shaders through a real GPU compiler: NVIDIA's assembler takes every kernel, and all
private arrays end up in registers."""

from __future__ import annotations

import sys

import pytest

if sys.platform != "linux":
    pytest.skip("the simulator runs on Linux", allow_module_level=True)

from metal_sim import ptx
from metal_sim.toolchain import ROOT

pytestmark = pytest.mark.skipif(
    not ptx.find_ptxas(), reason="ptxas (NVIDIA's CUDA toolkit) is not installed"
)

FLOAT32, FLOAT16, BFLOAT16 = range(3)
ONE_HOT, SPARSE, DENSE = range(3)
RAW, FILTERED = 1, 2
TEMPERATURE_LAST, SEQUENTIAL, SEQUENTIAL_UNTEMPERED, MIN_P_FIRST = range(1, 5)
BLOCK, COUPLED, TYPICAL, CASCADE = range(1, 5)

OFF = dict.fromkeys(
    "target_dtype draft_dtype draft_kind target_order draft_order rule logprobs_kind keyed "
    "has_lengths has_vocab has_draft_stats has_bitmask target_filtered draft_filtered with_stats "
    "is_sample is_tree".split(),
    0,
)
SPLIT = ("partials", "draw", "sequence")
# Function constants that are not 0, and the kernels that the host runs with them.
SETTINGS = {
    "dense f32": ({"draft_kind": DENSE}, (*SPLIT, "residual")),
    "dense f32 filtered": (
        {"draft_kind": DENSE, "target_filtered": 1, "draft_filtered": 1, "logprobs_kind": FILTERED},
        (*SPLIT, "rows", "residual"),
    ),
    "sparse bf16": (
        {"target_dtype": BFLOAT16, "draft_kind": SPARSE, "has_bitmask": 1, "logprobs_kind": RAW},
        SPLIT,
    ),
    "one-hot f16 filtered": (
        {
            "target_dtype": FLOAT16, "draft_kind": ONE_HOT, "target_filtered": 1,
            "target_order": SEQUENTIAL, "keyed": 1, "has_lengths": 1,
        },
        (*SPLIT, "rows"),
    ),
    "vocab": (
        {"draft_kind": DENSE, "has_vocab": 1, "draft_dtype": BFLOAT16, "has_draft_stats": 1},
        (*SPLIT, "residual"),
    ),
    "block": ({"draft_kind": DENSE, "rule": BLOCK, "has_bitmask": 1}, (*SPLIT, "residual")),
    "block sparse": ({"draft_kind": SPARSE, "rule": BLOCK, "target_filtered": 1}, (*SPLIT, "rows")),
    "cascade": ({"draft_kind": SPARSE, "rule": CASCADE, "target_dtype": BFLOAT16}, SPLIT),
    "coupled": ({"rule": COUPLED, "keyed": 1, "target_filtered": 1}, (*SPLIT, "rows")),
    "typical": ({"rule": TYPICAL, "target_filtered": 1}, (*SPLIT, "rows")),
    "stats": ({"draft_kind": DENSE, "has_vocab": 1, "with_stats": 1}, ("stats",)),
    "stats sparse": ({"draft_kind": SPARSE, "with_stats": 1}, ("stats",)),
    "sample": (
        {"is_sample": 1, "target_filtered": 1, "target_order": TEMPERATURE_LAST},
        (*SPLIT, "rows"),
    ),
    "sample, tempered last": (
        {"is_sample": 1, "target_filtered": 1, "target_order": SEQUENTIAL_UNTEMPERED}, ("rows",)
    ),
    "sample, min_p first": (
        {
            "is_sample": 1, "target_filtered": 1, "target_order": MIN_P_FIRST,
            "target_dtype": FLOAT16,
        },
        ("rows",),
    ),
}  # fmt: skip
TREE_OFF = OFF | {"is_tree": 1, "replacement": 0}
WALKS = ("partials", "walk", "sequence")
TREE_SETTINGS = {
    "dense f32": ({"draft_kind": DENSE, "replacement": 1}, WALKS),
    "dense f32 filtered": (
        {"draft_kind": DENSE, "target_filtered": 1, "draft_filtered": 1, "logprobs_kind": RAW},
        (*WALKS, "rows"),
    ),
    "sparse bf16": ({"target_dtype": BFLOAT16, "draft_kind": SPARSE, "has_bitmask": 1}, WALKS),
    "one-hot f16 filtered": (
        {"target_dtype": FLOAT16, "draft_kind": ONE_HOT, "target_filtered": 1, "keyed": 1},
        (*WALKS, "rows"),
    ),
    "vocab": (
        {"draft_kind": DENSE, "has_vocab": 1, "draft_dtype": BFLOAT16, "has_draft_stats": 1},
        WALKS,
    ),
}
CASES = [
    (operation, name, off | constants, kernels)
    for operation, off, settings in (
        ("verify_draft", OFF, SETTINGS),
        ("verify_tree", TREE_OFF, TREE_SETTINGS),
    )
    for name, (constants, kernels) in settings.items()
]


INDEXED = """
#include <metal_stdlib>
using namespace metal;
kernel void indexed(device float* x [[buffer(0)]], const device int* at [[buffer(1)]],
                    uint tid [[thread_index_in_threadgroup]]) {
  float held[16];
  for (int i = 0; i < 16; ++i) {
    held[i] = 0;
  }
  for (int j = 0; j < 64; ++j) {
    held[at[tid * 64 + j] & 15] += x[tid * 64 + j];
  }
  for (int i = 0; i < 16; ++i) {
    x[tid * 16 + i] = held[i];
  }
}
"""


@pytest.mark.quick(name=["stats sparse"])
@pytest.mark.parametrize(
    "operation, name, constants, kernels",
    CASES,
    ids=[f"{case[0]}-{case[1]}" for case in CASES],
)
def test_kernels_need_no_stack(operation, name, constants, kernels, figure):
    shader = ROOT / "metal" / f"{operation}.metal"
    usage = ptx.assemble(shader, [f"{operation}_{k}" for k in kernels], constants)
    for kernel in kernels:
        used = usage[f"{operation}_{kernel}"]
        figure(f"{kernel} registers", used.registers)
        figure(f"{kernel} shared bytes", used.shared)
        assert (used.stack, used.spill_stores, used.spill_loads) == (0, 0, 0), kernel


def test_indexed_registers_are_found(tmp_path):
    shader = tmp_path / "indexed.metal"
    shader.write_text(INDEXED)
    assert ptx.assemble(shader, ["indexed"], {})["indexed"].stack == 64
