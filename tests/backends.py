"""What the operations' tests run on. One entry adds a backend to every test."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import exactspec
from exactspec import reference, reference_tree


class Backend(NamedTuple):
    name: str
    verify_draft: Callable[..., exactspec.VerifyResult]
    sample: Callable[..., exactspec.SampleResult]
    verify_tree: Callable[..., exactspec.TreeResult]
    fused: bool = True  # a primitive of its own, not composed of mx operations
    simulated: bool = False  # thousands of times slower than the device it stands for


# MLX hands composed operations to a C++ compiler, seconds for each graph.
COMPILED_SOON = ("cpu", "metal-sim")


def simulated(operation: str) -> Callable:
    """An operation on the simulated GPU, whose extension is built when it is first used."""

    def call(*args, **kwargs):
        from metal_sim import simulator

        return getattr(simulator, operation)(*args, **kwargs)

    return call


BACKENDS = [
    Backend("cpu", exactspec.verify_draft, exactspec.sample, exactspec.verify_tree),
    Backend(
        "reference",
        reference.verify_draft,
        reference.sample,
        reference_tree.verify_tree,
        fused=False,
    ),
    Backend(
        "metal-sim",
        simulated("verify_draft"),
        simulated("sample"),
        simulated("verify_tree"),
        simulated=True,
    ),
]
