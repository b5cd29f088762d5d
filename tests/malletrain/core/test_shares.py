"""What is due to whom, what follows for bids, and that nothing follows where there is enough."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allocator import RescaleCost, ScalingCurve
from malletrain.core.commands import ReclaimNodes
from malletrain.core.controller import Controller
from malletrain.core.events import JobCompleted, JobSubmitted, NodeJoined, Quota, Tick
from malletrain.core.events import RescaleFinished as Up
from malletrain.core.settings import ControllerSettings, PlanningSettings, ShareSettings
from malletrain.core.shares import MAX_DOUBLINGS, PartyService, fair_parts
from tests.malletrain.core.test_owners import NODES, Site, holding_all, job, requests_by_owner

HOUR = 3600.0
DAY = 24 * HOUR


class Machine:
    """A controller of so many nodes that stay, whose jobs train at once."""

    def __init__(self, nodes: int, shares: ShareSettings | None, **more):
        planning = PlanningSettings(cost=RescaleCost(0.1, 0.1, 0.1), **more)
        settings = ControllerSettings(
            planning, min_interval_s=0.0, starvation_s=math.inf, shares=shares
        )
        self.controller = Controller(settings)
        self.now = 0.0
        for k in range(nodes):
            self.do(NodeJoined(f"n{k}"))

    def do(self, event):
        for command in self.controller.handle(event, self.now):
            if hasattr(command, "nodes") and hasattr(command, "job"):
                self.controller.handle(Up(command.job), self.now)

    def submit(self, job, party, most=8, **more):
        curve = ScalingCurve.of((k, 10.0 * k**0.9) for k in range(1, most + 1))
        self.do(JobSubmitted(job, 1, most, curve=curve, party=party, **more))

    def let(self, seconds, every=60.0):
        """Let time pass; the controller plans every minute, as the nodes' comings make it."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + every)
            self.controller.state.plan_soon(self.now)
            self.do(Tick())

    def nodes(self, job):
        return len(self.controller.jobs[job].nodes)

    def behind(self, party):
        return self.controller.shares.standing(party).service.behind_s


demands = st.dictionaries(st.sampled_from("abcdef"), st.floats(0, 100), min_size=1)
weights = st.fixed_dictionaries({name: st.floats(0.01, 100) for name in "abcdef"})


@given(demands, weights, st.floats(0, 300))
def test_fair_parts_are_max_min_fair(demands, weights, total):
    parts = fair_parts(demands, weights, total)
    assert parts.keys() == demands.keys()
    assert all(-1e-9 <= parts[p] <= demands[p] + 1e-9 for p in parts)
    assert sum(parts.values()) == pytest.approx(min(total, sum(demands.values())), abs=1e-6)
    # Who got less than wanted has no less for its weight than anybody has.
    levels = {p: parts[p] / weights[p] for p in parts}
    for party, part in parts.items():
        if part < demands[party] - 1e-6:
            assert levels[party] >= max(levels.values()) * (1 - 1e-9) - 1e-9


def test_the_less_served_come_to_have_their_share():
    """Two equal jobs of weights 1 and 3: the second has three of four node-hours in the end."""
    m = Machine(4, ShareSettings({"a": 1.0, "b": 3.0}))
    m.submit("x", "a")
    m.submit("y", "b")
    totals = {"x": 0.0, "y": 0.0}
    for _ in range(7 * 24 * 4):
        m.let(900.0, 900.0)
        for name in totals:
            totals[name] += m.nodes(name)
    assert totals["y"] / (totals["x"] + totals["y"]) == pytest.approx(0.75, rel=0.03)
    assert abs(m.behind("a")) < DAY


def test_who_comes_back_cannot_claim_the_past():
    m = Machine(4, ShareSettings())
    m.submit("x", "a")
    m.let(3 * DAY, HOUR)
    m.submit("y", "b")
    assert m.behind("b") == 0.0
    m.let(HOUR)
    assert abs(m.behind("b")) < HOUR
    assert m.nodes("x") == m.nodes("y") == 2


def test_a_party_that_was_short_and_left_is_forgiven_with_the_half_life():
    s = ShareSettings(half_life_s=DAY)
    m = Machine(4, s)
    m.submit("x", "a")
    m.controller.shares.restore(
        {"b": PartyService(served=0.0, due=10 * HOUR, seconds=10 * HOUR)}, 0.0
    )
    before = m.controller.shares.factor("b")
    m.let(3 * DAY, HOUR)
    assert m.behind("b") == pytest.approx(10 * HOUR / 8, rel=0.01)
    assert 1.0 < m.controller.shares.factor("b") < before


def test_a_party_that_is_long_gone_is_dropped():
    m = Machine(4, ShareSettings(half_life_s=HOUR))
    m.controller.shares.restore({"b": PartyService(1000.0, 900.0, 500.0)}, 0.0)
    m.submit("x", "a")
    m.let(5 * HOUR, HOUR)
    assert m.controller.shares.services().keys() == {"a", "b"}
    m.let(20 * HOUR, HOUR)
    assert m.controller.shares.services().keys() == {"a"}


def test_where_nodes_suffice_nothing_is_due_beyond_what_is_served():
    m = Machine(8, ShareSettings({"a": 1.0, "b": 9.0}))
    m.submit("x", "a", most=6)
    m.submit("y", "b", most=2)
    m.let(DAY, HOUR)
    assert (m.nodes("x"), m.nodes("y")) == (6, 2)
    assert m.behind("a") == pytest.approx(0.0, abs=HOUR)
    assert m.controller.shares.standing("a").sentence() == ""


@given(st.floats(-40, 40), st.floats(-40, 40))
def test_a_factor_changes_no_plan_where_there_is_enough(hours_a, hours_b):
    m = Machine(5, ShareSettings())
    due = 100 * HOUR
    for party, hours in (("a", hours_a), ("b", hours_b)):
        services = m.controller.shares.services()
        services[party] = PartyService(due - hours * HOUR, due, due)
        m.controller.shares.restore(services, 0.0)
    m.submit("x", "a", most=3)
    m.submit("y", "b", most=2)
    m.let(60.0)
    assert (m.nodes("x"), m.nodes("y")) == (3, 2)


def test_factors_are_bounded_and_double_with_what_is_owed():
    m = Machine(1, ShareSettings(double_after_s=2 * HOUR))
    shares = m.controller.shares
    due = 1000 * HOUR

    def after(hours):
        shares.restore({"a": PartyService(due - hours * HOUR, due, due)}, 0.0)
        return shares.factor("a")

    assert after(0) == 1.0
    assert after(2) == pytest.approx(2.0)
    assert after(-4) == pytest.approx(0.25)
    assert after(999) == 2**MAX_DOUBLINGS
    assert shares.factor("nobody") == 1.0


def test_a_job_in_the_middle_of_a_whole_is_not_outbid_for_shares():
    def run(whole):
        m = Machine(4, ShareSettings())
        m.submit("x", "a", most=4, exempt_from_shares=whole)
        m.let(60.0)
        assert m.nodes("x") == 4
        m.controller.shares.restore(
            {
                "a": PartyService(20 * HOUR, 10 * HOUR, 10 * HOUR),
                "b": PartyService(0.0, 10 * HOUR, 10 * HOUR),
            },
            m.now,
        )
        m.submit("y", "b", most=4)
        m.let(60.0)
        return m.nodes("x"), m.nodes("y")

    assert run(whole=False) == (1, 3) or run(whole=False) == (0, 4)
    assert run(whole=True) == (2, 2), "as the plain plan has it"


def test_what_a_job_in_the_middle_of_a_whole_grows_by_counts_as_its_party_does():
    """It keeps its two nodes; the six that come are those of who got less."""
    m = Machine(2, ShareSettings())
    m.submit("x", "a", most=8, exempt_from_shares=True)
    m.let(60.0)
    ahead, behind = PartyService(30 * HOUR, 10 * HOUR, 10 * HOUR), PartyService(0.0, HOUR, HOUR)
    m.controller.shares.restore({"a": ahead, "b": behind}, m.now)
    m.submit("y", "b", most=6)
    for k in range(6):
        m.do(NodeJoined(f"m{k}"))
    m.let(60.0)
    assert (m.nodes("x"), m.nodes("y")) == (2, 6)


def test_node_classes_count_what_they_are_said_to():
    m = Machine(0, ShareSettings(classes={"big": 4.0}))
    m.do(NodeJoined("b0", "big"))
    m.do(NodeJoined("s0", "small"))
    m.submit("x", "a", most=1)
    m.submit("y", "b", most=1)
    m.let(10.0)
    m.let(HOUR)
    on_big = next(j for j in ("x", "y") if m.controller.jobs[j].nodes == ("b0",))
    party = {"x": "a", "y": "b"}[on_big]
    other = {"a": "b", "b": "a"}[party]
    service = m.controller.shares.services()
    assert service[party].served == pytest.approx(4 * service[other].served, rel=0.01)


def test_places_in_the_queue_go_by_weight_in_nodes():
    """One party submits many small jobs first, another of the same weight large ones. The first
    party does not get all ten places, and in the long run each has half of the nodes.
    """
    m = Machine(8, ShareSettings(), max_running=10)
    for k in range(30):
        m.submit(f"small{k}", "a", most=1)
    for k in range(30):
        m.submit(f"large{k}", "b", most=8)
    totals = {"small": 0, "large": 0}
    for _ in range(4 * 24):
        m.let(HOUR, HOUR)
        for name, record in m.controller.state.unfinished.items():
            totals[name.rstrip("0123456789")] += len(record.nodes)
    assert totals["small"] == pytest.approx(totals["large"], rel=0.1)


def test_more_parties_than_places_take_turns_when_a_job_ends():
    m = Machine(2, ShareSettings(), max_running=2)
    for party in "abcd":
        for k in range(3):
            m.submit(f"{party}{k}", party, most=1)
    begun = []
    for _ in range(6):
        m.let(HOUR, 600.0)
        running = [j for j, r in m.controller.state.unfinished.items() if r.nodes]
        begun += running
        m.do(JobCompleted(running[0]))
    assert {job[0] for job in begun} == set("abcd")


def test_without_shares_nothing_is_counted():
    m = Machine(4, None)
    m.submit("x", "a")
    m.let(HOUR)
    assert m.controller.shares.services() == {}
    assert m.controller.shares.standing("a") is None
    assert m.controller.shares.factor("a") == 1.0


def test_counters_outlive_a_restart():
    first = Machine(4, ShareSettings())
    first.submit("x", "a", most=4)
    first.submit("y", "b", most=4)
    first.let(5 * HOUR)
    services = first.controller.shares.services()
    again = Machine(4, ShareSettings())
    again.controller.shares.restore(services, first.now)
    assert again.controller.shares.services() == services
    again.now = first.now + 7 * DAY  # the daemon was away for a half-life
    again.do(Tick())
    for party, service in again.controller.shares.services().items():
        assert service == pytest.approx(tuple(0.5 * value for value in services[party]))


def reclaimed_for_bob(behind_s):
    """How many of Alice's six nodes go to Bob, who comes and is behind by so much."""
    site = holding_all(shares=ShareSettings(), reclaim_s=20.0)
    due = 100 * HOUR
    site.controller.shares.restore({"bob": PartyService(due - behind_s, due, due)}, site.now)
    bobs = replace(job("b", 1, 6, owner="bob"), party="bob")
    return [len(c.nodes) for c in site.do(bobs) + site.gaps() if isinstance(c, ReclaimNodes)]


def test_leases_of_several_users_follow_their_shares():
    assert reclaimed_for_bob(0.0) == [3]
    [more] = reclaimed_for_bob(2 * HOUR)
    assert more in (4, 5)
    assert reclaimed_for_bob(-16 * HOUR) in ([], [1])


def test_no_more_leases_are_asked_for_than_a_quota_has_nodes():
    site = Site()
    site.do(replace(job("a", 1, 6, owner="alice"), quotas=(Quota("user alice", 2),)))
    assert [len(nodes) for nodes in requests_by_owner(site.gaps(*NODES)).values()] == [2]
