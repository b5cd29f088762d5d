"""Trainers in the simulator: parts of a few nodes that no speed in another unit takes away."""

import pytest

from allocator import Goal
from malletrain.core.settings import ControllerSettings
from malletrain.core.trainers import Trainer
from malletrain.sim.engine import simulate
from malletrain.sim.settings import SimSettings
from tests.malletrain.sim.conftest import job, trace_of

HOURS = 20.0
GAPS = {f"n{k}": [(0.0, 3600 * HOURS)] for k in range(8)}


def parts(*trainers):
    site = ControllerSettings(trainers=trainers)
    settings = SimSettings(site=site, starvation_s=float("inf"))
    jobs = [
        job("x", rate=20.0, user="ann", trainer="a"),
        job("y", rate=10.0, user="bob", trainer="b"),
    ]
    hours_of = simulate(trace_of(GAPS, 3600 * HOURS), jobs, settings).node_hours_by_user
    return {user: hours / (8 * HOURS) for user, hours in hours_of.items()}


def test_parts_hold_whatever_is_faster():
    assert parts() == pytest.approx({"ann": 1.0, "bob": 0.0}, abs=0.01)
    apart = Trainer("a", part=1.0), Trainer("b", Goal.EFFICIENCY, part=3.0)
    assert parts(*apart) == pytest.approx({"ann": 0.25, "bob": 0.75}, abs=0.01)
