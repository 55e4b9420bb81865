"""How many tokens to draft in a cycle, from the time and the acceptance of the cycles before it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from statistics import median_low

# What fades counts of accepted and offered drafts, each cycle that had drafts; and one without.
MEMORY = 0.9
IDLE_MEMORY = 0.985
# Each slot starts with that much of an observation, of what the slot before it has; the first slot
# with this acceptance.
PRIOR = 0.6
FIRST_ACCEPTANCE = 0.5
# A drafter that hardly ever has a proposal must not hide how good its proposals are.
LEAST_OFFERED = 0.05
# Drafts asked for while nothing is known, and what one costs then, in cycles without any.
FIRST_LENGTH = 4
FIRST_SLOPE = 0.1
# A length's time is the median of its latest cycles; it is sure after two, and for a while.
SAMPLES = 5
FRESH = 64
# Share of the time that may be lost by trying lengths, and the most to be lost in a row, in cycles.
TRIALS = 0.02
MOST_CREDIT = 4


class DraftLength:
    """Chooses the number of draft tokens that promises the most tokens per second.

    Of a cycle with ``k`` drafts it expects ``1 + sum_{i <= k} prod_{j <= i} a_j`` tokens, where
    ``a_j`` is how often slot ``j`` was accepted lately when it was reached, and as many seconds as
    the latest cycles with ``k`` drafts took, interpolated for numbers never tried. What is not
    known for sure is tried where it might be better: on a budget of ``TRIALS`` of the time, and of
    what trials have won.

    Args:
        most: the most draft tokens, at least 1.
    """

    def __init__(self, most: int):
        self.most = most
        self._cycle = 0
        self._seconds: dict[int, deque[float]] = {}  # by number of drafts
        self._measured: dict[int, int] = {}  # the latest cycle with that number
        # By slot, fading: asked for and the draft got that far, of these offered; verified and all
        # slots before it accepted, of these accepted.
        self._asked, self._offered = [0.0] * most, [0.0] * most
        self._reached, self._accepted = [0.0] * most, [0.0] * most
        self._credit = 0.0  # seconds that trials may lose
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
        if hopes[trial] < paces[best] and expected[trial] - paces[best] <= self._credit:
            self._pace = paces[best]
            return trial
        return best

    def record(
        self, asked: int, proposed: int, num_drafts: int, num_accepted: int, seconds: float
    ) -> None:
        """Take a cycle into account.

        Args:
            asked: draft tokens asked for.
            proposed: those that came, and that the target read.
            num_drafts: the same without padding.
            num_accepted: draft tokens accepted.
            seconds: time of the cycle.
        """
        if not self._seconds:
            self._credit = seconds
        self._cycle += 1
        self._seconds.setdefault(proposed, deque(maxlen=SAMPLES)).append(seconds)
        self._measured[proposed] = self._cycle
        self._credit += TRIALS * seconds
        if self._pace is not None:
            self._credit -= seconds - (num_accepted + 1) * self._pace
        self._credit = min(self._credit, MOST_CREDIT * seconds)

        memory = MEMORY if num_drafts else IDLE_MEMORY
        verified = min(num_accepted + 1, num_drafts)
        _count(self._reached, self._accepted, memory, verified, num_accepted)
        if asked:
            _count(self._asked, self._offered, MEMORY, min(num_drafts + 1, asked), num_drafts)

    def _paces(self, optimism: float, costs: list[float]) -> list[float]:
        """Seconds per token to expect, by number of drafts.

        Args:
            optimism: accepted drafts to add to those that each slot has seen.
            costs: seconds of a cycle, by number of drafts.
        """
        seconds, tokens = costs[0], 1.0
        paces = [seconds]
        is_offered = is_accepted = 1.0
        rate = FIRST_ACCEPTANCE
        for slot in range(len(costs) - 1):
            share = (self._offered[slot] + 1) / (self._asked[slot] + 1)
            is_offered *= max(share, LEAST_OFFERED)
            prior = PRIOR + optimism
            rate = (self._accepted[slot] + PRIOR * rate + optimism) / (self._reached[slot] + prior)
            is_accepted *= rate
            tokens += is_offered * is_accepted
            seconds += is_offered * (costs[slot + 1] - costs[slot])
            paces.append(seconds / tokens)
        return paces

    def _costs(self, most: int) -> tuple[list[float], list[float]]:
        """Seconds of a cycle, by number of drafts: to expect, and the least to hope for."""
        known = {k: median_low(seconds) for k, seconds in sorted(self._seconds.items())}
        lengths = list(known)
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
            if nearest is not None and not self._is_sure(k):
                # Fewer drafts cost no more, and a draft costs no more than a cycle without any.
                bound = known[nearest] if nearest < k else known[nearest] * (1 + k) / (1 + nearest)
                cost = min(cost, bound)
            hoped.append(cost)
        return expected, hoped

    def _is_sure(self, k: int) -> bool:
        if len(self._seconds.get(k, ())) < 2:
            return False
        return self._cycle - self._measured[k] < FRESH


def _count(tried: list[float], hits: list[float], memory: float, num_tried: int, num_hits: int):
    """Fade the counts of all slots; then the first ``num_tried`` were tried, ``num_hits`` hit."""
    for slot in range(len(tried)):
        tried[slot] = memory * tried[slot] + (slot < num_tried)
        hits[slot] = memory * hits[slot] + (slot < min(num_tried, num_hits))
