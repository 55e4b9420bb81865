"""Sampling parameters: how a row of logits becomes a distribution."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import NamedTuple, Union

import mlx.core as mx

from ._ext import LEAST_TEMPERATURE

# From here on a number rounds to infinity in float32.
FLOAT32_LIMIT = 2.0**128 - 2.0**103
INT32_LIMIT = 2**31

ORDERS = (
    "temperature_first",
    "temperature_last",
    "sequential",
    "sequential_untempered",
    "min_p_first",
)

Number = Union[float, mx.array]


class Sampling(NamedTuple):
    """Temperature and filters that turn logits into a distribution.

    Every field but ``order`` is a Python number, shared by the batch, or an array of shape
    ``[B]`` with one value per sequence. Numbers are checked when an operation is built
    (``ValueError``); a bad value in an array sets ``Status.BAD_PARAMETER`` for its sequence.
    Inside ``mx.compile`` pass values that change between calls as arrays: a number is a constant.

    Each filter keeps a prefix of the order "logit descending, then token id ascending", and at
    least one token always stays, so a filter never breaks a tie at random. The systems that the
    orders are named after treat exact ties differently (docs/algorithm.md).

    Attributes:
        temperature: ``>= 0``. Weights are ``exp((logit - max) / temperature)``; 0 puts all mass on
            the largest logit (lowest id among ties). Below 2**-126 counts as 0.
        top_k: keep exactly the first ``top_k`` tokens; ``<= 0`` or ``>= V`` is off.
        top_p: in [0, 1]. Keep a token while the mass strictly before it is ``< top_p``; 0 and 1
            are off.
        min_p: in [0, 1]. Keep a token while its weight relative to the largest is ``>= min_p``; 0
            is off.
        order: on which masses the filters are measured.
            ``"temperature_first"``: temper, measure each filter on the full tempered
            distribution, keep the intersection.
            ``"temperature_last"`` (mlx-lm's ``make_sampler``): measure each filter on the full
            untempered distribution, then temper the survivors.
            ``"sequential"`` (Hugging Face): temper; top_k; top_p on the renormalised survivors;
            min_p.
            ``"sequential_untempered"`` (llama.cpp's default chain): top_k; top_p on the
            renormalised survivors; min_p; then temper the survivors.
            ``"min_p_first"`` (vLLM): temper; min_p; top_k; top_p on the renormalised survivors.
    """

    temperature: Number = 1.0
    top_k: int | mx.array = 0
    top_p: Number = 1.0
    min_p: Number = 0.0
    order: str = "temperature_first"


def check_sampling(op: str, argument: str, sampling: Sampling) -> None:
    """Raise ``TypeError`` or ``ValueError`` unless the Python numbers of ``sampling`` are legal."""
    if not isinstance(sampling, Sampling):
        raise TypeError(
            f"[{op}] {argument}: expected exactspec.Sampling, got {type(sampling).__name__}"
        )
    if sampling.order not in ORDERS:
        raise ValueError(
            f"[{op}] {argument}.order: expected one of {', '.join(ORDERS)}, got {sampling.order!r}"
        )
    for field, value in zip(sampling._fields, sampling[:4]):
        if isinstance(value, mx.array):
            continue
        name = f"{argument}.{field}"
        if not is_number(value):
            raise TypeError(f"[{op}] {name}: expected a number or an array, got {value!r}")
        if field == "top_k":
            if type(value) is not int and not isinstance(value, Integral):
                got = describe_number(value)
                raise TypeError(f"[{op}] {name}: expected an integer or an array, got {got}")
            legal, expected = -INT32_LIMIT <= value < INT32_LIMIT, "in [-2**31, 2**31)"
        elif field == "temperature":
            legal, expected = 0 <= as_float(value) < FLOAT32_LIMIT, "finite in float32 and >= 0"
        else:
            legal, expected = 0 <= as_float(value) <= 1, "in [0, 1]"
        if not legal:
            got = describe_number(value)
            raise ValueError(f"[{op}] {name}: expected a value {expected}, got {got}")


def is_greedy(temperature: Number) -> bool:
    """Whether it is a number that counts as 0; what arrays hold is not known yet."""
    return not isinstance(temperature, mx.array) and temperature < LEAST_TEMPERATURE


def is_number(value) -> bool:
    """Whether it is a real number of any type; a bool is none."""
    # The usual types first: abstract classes take ten times as long to ask.
    usual = type(value) in (float, int)
    return usual or (isinstance(value, Real) and not isinstance(value, bool))


def as_float(number: Real) -> float:
    """As the extension takes it; infinite where that is beyond float64."""
    try:
        return float(number)
    except OverflowError:
        return math.copysign(math.inf, 1 if number > 0 else -1)


def describe_number(number: Real) -> str:
    """Its ``repr``, unless that has more digits than Python or anybody wants to print."""
    bits = int(number).bit_length() if isinstance(number, Integral) else 0
    if bits > 64:
        return f"an integer of {bits} bits"
    try:
        return repr(number)
    except ValueError:
        return f"a {type(number).__name__} of thousands of digits"
