"""Exact speculative sampling for MLX: from logits to tokens in one fused operation."""

from importlib.metadata import version as _version

from ._compat import check_extension as _check_extension

_check_extension()

from .ops import (  # noqa: E402
    PLACEHOLDER_TOKEN,
    SampleResult,
    Status,
    VerifyResult,
    VerifyStats,
    sample,
    verify_draft,
)
from .sampling import Sampling  # noqa: E402

__version__ = _version("exactspec")

__all__ = [
    "PLACEHOLDER_TOKEN",
    "SampleResult",
    "Sampling",
    "Status",
    "VerifyResult",
    "VerifyStats",
    "sample",
    "verify_draft",
]
