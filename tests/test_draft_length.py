"""The adaptive draft length, on synthetic costs and acceptance: no model and no clock."""

from __future__ import annotations

import random

import mlx.core as mx
import pytest
from exactspec import Sampling
from exactspec.draft_length import DraftLength
from exactspec.drafters import Adaptive, Draft, Drafter, Hybrid, no_draft, propose

MOST = 8

# Seconds of a cycle by its number of drafts.
COSTS = {
    "free": lambda k: 1 + 0.01 * k,
    "cheap": lambda k: 1 + 0.1 * k,
    "dear": lambda k: 1 + 0.85 * k,
    "convex": lambda k: 1 + 0.02 * k + 0.02 * k * k,
    "step": lambda k: 1.0 if k <= 4 else 2.0,
    # SmolLM2 with OpenBLAS: the first draft costs most.
    "concave": lambda k: (1.0, 1.28, 1.49, 1.56, 1.6, 1.6, 1.58, 1.56, 1.51)[k],
}


class Simulation:
    """Cycles whose drafts are each accepted with a probability, on a cost curve."""

    def __init__(self, cost, *, noise: float = 0.0, seed: int = 0):
        self.length = DraftLength(MOST)
        self.cost = cost
        self.noise = noise
        self.random = random.Random(seed)

    def run(self, cycles: int, acceptance: float, *, offered: float = 1.0) -> list[int]:
        """What was asked for in each cycle; a draft comes with probability ``offered``."""
        choices = []
        for _ in range(cycles):
            asked = self.length.choose(MOST)
            proposed = asked if self.random.random() < offered else 0
            accepted = 0
            while accepted < proposed and self.random.random() < acceptance:
                accepted += 1
            seconds = self.cost(proposed) * max(0.5, 1 + self.noise * self.random.gauss(0, 1))
            self.length.record(proposed, proposed, accepted, seconds)
            choices.append(asked)
        return choices


def speed(cost, acceptance: float, k: int) -> float:
    """Tokens per second of cycles with ``k`` drafts."""
    return sum(acceptance**i for i in range(k + 1)) / cost(k)


def mean_speed(cost, acceptance: float, choices: list[int]) -> float:
    tokens = sum(sum(acceptance**i for i in range(k + 1)) for k in choices)
    return tokens / sum(map(cost, choices))


@pytest.mark.parametrize("acceptance", [0.02, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("name", list(COSTS))
def test_finds_the_best_length(name, acceptance):
    cost = COSTS[name]
    best = max(speed(cost, acceptance, k) for k in range(MOST + 1))
    early, late = [], []
    for seed in range(6):
        simulation = Simulation(cost, noise=0.05, seed=seed)
        simulation.run(20, acceptance)
        early.append(mean_speed(cost, acceptance, simulation.run(80, acceptance)) / best)
        late.append(mean_speed(cost, acceptance, simulation.run(100, acceptance)) / best)
    assert sum(early) / 6 > 0.93 and min(early) > 0.8
    assert sum(late) / 6 > 0.93


@pytest.mark.parametrize("name", list(COSTS))
def test_loses_little_where_nothing_is_accepted(name):
    cost = COSTS[name]
    choices = Simulation(cost).run(500, 0.0)
    assert any(choices[100:])  # now and then it looks whether that has changed
    assert sum(map(cost, choices)) < 1.06 * 500


@pytest.mark.parametrize("offered", [1.0, 0.5])
@pytest.mark.parametrize("name", ["dear", "concave"])
def test_stops_where_nothing_is_accepted(name, offered):
    choices = Simulation(COSTS[name]).run(200, 0.0, offered=offered)
    assert choices[20:].count(0) > 0.85 * 180


@pytest.mark.parametrize("name", ["free", "cheap", "concave"])
@pytest.mark.parametrize("seed", range(3))
def test_follows_a_change_of_acceptance(name, seed):
    cost = COSTS[name]
    simulation = Simulation(cost, noise=0.05, seed=seed)
    simulation.run(100, 0.0)
    simulation.run(60, 0.95)
    high = simulation.run(20, 0.95)
    assert mean_speed(cost, 0.95, high) > 0.9 * speed(cost, 0.95, MOST)
    simulation.run(25, 0.0)
    low = simulation.run(20, 0.0)
    assert mean_speed(cost, 0.0, low) > 0.9 * speed(cost, 0.0, 0)


def test_follows_a_change_of_cost():
    cost = COSTS["free"]
    simulation = Simulation(lambda k: cost(k))
    assert sum(simulation.run(100, 0.9)[-20:]) > 20 * 6
    cost = COSTS["dear"]
    assert sum(simulation.run(60, 0.9)[-20:]) < 20 * 4
    cost = COSTS["free"]
    assert sum(simulation.run(200, 0.9)[-20:]) > 20 * 6


def test_cycles_without_a_proposal_are_no_rejections():
    simulation = Simulation(COSTS["concave"])
    choices = simulation.run(400, 1.0, offered=0.05)
    assert sum(choices[100:]) / 300 > 7.5


def test_padding_is_no_rejection():
    lengths = [DraftLength(4), DraftLength(4)]
    for num_drafts, length in zip((1, 4), lengths):
        for _ in range(50):
            length.record(4, num_drafts, 1, 1.0)
            length.record(0, 0, 0, 0.95)
    padded, rejected = (length._paces(0, [1.0] * 5) for length in lengths)
    assert padded[1] == rejected[1] and padded[4] < rejected[4]


def test_one_slow_cycle_changes_nothing():
    simulation = Simulation(COSTS["cheap"])
    simulation.run(100, 0.9)
    chosen = simulation.length.choose(MOST)
    simulation.length.record(chosen, chosen, chosen, 50.0)
    assert sum(simulation.run(20, 0.9)) > 20 * 6


@pytest.mark.parametrize("most", [1, 2, 5, 254])
def test_limits(most):
    length = DraftLength(most)
    source = random.Random(0)
    largest = 0
    for _ in range(300):
        limit = source.randint(1, 300)
        chosen = length.choose(limit)
        assert 0 <= chosen <= min(limit, most)
        # It feels its way to lengths whose cost is not known.
        assert chosen <= max(4, 2 * largest)
        largest = max(largest, chosen)
        length.record(chosen, chosen, chosen, 1 + 0.001 * chosen)
    assert largest > most / 2


def test_a_choice_has_no_memory_of_its_own():
    simulation = Simulation(COSTS["cheap"], noise=0.1)
    for _ in range(100):
        simulation.run(1, 0.5)
        assert len({simulation.length.choose(MOST) for _ in range(3)}) == 1


# Drafters that ask others


class Scripted(Drafter):
    """Proposes up to four tokens, each accepted with a probability; and nothing now and then."""

    num_draft_tokens = 4

    def __init__(self, acceptance: float, *, offered: float = 1.0):
        self.acceptance = acceptance
        self.offered = offered
        self.drafted = self.observed = self.cycles = 0

    def draft(self, limit, key):
        if cycles_random.random() >= self.offered:
            return no_draft()
        # The tokens tell whose they are: there is no model.
        return Draft(mx.full((min(limit, 4),), id(self) % 2**31, mx.int32))

    def observe(self, num_drafts, num_accepted, seconds):
        self.observed += num_drafts
        self.cycles += 1


class Chosen(Drafter):
    """A combination that is not the package's: asks all in turns."""

    def __init__(self, *parts):
        self.parts = parts
        self.turn = 0

    def begin(self, prompt, **options):
        for part in self.parts:
            part.begin(prompt, **options)

    def draft(self, limit, key):
        self.turn = (self.turn + 1) % len(self.parts)
        return propose(self.parts[self.turn], limit, key)

    def observe(self, num_drafts, num_accepted, seconds):
        for i, part in enumerate(self.parts):
            part.observe(*((num_drafts, num_accepted) if i == self.turn else (0, 0)), seconds)

    def extend(self, tokens, num_accepted):
        for i, part in enumerate(self.parts):
            part.extend(tokens, num_accepted if i == self.turn else 0)


def cycle_through(drafter: Drafter, parts: list[Scripted], cost, count: int) -> list:
    """Who drafted in each of ``count`` cycles, None where nobody did."""
    proposers = []
    owners = {id(part) % 2**31: part for part in parts}
    for _ in range(count):
        draft = propose(drafter, 254, mx.zeros((2,), mx.uint32))
        drafted = draft.draft_tokens.size
        owner = owners[draft.draft_tokens[0].item()] if drafted else None
        accepted = 0
        while accepted < drafted and cycles_random.random() < owner.acceptance:
            accepted += 1
        if owner is not None:
            owner.drafted += drafted
        drafter.observe(drafted, accepted, cost(drafted))
        drafter.extend([0] * (accepted + 1), accepted)
        proposers.append(owner)
    return proposers


cycles_random = random.Random()
BEGIN = dict(tokenizer=None, sampling=Sampling(), max_tokens=10**6, rule="token", position=0)
COMBINATIONS = {
    "alone": lambda x, y: Adaptive(x),
    "first": lambda x, y: Hybrid(Adaptive(x), y),
    "second": lambda x, y: Hybrid(y, Adaptive(x)),
    "both": lambda x, y: Hybrid(Adaptive(x), Adaptive(y)),
    "within": lambda x, y: Adaptive(Hybrid(x, y)),
    "deep": lambda x, y: Adaptive(Hybrid(Hybrid(Drafter(), Adaptive(x)), y)),
    "another's": lambda x, y: Chosen(Adaptive(x), Drafter(), Adaptive(y)),
}


@pytest.mark.parametrize("name", ["cheap", "convex", "concave"])
@pytest.mark.parametrize("other", ["nothing", "poor", "good", "now and then"])
@pytest.mark.parametrize("combine", list(COMBINATIONS))
def test_every_part_notices_when_drafting_pays_again(combine, other, name):
    """300 cycles that reject all drafts, then perfect ones: the part drafts again."""
    cycles_random.seed(f"{combine}, {other}, {name}")
    x = Scripted(0.0)
    y = {
        "nothing": Scripted(0.0, offered=0.0),
        "poor": Scripted(0.3, offered=0.8),
        "good": Scripted(0.8, offered=0.8),
        "now and then": Scripted(0.8, offered=0.1),
    }[other]
    drafter = COMBINATIONS[combine](x, y)
    drafter.begin([1], **BEGIN)
    cost = COSTS[name]
    cycle_through(drafter, [x, y], cost, 300)
    x.acceptance = 1.0
    proposers = cycle_through(drafter, [x, y], cost, 400)
    assert x in proposers[:200]
    late = proposers[200:]
    # What it can have: its turns, or what the one before it leaves.
    most = {"another's": 200 / 3, "second": 200 - late.count(y)}.get(combine, 200)
    assert late.count(x) > 0.8 * most
    for part in (x, y):
        assert part.observed == part.drafted
        assert part.cycles == 700 or part is y and combine == "alone"


@pytest.mark.parametrize("name", ["cheap", "concave"])
def test_leaves_cycles_to_a_better_one(name):
    cost = COSTS[name]
    for first, second, expected in ((0.3, 0.8, 1), (0.8, 0.3, 0), (0.0, 0.8, 1)):
        cycles_random.seed(1)
        parts = [Scripted(first), Scripted(second)]
        drafter = Hybrid(Adaptive(parts[0]), parts[1])
        drafter.begin([1], **BEGIN)
        proposers = cycle_through(drafter, parts, cost, 500)[100:]
        assert proposers.count(parts[expected]) > 0.9 * 400
