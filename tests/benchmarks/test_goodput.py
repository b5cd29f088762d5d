"""Goodput of steps and of simulated jobs: known answers."""

from __future__ import annotations

import pytest

from benchmarks.goodput import goodput, lost_s, useful_s, usual_s
from malletrain.sim.engine import Simulation
from malletrain.sim.model_jobs import CostModel
from malletrain.sim.settings import SimSettings
from tests.malletrain.sim.conftest import job, trace_of


def test_steps_count_once_at_their_usual_time():
    """Steps of 1 s on two nodes, a pause of 5 s, steps of 2 s on one node, of which the first
    repeats the last one before: 13 s, of which 3 steps of 1 s less the repeated one, and 3 of 2 s.
    """
    steps = [(0.0, 0, 2), (1.0, 1, 2), (2.0, 2, 2), (3.0, 3, 2)]
    steps += [(8.0, 3, 1), (10.0, 4, 1), (12.0, 5, 1)]
    assert usual_s(steps) == {2: 1.0, 1: 2.0}
    assert useful_s(steps) == pytest.approx(2 * 1.0 + 3 * 2.0)
    assert lost_s(steps) == pytest.approx((5 - 2) + 1 * 2.0), "the gap, and the repeated step"


def test_a_change_without_a_repeated_step_costs_the_gap_less_a_step():
    steps = [(0.0, 0, 2), (1.0, 1, 2), (2.0, 2, 2), (3.5, 3, 3), (4.0, 4, 3), (4.5, 5, 3)]
    assert lost_s(steps) == pytest.approx(1.5 - 0.5)


def test_a_slow_step_without_a_change_is_not_lost():
    steps = [(0.0, 0, 2), (1.0, 1, 2), (2.0, 2, 2), (9.0, 3, 2)]
    assert lost_s(steps) == 0.0
    assert useful_s(steps) == pytest.approx(3.0)


def test_an_undisturbed_training_is_all_useful():
    steps = [(0.5 * k, k, 4) for k in range(100)]
    assert useful_s(steps) == pytest.approx(steps[-1][0] - steps[0][0])


@pytest.mark.parametrize(
    ("mode", "redone_s", "pause_s"), [("live", 0.5, 0.25), ("restart", 59.0, 0.25)]
)
def test_goodput_of_a_simulated_job(mode, redone_s, pause_s):
    """Four nodes for 1,000 s, of which one goes at 500. The job starts at 1 and trains from 21,
    with snapshots every minute, the last at 441. The loss is planned for after 0.1 s.
    """
    gaps = {f"n{k}": [(0.0, 1000.0)] for k in range(3)} | {"n3": [(0.0, 500.0)]}
    costs = CostModel(start_s=20.0, down_s=pause_s, mode=mode, step_s=0.5)
    simulation = Simulation(trace_of(gaps, 1000.0), [job()], SimSettings(costs=costs))
    simulation.run()
    figures = goodput(simulation)
    total = 499 * 4 + 500 * 3
    lost = redone_s * 4 + (pause_s + 0.1) * 3
    assert figures["starting"] == pytest.approx(20 * 4 / total)
    assert figures["losses"] == pytest.approx(lost / total, rel=1e-3)
    assert figures["goodput"] == pytest.approx(1 - (80 + lost) / total, rel=1e-4)
    assert figures["minutes"] == pytest.approx(999 / 2 / 60)
