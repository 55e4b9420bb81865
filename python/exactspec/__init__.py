"""Exact speculative sampling for MLX: from logits to tokens in one fused operation."""

from importlib.metadata import version as _version

from ._compat import check_extension as _check_extension

_check_extension()

from .distributions import (  # noqa: E402
    SparseDistribution,
    acceptance_probability,
    residual_distribution,
    speculative_output_marginal,
)
from .noise import noise_keys  # noqa: E402
from .ops import (  # noqa: E402
    PLACEHOLDER_TOKEN,
    SampleResult,
    Status,
    VerifyResult,
    VerifyStats,
    sample,
    verify_draft,
)
from .rules import Cascade, Typical  # noqa: E402
from .sampling import Sampling  # noqa: E402
from .tree import TreeResult, verify_tree  # noqa: E402

__version__ = _version("exactspec")

__all__ = [
    "PLACEHOLDER_TOKEN",
    "Cascade",
    "SampleResult",
    "Sampling",
    "SparseDistribution",
    "Status",
    "TreeResult",
    "Typical",
    "VerifyResult",
    "VerifyStats",
    "acceptance_probability",
    "noise_keys",
    "residual_distribution",
    "sample",
    "speculative_output_marginal",
    "verify_draft",
    "verify_tree",
]
