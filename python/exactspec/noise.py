"""Keys for the noise of a call: a function of seed, position and role."""

from __future__ import annotations

import operator
import warnings
import weakref
from collections.abc import Sequence
from typing import Any, Union

import mlx.core as mx
import numpy as np

from .sampling import describe_number

Integers = Union[int, Sequence[int], np.ndarray, mx.array]

# The upper two bits of a counter's second word; the others hold the step. 0 is mx.random's own.
ROLES = {"draft": 1, "verify": 2}
MAX_STEPS = 2**30


def noise_keys(
    seeds: Integers, positions: Integers, role: str, step: Integers | None = None
) -> mx.array:
    """Keys for a batch of sequences, by what each of them is for.

    A sequence's key depends on its own seed, position, role and step only, whatever else is in the
    batch. Equal ones give equal keys. With one seed different ones give different keys, always;
    with two seeds keys agree as seldom as any two random ones, with a probability of 2**-64. So
    drafting, verification and all later calls of a text have noise of their own, as exactness
    demands.

    It is the block cipher behind ``mx.random``, Threefry-2x32 with 20 rounds (Salmon et al.,
    "Parallel random numbers: as easy as 1, 2, 3", 2011), under the key ``mx.random.key(seed)`` of
    the counter ``(position, r * 2**30 + step)``, where ``r`` is 1 for ``"draft"`` and 2 for
    ``"verify"``. What it gives is stable across releases.

    Under ``rule="coupled"`` noise goes by position anyway: there a text keeps one key for all its
    calls, such as ``mx.random.key(seed)``.

    Args:
        seeds: in [0, 2**64), one for each text.
        positions: in [0, 2**32), of the first token that the call can emit; for drafts that of the
            call that verifies them. After a call it moves on by the number of tokens emitted,
            ``num_accepted + 1``: equal positions would repeat the noise.
        role: ``"draft"`` for tokens that will be verified; ``"verify"`` for
            ``exactspec.verify_draft``, ``exactspec.verify_tree``, and an ``exactspec.sample`` whose
            token is text as it is.
        step: in [0, 2**30), needed with ``"draft"`` and only there: number of the draw among those
            for one call to verify, as its slot or the node of a tree.

    ``seeds``, ``positions`` and ``step`` are integers, sequences or arrays of them, and are
    broadcast. Arrays of MLX are not evaluated, so nothing checks their range: of seeds the lower 64
    bits count, of positions 32, of steps 30.

    Returns:
        uint32 ``[..., 2]``.

    Raises:
        TypeError: for what is no integer.
        ValueError: for a number out of range, another role, a step with ``"verify"``, and shapes
            that do not go together.
    """
    if not isinstance(role, str) or role not in ROLES:
        raise ValueError(f"[noise_keys] role: expected 'draft' or 'verify', got {role!r}")
    if (step is None) != (role == "verify"):
        expected = "None with role 'verify'" if role == "verify" else "one with role 'draft'"
        raise ValueError(f"[noise_keys] step: expected {expected}, got {step!r}")
    seeds = _integers("seeds", seeds, 2**64)
    positions = _integers("positions", positions, 2**32)
    step = _integers("step", 0 if step is None else step, MAX_STEPS)
    try:
        shape = np.broadcast_shapes(seeds.shape, positions.shape, step.shape)
    except ValueError:
        got = ", ".join(str(list(x.shape)) for x in (seeds, positions, step))
        raise ValueError(
            f"[noise_keys] seeds, positions, step: expected shapes that broadcast, got {got}"
        ) from None
    tag = ROLES[role] * MAX_STEPS
    if any(isinstance(x, mx.array) for x in (seeds, positions, step)):
        seeds, positions, step = (
            x if isinstance(x, mx.array) else mx.array(x.astype(np.uint64))
            for x in (seeds, positions, step)
        )
        seeds = seeds.astype(mx.uint64)
        key = (seeds >> 32).astype(mx.uint32), seeds.astype(mx.uint32)
        counter = (step.astype(mx.uint32) & (MAX_STEPS - 1)) + tag
        first, second = threefry2x32(key, positions.astype(mx.uint32), counter)
        return mx.stack(mx.broadcast_arrays(first, second), axis=-1)
    rows = np.broadcast_arrays(seeds, positions, step)
    words = [
        threefry2x32((seed >> 32, seed % 2**32), position, tag + number)
        for seed, position, number in zip(*(x.ravel().tolist() for x in rows))
    ]
    return mx.array(np.array(words, np.uint32).reshape(*shape, 2))


def threefry2x32(key: tuple, first: Any, second: Any) -> tuple:
    """Threefry-2x32 with 20 rounds (Salmon et al. 2011): of uint32 arrays, which broadcast, or of
    Python integers."""
    mask = 0xFFFFFFFF if isinstance(first, int) else None

    def wrapped(x):
        return x if mask is None else x & mask

    schedule = (*key, key[0] ^ key[1] ^ 0x1BD11BDA)
    first, second = wrapped(first + schedule[0]), wrapped(second + schedule[1])
    if mask is None:
        second = second + 0 * first  # mapped by mx.vmap whenever the other is
    turns = (13, 15, 26, 6, 17, 29, 16, 24)
    for i in range(20):
        turn = turns[i % 8]
        first = wrapped(first + second)
        second = first ^ (wrapped(second << turn) | second >> 32 - turn)
        if i % 4 == 3:
            step = i // 4 + 1
            first = wrapped(first + schedule[step % 3])
            second = wrapped(second + schedule[(step + 1) % 3] + step)
    return first, second


def _integers(name: str, value: Any, end: int) -> Any:
    """An array of MLX as it is, anything else as a NumPy array of integers in ``[0, end)``."""
    if isinstance(value, mx.array):
        if not mx.issubdtype(value.dtype, mx.integer):
            raise TypeError(f"[noise_keys] {name}: expected integers, got {value.dtype}")
        return value
    try:
        array = np.array(value, object)
    except ValueError:  # sequences of unequal lengths
        array = np.array(None, object)
    numbers = []
    for x in array.ravel().tolist():
        try:
            if isinstance(x, (bool, np.bool_, mx.array)):
                raise TypeError
            numbers.append(operator.index(x))
        except TypeError:
            raise TypeError(f"[noise_keys] {name}: expected integers, got {x!r}") from None
    for x in numbers:
        if not 0 <= x < end:
            got = describe_number(x)
            raise ValueError(f"[noise_keys] {name}: expected integers in [0, {end}), got {got}")
    result = np.empty(len(numbers), object)
    result[:] = numbers
    return result.reshape(array.shape)


# Keys that ``sample`` drew tokens with, as long as somebody holds them.
_drawn_with: weakref.WeakValueDictionary[int, mx.array] = weakref.WeakValueDictionary()


def note_draw(keys: mx.array) -> None:
    """Remember keys that a token was drawn with."""
    _drawn_with[id(keys)] = keys


def warn_of_shared_noise(op: str, keys: mx.array) -> None:
    """Warn if a token was drawn with these very keys, whose draft would now be verified by them."""
    if _drawn_with.get(id(keys)) is keys:
        warnings.warn(
            f"[{op}] keys: expected other keys than those a draft was drawn with, got the same "
            "array: the tokens would not follow the target's distribution. Take both from "
            "exactspec.noise_keys, with the roles 'draft' and 'verify'",
            RuntimeWarning,
            stacklevel=3,
        )
