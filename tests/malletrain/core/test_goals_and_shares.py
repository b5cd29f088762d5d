"""Goals and fair shares together: shares weigh bids first, then goals bid. So what a deadline needs
is worth more than any share, and what lies beyond it counts as its party's other samples do.
"""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allocator import RescaleCost, ScalingCurve
from malletrain.core.controller import Controller
from malletrain.core.events import JobSubmitted, NodeJoined, RescaleFinished, Tick
from malletrain.core.goal_bids import MIN_DEADLINE_FACTOR
from malletrain.core.goals import OwnerGoals
from malletrain.core.planning import exact, make_plan
from malletrain.core.settings import ControllerSettings, PlanningSettings, ShareSettings
from malletrain.core.shares import PartyService, discounted
from tests.allocator.strategies import curves
from tests.draws import cases
from tests.malletrain.core.controller_script import play

HOUR = 3600.0
TEN = ScalingCurve.of({1: 10.0, 8: 80.0})
FAST = ScalingCurve.of({1: 1000.0, 8: 8000.0})
WORK = 15.0 * 0.95 * HOUR
"""Two nodes of :data:`TEN` do so much in an hour, at 85 % of what they promise."""


class Site:
    """A controller of four nodes, shared by the parties a and b; what its plans are made of is
    kept.
    """

    def __init__(self, behind):
        self.shown = {}
        planning = PlanningSettings(cost=RescaleCost(1.0, 1.0, 1.0))
        site = ControllerSettings(
            planning, starvation_s=1e9, min_interval_s=0.0, shares=ShareSettings()
        )
        self.site = site
        self.c = Controller(site, self.plan)
        self.now = 0.0
        for k in range(4):
            self.do(NodeJoined(f"n{k}"))
        # Doublings of the bids of each party.
        double = site.shares.double_after_s
        total = 1e9
        self.c.shares.restore(
            {
                party: PartyService(total * (1.0 - by * double / 1e8), total, 1e8)
                for party, by in behind.items()
            },
            0.0,
        )

    def plan(self, candidates, *rest):
        self.shown = {c.job: c for c in candidates}
        return partial(make_plan, solver=exact)(candidates, *rest)

    def do(self, event):
        play(self.c, [(self.now, event)])

    def submit(self, name, party, curve, **goals):
        spec = JobSubmitted(name, 1, 4, curve=curve, goals=OwnerGoals(**goals), party=party)
        self.do(spec)

    def let(self, seconds):
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 10.0)
            self.do(Tick())
            for name in [n for n, job in self.c.jobs.items() if job.rescaling]:
                self.do(RescaleFinished(name))

    def nodes(self, job):
        return len(self.c.jobs[job].nodes)

    def per_node(self, job, nodes):
        """What a node of so many is worth in the job's bid."""
        c = self.shown[job]
        return c.weight * c.curve.at(nodes) / nodes


def test_a_deadline_of_the_most_served_is_held_against_the_least_served():
    site = Site({"a": -4.0, "b": 4.0})
    site.submit("due", "a", TEN, deadline=HOUR, work=WORK)
    site.submit("fast", "b", FAST)
    site.let(60.0)
    assert site.c.goals.records["due"].need.nodes == 2
    assert (site.nodes("due"), site.nodes("fast")) == (2, 2)


def test_the_same_job_without_a_deadline_gets_nothing_there():
    site = Site({"a": -4.0, "b": 4.0})
    site.submit("late", "a", TEN)
    site.submit("fast", "b", FAST)
    site.let(60.0)
    assert (site.nodes("late"), site.nodes("fast")) == (0, 4)


@settings(max_examples=cases(20))
@given(st.floats(-4, 4), st.floats(-4, 4))
def test_what_a_deadline_needs_is_worth_more_than_any_share(one, other):
    site = Site({"a": one, "b": other})
    site.submit("due", "a", TEN, deadline=HOUR, work=WORK)
    site.submit("fast", "b", FAST)
    site.let(10.0)
    fast = site.shown["fast"]
    assert fast.weight == pytest.approx(2.0**other, rel=0.01)
    needed = site.per_node("due", site.c.goals.records["due"].need.nodes)
    least = MIN_DEADLINE_FACTOR * site.site.deadline_weight
    assert needed >= 0.9 * least * fast.weight * FAST.best_rate_per_node


def test_beyond_its_need_a_deadline_counts_as_its_party_does():
    """A curve with little use of the third node: it is worth what the party's samples are."""
    flat = ScalingCurve.of({1: 10.0, 2: 20.0, 3: 22.0, 4: 24.0})
    for doublings in (-2.0, 0.0, 2.0):
        site = Site({"a": doublings, "b": 0.0})
        site.submit("due", "a", flat, deadline=HOUR, work=WORK)
        site.submit("fast", "b", FAST)
        site.let(10.0)
        bid = site.shown["due"].curve
        ahead = site.site.deadline_ahead
        assert bid.at(4) - bid.at(3) == pytest.approx(ahead * 2.0 * 2.0**doublings, rel=0.02)


def test_deadlines_of_all_parties_are_served_in_their_order():
    """Who is due first is, however much the other's bids count."""
    site = Site({"a": -4.0, "b": 4.0})
    site.submit("later", "b", FAST, deadline=2 * HOUR, work=1500.0 * HOUR)
    site.submit("first", "a", TEN, deadline=HOUR, work=WORK)
    site.let(10.0)
    assert site.per_node("first", 1) > site.per_node("later", 1)


def test_a_budget_says_which_sizes_and_the_share_what_they_count():
    site = Site({"a": 2.0, "b": 0.0})
    site.submit("poor", "a", TEN, budget_s=250.0)
    site.submit("fast", "b", FAST)
    site.let(10.0)
    poor = site.shown["poor"]
    assert poor.sizes == (1, 2)
    assert poor.weight == pytest.approx(4.0, rel=0.01)


@given(curves(), st.integers(1, 20), st.floats(0.0, 1.0))
def test_only_what_a_job_has_counts_in_full(curve, nodes, part):
    discounted_curve = discounted(curve, nodes, part)
    have = curve.at(nodes)
    for size, rate in discounted_curve.points:
        at = curve.at(size)
        expected = at if size <= nodes else have + part * (at - have)
        assert rate == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert nodes in {size for size, _ in discounted_curve.points}
