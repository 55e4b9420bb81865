"""Acceptance rules: which drafts become text. See docs/rules.md."""

from __future__ import annotations

from typing import NamedTuple, Union

from .sampling import as_float, describe_number, is_number

EXACT_RULES = ("token", "block", "coupled")
"""Rules by name. Under each of them the emitted tokens follow the target's distribution."""


class Typical(NamedTuple):
    """Lossy: accept a draft token wherever the target finds it plausible (Medusa).

    Accepted iff ``target(x) > min(epsilon, delta * exp(-entropy))`` with the entropy in nats of the
    target after temperature and filters; after a rejection the next token is drawn from the target
    (Cai et al., arXiv:2401.10774, section 2.3.1). The draft's distribution is not read. The text is
    **not** a sample of the target: results have ``exact=False``.

    Attributes:
        epsilon: hard threshold, in [0, 1].
        delta: entropy-dependent threshold, finite and at least 0.
    """

    epsilon: float = 0.09
    delta: float = 0.3


class Cascade(NamedTuple):
    """Lossy: let the draft decide where it is about as confident as the target.

    A speculative cascade (Narasimhan et al., arXiv:2405.19261) with the deferral rule "Diff": the
    slot is the target's, decided by the token rule, iff ``max_v draft(v) < max_v target(v) -
    alpha``, after temperature and filters; otherwise the draft token is accepted if the target can
    produce it at all. Columns or entries of the same id count apart in the draft's maximum. After a
    draft that was accepted whole, the next token is the target's. Needs the draft's distribution: a
    one-hot draft is an error. The text is **not** a sample of the target: results have
    ``exact=False``. At temperature 0 the target decides everywhere.

    Attributes:
        alpha: in [-1, 1]. How much less confident the draft may be and still decide; the larger,
            the faster and the further from the target. At -1 the target decides everywhere.
    """

    alpha: float = 0.0


Rule = Union[str, Typical, Cascade]

_LIMITS = {"epsilon": (0.0, 1.0), "delta": (0.0, 3.4e38), "alpha": (-1.0, 1.0)}


def check_rule(op: str, rule, names: tuple[str, ...]) -> None:
    """Raise ``ValueError`` or ``TypeError`` unless ``rule`` is one of ``names`` or a lossy rule.

    Lossy rules go only by their class, so no misspelt name can reach one.
    """
    lossy = names == EXACT_RULES
    if isinstance(rule, (Typical, Cascade)) and lossy:
        for field, value in zip(rule._fields, rule):
            name = f"rule.{field}"
            if not is_number(value):
                raise TypeError(f"[{op}] {name}: expected a number, got {value!r}")
            low, high = _LIMITS[field]
            if not low <= as_float(value) <= high:
                raise ValueError(
                    f"[{op}] {name}: expected a value in [{low:g}, {high:g}], got "
                    f"{describe_number(value)}"
                )
    elif not (isinstance(rule, str) and rule in names):
        expected = ", ".join(repr(name) for name in names)
        expected += ", Typical(...) or Cascade(...)" if lossy else ""
        raise ValueError(f"[{op}] rule: expected one of {expected}, got {rule!r}")


def is_exact(rule: Rule) -> bool:
    """Whether the emitted tokens follow the target's distribution."""
    return isinstance(rule, str)


def pack_rule(rule: Rule) -> tuple[int, float, float]:
    """As the extension takes it: kind, and up to two parameters."""
    if isinstance(rule, Typical):
        return 3, rule.epsilon, rule.delta
    if isinstance(rule, Cascade):
        return 4, rule.alpha, 0.0
    return EXACT_RULES.index(rule), 0.0, 0.0
