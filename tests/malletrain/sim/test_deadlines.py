"""Deadlines and budgets in the simulator: drawn, read from files, and held by the product's own
controller.
"""

import json

import pytest

from malletrain.sim.engine import Simulation
from malletrain.sim.settings import SimSettings
from malletrain.sim.workload_files import read_workload
from malletrain.sim.workloads import SHORTEST_S, SimJob, WorkloadError, with_deadlines
from tests.malletrain.sim.conftest import job, linear, trace_of

HOUR = 3600.0
MACHINE = trace_of({f"n{k}": [(0.0, 40 * HOUR)] for k in range(4)}, 40 * HOUR)


def quick(name="quick", hours=20.0):
    """A job that makes a hundred times as much of a node as the others."""
    curve = linear(4, 1000.0)
    return SimJob(name, 1, 4, 4000.0 * HOUR * hours, curve, stated_curve=curve)


def play(*jobs):
    simulation = Simulation(MACHINE, jobs, SimSettings(starvation_s=1e9))
    return simulation, simulation.run()


def test_a_deadline_is_held_that_would_be_missed_without_and_costs_few_samples():
    spec = {"samples": 20.0 * HOUR * 6, "most": 4, "submit_s": HOUR}
    plain, before = play(quick(), job("due", **spec))
    goals, after = play(quick(), job("due", **spec, deadline_s=8 * HOUR))
    assert plain.runs["due"].ended_at is None or plain.runs["due"].ended_at > 8 * HOUR
    assert goals.runs["due"].ended_at <= 8 * HOUR
    assert goals.runs["quick"].ended_at is not None
    assert after.samples == pytest.approx(before.samples, rel=0.01)
    assert (before.deadlines, after.deadlines, after.deadlines_met) == (0, 1, 1)


def test_a_job_costs_no_more_than_its_budget():
    simulation, result = play(job("poor", samples=1e9, most=4, budget_nh=6.0))
    record = simulation.controller.goals.records["poor"]
    assert simulation.controller.jobs["poor"].halted
    spent = record.account.charged(simulation.now) / HOUR
    assert spent == pytest.approx(6.0, rel=1e-6)
    run = simulation.runs["poor"]
    assert sum(run.node_s.values()) == pytest.approx(6.0 * HOUR, rel=1e-3)
    assert result.budgets_overspent == 0
    assert not run.nodes


def test_deadlines_are_drawn_for_a_share_of_the_jobs_that_are_long_enough():
    jobs = [job(f"j{k}", samples=80.0 * HOUR) for k in range(200)]
    jobs += [job(f"s{k}", samples=80.0 * (SHORTEST_S - 1)) for k in range(20)]
    drawn = with_deadlines(jobs, 0.5, (2.0, 4.0), seed=3)
    factors = [j.deadline_s / HOUR for j in drawn if j.deadline_s is not None]
    assert 70 < len(factors) < 130
    assert 2.0 <= min(factors) < 2.3
    assert 3.7 < max(factors) <= 4.0
    assert all(j.deadline_s is None for j in drawn[200:])
    assert with_deadlines(jobs, 0.5, (2.0, 4.0), seed=3) == drawn
    with pytest.raises(WorkloadError, match="Random deadlines need"):
        with_deadlines(jobs, 1.5)


def test_workload_files_name_deadlines_and_budgets(tmp_path):
    curve = {"1": 10, "2": 20}
    one = {"name": "a", "samples": 100, "curve": curve, "deadline_s": 60, "budget_nh": 0.5}
    path = tmp_path / "jobs.json"
    path.write_text(json.dumps([one]))
    (sim_job,) = read_workload(path)
    assert (sim_job.deadline_s, sim_job.budget_nh) == (60.0, 0.5)
    path.write_text(json.dumps([{**one, "submit_s": 90}]))
    with pytest.raises(WorkloadError, match="deadline is 60 s"):
        read_workload(path)
    path.write_text(json.dumps([{**one, "budget_nh": 0}]))
    with pytest.raises(WorkloadError, match="budget of 0 node-hours"):
        read_workload(path)
