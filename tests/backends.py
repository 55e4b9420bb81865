"""What the operations' tests run on. One entry adds a backend to every test."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import exactspec
from exactspec import reference


class Backend(NamedTuple):
    name: str
    verify_draft: Callable[..., exactspec.VerifyResult]
    sample: Callable[..., exactspec.SampleResult]


BACKENDS = [
    Backend("cpu", exactspec.verify_draft, exactspec.sample),
    Backend("reference", reference.verify_draft, reference.sample),
]
