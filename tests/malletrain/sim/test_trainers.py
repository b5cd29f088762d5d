"""Trainers in the simulator: nodes of one that no speed of another's jobs takes away."""

import pytest

from allocator import Goal
from malletrain.core.pools import Trainer
from malletrain.core.settings import ControllerSettings
from malletrain.sim.engine import simulate
from malletrain.sim.settings import SimSettings
from tests.malletrain.sim.conftest import job, trace_of

HOURS = 20.0
GAPS = {f"n{k}": [(0.0, 3600 * HOURS)] for k in range(8)}


def fractions(*trainers):
    """The part of all node-hours that each user's job has. The nodes are of class ``default``."""
    site = ControllerSettings(trainers=trainers)
    settings = SimSettings(site=site, starvation_s=float("inf"))
    jobs = [
        job("x", rate=20.0, user="ann", trainer="a"),
        job("y", rate=10.0, user="bob", trainer="b"),
    ]
    hours_of = simulate(trace_of(GAPS, 3600 * HOURS), jobs, settings).node_hours_by_user
    return {user: hours / (8 * HOURS) for user, hours in hours_of.items()}


def test_whose_nodes_they_are_decides_and_not_who_is_faster():
    assert fractions() == pytest.approx({"ann": 1.0, "bob": 0.0}, abs=0.01)
    a100 = frozenset({"a100"})
    apart = Trainer("a", node_classes=a100), Trainer("b", Goal.EFFICIENCY, other_classes=a100)
    assert fractions(*apart) == pytest.approx({"ann": 0.0, "bob": 1.0}, abs=0.01)
