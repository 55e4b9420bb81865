"""How many tokens to draft in a cycle, from the time and the acceptance of the cycles before it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from statistics import median_low

# What fades the counts of accepted drafts in each cycle that had any.
MEMORY = 0.9
# Each slot starts with that much of an observation, of what the slot before it has; the first slot
# with this acceptance.
PRIOR = 0.6
FIRST_ACCEPTANCE = 0.5
# Drafts asked for while nothing is known, and what one costs then, in cycles without any.
FIRST_LENGTH = 4
FIRST_SLOPE = 0.1
# A length's time is the median of its latest cycles; it is sure after two, and for a while.
SAMPLES = 5
FRESH = 64
# Cycles without a draft of its own that halve what the counts before them weigh.
HALF_LIFE = 64
# Share of the time that may be lost by trying lengths, and the most to be lost in a row, in cycles.
TRIALS = 0.02
MOST_CREDIT = 4


class DraftLength:
    """Chooses the number of draft tokens that promises the most tokens per second.

    Of a cycle with ``k`` drafts it expects ``1 + sum_{i <= k} prod_{j <= i} a_j`` tokens, where
    ``a_j`` is how often slot ``j`` was accepted lately when it was reached, and as many seconds as
    the latest cycles with ``k`` drafts took, interpolated for numbers never tried. What is not
    known for sure is tried where it might be better: on a budget of ``TRIALS`` of the time, and of
    what trials have won. A cycle without drafts of its own may yield more than one token, if
    another drafter's were accepted in it; and what was learnt of the drafts grows old meanwhile.

    Args:
        most: the most draft tokens, at least 1.
    """

    def __init__(self, most: int):
        self.most = most
        self._cycle = 0
        self._seconds: dict[int, deque[float]] = {}  # by number of drafts
        self._measured: dict[int, int] = {}  # the latest cycle with that number
        # Drafts of each slot that were verified after all before them were accepted, and how many
        # of these were accepted; both fade.
        self._reached, self._accepted = [0.0] * most, [0.0] * most
        self._idle = 0  # cycles since then
        # Cycles without a draft of its own, and their tokens beyond one each; both fade.
        self._passed, self._passed_gain = 0.0, 0.0
        self._credit = self._most_credit = 0.0  # seconds that trials may lose
        self._pace: float | None = None  # in a trial: seconds per token that it gives up

    def choose(self, limit: int) -> int:
        """The number of draft tokens for the next cycle, 0 to ``min(limit, most)``."""
        self._pace = None
        most = min(limit, self.most)
        if not self._seconds:
            return min(most, FIRST_LENGTH)
        # Costs are not extrapolated further than that.
        most = min(most, max(FIRST_LENGTH, 2 * max(self._seconds)))
        expected, hoped = self._costs(most)
        paces = self._paces(0, expected)
        hopes = self._paces(1, hoped)
        best = min(range(most + 1), key=paces.__getitem__)
        trial = min(range(most + 1), key=hopes.__getitem__)
        # With full credit a trial may cost what it will: it is paid back before the next one.
        loss = min(expected[trial] - paces[best], self._most_credit)
        if hopes[trial] < paces[best] and loss <= self._credit:
            self._pace = paces[best]
            return trial
        return best

    def record(self, proposed: int, num_drafts: int, num_accepted: int, seconds: float) -> None:
        """Take a cycle into account.

        Args:
            proposed: draft tokens that the target read, 0 where the drafter had none.
            num_drafts: the same without padding.
            num_accepted: draft tokens accepted.
            seconds: time of the cycle.
        """
        if not self._seconds:
            self._credit = seconds
        memory = MEMORY * self._weight()
        self.wait(seconds)
        if not self._is_fresh(proposed):
            self._seconds[proposed] = deque(maxlen=SAMPLES)
        self._seconds[proposed].append(seconds)
        self._measured[proposed] = self._cycle
        if self._pace is not None and proposed:
            self._credit -= seconds - (num_accepted + 1) * self._pace
        self._most_credit = MOST_CREDIT * seconds
        self._credit = min(self._credit, self._most_credit)

        if num_drafts:
            self._idle = 0
            for slot in range(self.most):
                is_reached = slot < min(num_accepted + 1, num_drafts)
                self._reached[slot] = memory * self._reached[slot] + is_reached
                self._accepted[slot] = memory * self._accepted[slot] + (slot < num_accepted)

    def wait(self, seconds: float) -> None:
        """Let a cycle of so many seconds pass, in which nothing was asked for."""
        self._cycle += 1
        self._idle += 1
        self._credit += TRIALS * seconds

    def record_gain(self, gain: int) -> None:
        """Of the cycle recorded last, without a draft of its own: tokens that it yielded beyond
        one, which were another drafter's."""
        self._passed = MEMORY * self._passed + 1
        self._passed_gain = MEMORY * self._passed_gain + gain

    def _paces(self, optimism: float, costs: list[float]) -> list[float]:
        """Seconds per token to expect, by number of drafts.

        Args:
            optimism: accepted drafts to add to those that each slot has seen; the older these are,
                the less they weigh then, and the more is added.
            costs: seconds of a cycle, by number of drafts.
        """
        tokens, all_accepted, rate = 1.0, 1.0, FIRST_ACCEPTANCE
        weight = self._weight() if optimism else 1.0
        optimism *= 1 + self._idle / HALF_LIFE
        paces = [costs[0] / (1 + self._passed_gain / (self._passed + PRIOR))]
        for reached, accepted, cost in zip(self._reached, self._accepted, costs[1:]):
            seen = weight * reached + PRIOR + optimism
            rate = (weight * accepted + PRIOR * rate + optimism) / seen
            all_accepted *= rate
            tokens += all_accepted
            paces.append(cost / tokens)
        return paces

    def _costs(self, most: int) -> tuple[list[float], list[float]]:
        """Seconds of a cycle, by number of drafts: to expect, and the least to hope for."""
        known = {k: median_low(seconds) for k, seconds in sorted(self._seconds.items())}
        lengths = list(known)
        if len(lengths) > 1 and (self._passed_gain or known[lengths[0]] >= known[lengths[1]]):
            # Others draft where it does not: 0 has the cost of their drafts, not of none.
            lengths = lengths[lengths[0] == 0 :]
        expected, hoped = [], []
        for k in range(most + 1):
            first, last = bisect_left(lengths, k), bisect_right(lengths, k)
            below = lengths[first - 1] if first > 0 else None
            above = lengths[last] if last < len(lengths) else None
            nearest = above if below is None else below
            if k in known:
                cost = known[k]
            elif below is not None and above is not None:
                share = (k - below) / (above - below)
                cost = known[below] + share * (known[above] - known[below])
            else:
                cost = known[nearest] * (1 + FIRST_SLOPE * k) / (1 + FIRST_SLOPE * nearest)
            expected.append(cost)
            is_sure = self._is_fresh(k) and len(self._seconds[k]) > 1
            if nearest is not None and not is_sure:
                # Fewer drafts cost no more, and a draft costs no more than a cycle without any.
                bound = known[nearest] if nearest < k else known[nearest] * (1 + k) / (1 + nearest)
                cost = min(cost, bound)
            hoped.append(cost)
        return expected, hoped

    def _weight(self) -> float:
        """What the counts of accepted drafts weigh by their age."""
        return 0.5 ** (self._idle / HALF_LIFE)

    def _is_fresh(self, k: int) -> bool:
        return k in self._seconds and self._cycle - self._measured[k] < FRESH
