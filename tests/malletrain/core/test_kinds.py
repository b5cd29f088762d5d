"""Jobs that ask for a kind of slots, or a class of nodes."""

from __future__ import annotations

import pytest

from allocator import ScalingCurve
from malletrain.core.commands import Start, Suspend, TakeLeases
from malletrain.core.events import GapsSeen, NodeJoined, NodeLost, PricesChanged, Tick
from malletrain.core.goals import OwnerGoals
from malletrain.core.settings import ShareSettings
from tests.malletrain.core.controller_script import controller, job, nodes, play


def leased(commands):
    return {node for one in commands if isinstance(one, TakeLeases) for node in one.nodes}


def test_a_job_gets_the_slots_of_its_kind_and_leaves_the_others():
    c = controller()
    play(c, [(0.0, job("g", 1, 4, node_class="gpu")), (0.0, job("c", 1, 4, node_class="cpu"))])
    commands = play(
        c,
        [
            *nodes("h/cpu.0", node_class="cpu"),
            *nodes("h/gpu.0", "h/gpu.1", node_class="gpu"),
            (1.0, Tick()),
        ],
    )
    starts = {one.job: set(one.nodes) for one in commands if isinstance(one, Start)}
    assert starts == {"g": {"h/gpu.0", "h/gpu.1"}, "c": {"h/cpu.0"}}


def test_a_job_whose_kind_is_missing_holds_up_nobody():
    c = controller(max_running=1)
    play(c, [(0.0, job("g", 2, 4, node_class="gpu")), (0.0, job("c", 1, 4))])
    commands = play(
        c,
        [*nodes("a", "b", "c"), *nodes("h/gpu.0", node_class="gpu"), (1.0, Tick())],
    )
    assert commands == [Start("c", ("a", "b", "c"))]


def test_leases_are_taken_of_the_kind_that_a_job_can_use():
    c = controller()
    slots = {f"h/gpu.{number}": (900.0, "gpu") for number in range(3)}
    offers = {"a": (900.0, "default"), "b": (900.0, "default"), **slots}
    commands = play(c, [(0.0, job("g", 1, 2, node_class="gpu")), (1.0, GapsSeen(offers))])
    assert len(leased(commands)) == 2
    assert leased(commands) <= slots.keys()


@pytest.mark.parametrize("profile", [False, True])
def test_a_profile_is_measured_on_nodes_of_the_kind(profile):
    c = controller()
    play(c, [(0.0, job("g", 1, 2, node_class="gpu", profile=profile))])
    commands = play(
        c,
        [
            *nodes("a", "b", "c"),
            *nodes("h/gpu.0", "h/gpu.1", node_class="gpu"),
            (1.0, Tick()),
        ],
    )
    [start] = [one for one in commands if isinstance(one, Start)]
    assert set(start.nodes) <= {"h/gpu.0", "h/gpu.1"}


PRICES = PricesChanged({"gpu": 0.25, "cpu": 0.5})


def budgeted(budget_s, **more):
    goals = OwnerGoals(None, budget_s, None)
    return job("j", 1, 1, curve=ScalingCurve.of({1: 10.0}), goals=goals, **more)


def suspended_at(c, script):
    """When the job is suspended, with ticks where the controller asks for them."""
    for time, event in script:
        c.handle(event, time)
    while (due := c.next_wakeup()) is not None and due < 1e6:
        if any(isinstance(each, Suspend) for each in c.handle(Tick(), due)):
            return due
    return None


@pytest.mark.parametrize(
    ("node_class", "lasts_s"), [("gpu", 2400.0), ("cpu", 1200.0), ("default", 600.0)]
)
def test_a_budget_counts_the_price_of_the_kind(node_class, lasts_s):
    script = [(0.0, PRICES), (0.0, budgeted(600.0)), *nodes("a", node_class=node_class)]
    c = controller()
    assert suspended_at(c, script) == pytest.approx(lasts_s + 1.0)
    assert c.goals.records["j"].account.charged(1e6) == pytest.approx(600.0)


def test_a_price_that_becomes_known_later_counts_from_the_beginning():
    joined = nodes("a", node_class="gpu")
    script = [(0.0, budgeted(600.0)), *joined, (1.0, Tick()), (100.0, PRICES)]
    c = controller()
    assert suspended_at(c, script) == pytest.approx(2401.0)


UNKNOWN = PricesChanged({"gpu": 1.0, "cpu": 0.5}, frozenset({"gpu"}))


def test_no_job_is_suspended_for_a_price_that_is_not_known():
    # At price 1 the budget would be spent at 601 s, before the price 0.25 is known.
    joined = nodes("a", node_class="gpu")
    script = [(0.0, UNKNOWN), (0.0, budgeted(600.0)), *joined, (1.0, Tick()), (700.0, Tick())]
    c = controller()
    for time, event in script:
        assert not any(isinstance(each, Suspend) for each in c.handle(event, time))
    assert c.goals.records["j"].account.charged(700.0) == 0.0
    assert c.goals.least_budget_s(1, "gpu") == c.goals.least_budget_s(1) == 0.0
    assert suspended_at(c, [(700.0, PRICES)]) == pytest.approx(2401.0)
    assert c.goals.records["j"].account.charged(1e6) == pytest.approx(600.0)


def test_a_node_that_left_before_its_price_was_known_costs_nothing():
    c = controller()
    joined = nodes("a", node_class="gpu")
    for time, event in [(0.0, UNKNOWN), (0.0, budgeted(600.0)), *joined, (1.0, Tick())]:
        c.handle(event, time)
    c.handle(NodeLost("a"), 100.0)
    c.handle(PRICES, 200.0)
    assert c.goals.records["j"].account.charged(300.0) == 0.0


def test_a_budget_that_pays_for_a_slot_need_not_pay_for_a_node():
    c = controller()
    c.handle(PRICES, 0.0)
    keeper, node_s = c.goals, controller().goals.least_budget_s(1)
    assert keeper.least_budget_s(2, "gpu") == pytest.approx(0.5 * node_s)
    assert keeper.least_budget_s(2, "default") == pytest.approx(2 * node_s)
    assert keeper.least_budget_s(2) == pytest.approx(0.5 * node_s)  # the cheapest


def test_shares_count_the_price_of_the_kind():
    served = {}
    for classes in ({}, {"gpu": 2.0}):
        c = controller(shares=ShareSettings(classes=classes))
        c.handle(PRICES, 0.0)
        for name, kind in (("g", "gpu"), ("c", "cpu")):
            c.handle(job(name, 1, 1, node_class=kind, party=name), 0.0)
            c.handle(NodeJoined(f"h/{kind}.0", node_class=kind), 0.0)
        for time in range(1, 1000, 10):
            c.handle(Tick(), float(time))
        services = c.shares.services()
        served[tuple(classes)] = services["g"].served / services["c"].served
    assert served[()] == pytest.approx(0.25 / 0.5)
    assert served["gpu",] == pytest.approx(2.0 / 0.5), "what the site says comes first"


def test_deadlines_are_forecast_with_the_slots_of_their_kind():
    c = controller()
    curve = ScalingCurve.of({1: 10.0, 8: 80.0})
    for name, kind in (("g", "gpu"), ("c", "cpu")):
        goals = OwnerGoals(1e5, None, 36_000.0)
        c.handle(job(name, 1, 8, curve=curve, goals=goals, node_class=kind), 0.0)
    for number in range(4):
        c.handle(NodeJoined(f"h/gpu.{number}", node_class="gpu"), 0.0)
    c.handle(NodeJoined("h/cpu.0", node_class="cpu"), 0.0)
    for time in range(1, 400, 10):
        c.handle(Tick(), float(time))
    ends = {name: c.goals.records[name].forecast.end for name in ("g", "c")}
    remaining = {name: end - 391.0 for name, end in ends.items()}
    assert remaining["c"] == pytest.approx(4 * remaining["g"], rel=0.25)
