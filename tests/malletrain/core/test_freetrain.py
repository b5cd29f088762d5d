"""FreeTrain's way to plan, in the daemon: what it is told, and what its plans do otherwise."""

import math

import pytest

from allocator import NodeInfo, ScalingCurve
from malletrain.cli.check import allocation
from malletrain.config.model import parse_config
from malletrain.core.commands import Rescale, Start
from malletrain.core.controller import Controller
from malletrain.core.events import (
    JobSubmitted,
    NodeJoined,
    NodeLost,
    Progressed,
    RescaleCostMeasured,
    RescaleFinished,
    Tick,
)
from malletrain.core.planning import Candidate
from malletrain.core.pools import Pool
from malletrain.core.settings import PlanningSettings
from malletrain.daemon.site.settings import controller_settings, planner

TEXT = '[scheduler]\nkind = "local"\n[allocation]\npolicy = "{policy}"\n'
SATURATED = ScalingCurve.of({1: 10.0, 2: 11.0, 4: 12.0})


def config(policy):
    return parse_config(TEXT.format(policy=policy))


def controller(policy):
    return Controller(controller_settings(config(policy)), planner(config(policy), lambda: 0.0))


def test_what_the_controller_is_told():
    product, free = (controller_settings(config(name)) for name in ("malletrain", "freetrain"))
    assert product.profiling is not None
    assert free.profiling is None
    assert free.planning.cost.start_s == 0.0 < product.planning.cost.start_s
    assert free.planning.cost.up_s == product.planning.cost.up_s
    assert (free.starvation_s, free.min_interval_s) == (math.inf, 0.0)
    assert not config("freetrain").profiling.enabled
    assert config("malletrain").profiling.enabled


def test_stated_curves_are_believed_whatever_is_seen():
    c = controller("freetrain")
    for k in range(4):
        c.handle(NodeJoined(f"n{k}"), 0.0)
    c.handle(JobSubmitted("j1", 1, 4, curve=SATURATED, profile=True), 0.0)
    commands = c.handle(Tick(), 10.0)
    [start] = [x for x in commands if isinstance(x, Start)]
    for k in range(100):
        c.handle(Progressed("j1", len(start.nodes), 11.0 + k, 500.0 * k, 8.0), 11.0 + k)
    c.handle(RescaleCostMeasured("j1", "up", 90.0), 120.0)
    assert c.jobs["j1"].curve == SATURATED
    assert c.jobs["j1"].cost is None


def test_nobody_is_served_for_having_waited():
    started = {}
    for policy in ("malletrain", "freetrain"):
        c = controller(policy)
        c.handle(NodeJoined("n0"), 0.0)
        for job, rate in (("fast", 10.0), ("slow", 1.0)):
            curve = ScalingCurve.of({1: rate, 4: 4 * rate})
            c.handle(JobSubmitted(job, 1, 4, curve=curve), 0.0)
        c.handle(Tick(), 10.0)
        c.handle(RescaleFinished("fast"), 11.0)
        for now in (1000.0, 1010.0, 1020.0):
            c.handle(Tick(), now)
        started[policy] = bool(c.jobs["slow"].nodes)
    assert started == {"malletrain": True, "freetrain": False}


@pytest.mark.parametrize(("policy", "size"), [("freetrain", 2), ("malletrain", 3)])
def test_a_loss_is_not_taken_as_a_restart_that_has_to_be_paid_anyway(policy, size):
    """A node is free beside a job that has lost one. It must start its workers again in any case,
    so to the product staying costs something, too; FreeTrain has it pay for growing alone.
    """
    curve = ScalingCurve.of({1: 10.0, 2: 20.0, 3: 21.5})
    candidate = Candidate("j1", 1, 3, ("a", "b"), curve=curve, broken=True)
    plan = planner(config(policy), lambda: 0.0)(
        [candidate], {name: NodeInfo(Pool("default")) for name in "abc"}, PlanningSettings()
    )
    assert len(plan.nodes["j1"]) == size


def test_a_job_that_lost_a_node_goes_on():
    c = controller("freetrain")
    for k in range(3):
        c.handle(NodeJoined(f"n{k}"), 0.0)
    c.handle(JobSubmitted("j1", 1, 3), 0.0)
    c.handle(Tick(), 10.0)
    c.handle(RescaleFinished("j1"), 11.0)
    c.handle(NodeLost("n1"), 20.0)
    commands = c.handle(Tick(), 30.0)
    [rescale] = [x for x in commands if isinstance(x, Rescale)]
    assert set(rescale.nodes) == {"n0", "n2"}


def test_check_says_it():
    [(works, sentence)] = allocation(config("freetrain"))
    assert works is None
    assert "as FreeTrain makes them" in sentence
