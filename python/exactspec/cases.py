"""Small inputs with known results, most of them from public bug reports of other systems.

``data/cases.json`` is a list. Each case gives ``target_logits`` or ``target_probs`` of shape
``[B][K + 1][V]`` (probabilities stand for their logarithms; "nan", "inf" and "-inf" for
themselves), at most one of ``draft_logits``, ``draft_probs`` and ``draft_sparse``,
``draft_tokens``, ``uniforms``, optional parameters, and what to ``expect``. They are the first
thing the test suite and ``exactspec doctor`` run.
"""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

import mlx.core as mx
import numpy as np

from .sampling import Sampling

CASES: list[dict[str, Any]] = json.loads((files("exactspec") / "data/cases.json").read_text())

_PARAMETERS = Sampling._fields
_KEYS = {
    *("name", "ref", "note", "expect", "rule", "dtype", "target_logits", "target_probs"),
    *("draft_logits", "draft_probs", "draft_sparse", "draft_tokens", "draft_lengths"),
    *("uniforms", "token_bitmask"),
    *_PARAMETERS,
    *(f"draft_{name}" for name in _PARAMETERS),
}


def numpy_arguments(case: dict[str, Any]) -> dict[str, Any]:
    """The arguments of ``verify_draft`` for a case: NumPy arrays, parameters as dictionaries.

    Raises:
        KeyError: the case has a key that is not known.
    """
    if unknown := case.keys() - _KEYS:
        raise KeyError(f"[cases] {case['name']}: unknown keys {sorted(unknown)}")
    sampling, draft_sampling = _parameters(case)
    arguments = {
        "target_logits": _logits(case, "target"),
        "draft_tokens": np.array(case["draft_tokens"], np.int32),
        "draft_logits": _logits(case, "draft"),
        "uniforms": np.array(case["uniforms"], np.float32),
        "sampling": sampling,
        "draft_sampling": draft_sampling,
    }
    if "draft_sparse" in case:
        arguments["draft_ids"] = np.array(case["draft_sparse"]["ids"], np.int32)
        arguments["draft_probs"] = np.array(case["draft_sparse"]["probs"], np.float32)
    for name in ("draft_lengths", "token_bitmask"):
        if name in case:
            arguments[name] = np.array(case[name], np.int32)
    if "dtype" in case:
        arguments["target_logits"] = arguments["target_logits"].astype(case["dtype"])
    return {name: value for name, value in arguments.items() if value is not None}


def mlx_arguments(case: dict[str, Any]) -> dict[str, Any]:
    """The arguments of ``verify_draft`` for a case, ready to be passed."""
    return {name: _to_mlx(value) for name, value in numpy_arguments(case).items()}


def mismatches(expect: dict[str, Any], tokens, num_accepted, status) -> list[str]:
    """Names of the expectations that a result does not meet; an unknown one never is.

    Args:
        expect: of a case. ``tokens``, ``num_accepted`` and ``status`` are exact, ``..._in`` lists
            what is allowed (``next`` is the token after the accepted prefix), ``tokens_prefix`` is
            a prefix, ``status_has`` names bits that must be set.
        tokens, num_accepted, status: arrays as ``verify_draft`` returns them.
    """
    results = {
        "tokens": np.array(tokens).tolist(),
        "num_accepted": np.array(num_accepted).tolist(),
        "status": np.array(status).tolist(),
    }
    results["next"] = [row[n] for row, n in zip(results["tokens"], results["num_accepted"])]

    def met(key: str, wanted: list) -> bool:
        if key in results:
            return results[key] == wanted
        if key.endswith("_in"):
            return all(r in allowed for r, allowed in zip(results[key[: -len("_in")]], wanted))
        if key == "tokens_prefix":
            return all(row[: len(w)] == w for row, w in zip(results["tokens"], wanted))
        if key == "status_has":
            return all(bits & w == w for bits, w in zip(results["status"], wanted))
        return False

    return [key for key, wanted in expect.items() if not met(key, wanted)]


def _logits(case: dict[str, Any], side: str) -> np.ndarray | None:
    if f"{side}_logits" in case:
        return np.array(
            [[[float(x) for x in row] for row in rows] for rows in case[f"{side}_logits"]],
            np.float32,
        )
    if f"{side}_probs" in case:
        with np.errstate(divide="ignore"):
            return np.log(np.array(case[f"{side}_probs"])).astype(np.float32)
    return None


def _parameters(case: dict[str, Any]) -> tuple[dict, dict | None]:
    """Sampling parameters of the target and, where they differ, of the draft."""

    def value(x):
        return np.array(x, np.float32) if isinstance(x, list) else x

    target = {name: value(case[name]) for name in _PARAMETERS if name in case}
    draft = {name: value(case[f"draft_{name}"]) for name in _PARAMETERS if f"draft_{name}" in case}
    return target, {**target, **draft} if draft else None


def _to_mlx(value: Any) -> Any:
    if isinstance(value, dict):
        return Sampling(**{name: _to_mlx(x) for name, x in value.items()})
    return mx.array(value) if isinstance(value, np.ndarray) else value
