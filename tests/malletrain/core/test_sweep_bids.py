"""The trials of a sweep bid together as one job would."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allocator import RescaleCost, ScalingCurve
from malletrain.core.bidders import sweep_factor, weigh_sweeps
from malletrain.core.controller import Controller
from malletrain.core.events import JobSubmitted, NodeJoined, Tick
from malletrain.core.planning import Candidate
from malletrain.core.settings import ControllerSettings, PlanningSettings

FREE = RescaleCost(0.0, 0.0, 0.0)
ROOT = ScalingCurve.of({k: k**0.5 for k in range(1, 33)})
"""So concave that a plan of the same jobs gives each the same."""


def planned(*jobs, nodes=10):
    """job → its nodes, after the first plan."""
    c = Controller(ControllerSettings(PlanningSettings(cost=FREE), min_interval_s=0.0))
    for name, sweep in jobs:
        c.handle(JobSubmitted(name, 1, 32, sweep=sweep, curve=ROOT), 0.0)
    for k in range(nodes):
        c.handle(NodeJoined(f"n{k:02}"), 0.0)
    c.handle(Tick(), 10.0)
    return {name: len(job.nodes) for name, job in c.jobs.items()}


def test_beside_another_job_a_sweep_gets_what_one_job_would():
    """Six jobs share ten nodes evenly. A job and a sweep of five get half each, like two jobs."""
    assert planned(("j", ""), *((f"t{k}", "") for k in range(5)))["j"] <= 2
    assert planned(("j", ""), ("k", "")) == {"j": 5, "k": 5}
    node_counts = planned(("j", ""), *((f"t{k}", "s") for k in range(5)))
    assert node_counts == {"j": 5, **{f"t{k}": 1 for k in range(5)}}


def test_two_sweeps_share_evenly_however_many_trials_they_have():
    node_counts = planned(
        *((f"t{k}", "s") for k in range(8)), *((f"u{k}", "r") for k in range(2)), nodes=16
    )
    assert sum(count for name, count in node_counts.items() if name[0] == "t") == 8


def test_alone_it_has_everything_and_no_trial_less_than_before():
    together = planned(*((f"t{k}", "s") for k in range(3)), nodes=9)
    assert together == planned(*((f"t{k}", "") for k in range(3)), nodes=9)


def candidate(name, low=1, high=8, curve=None):
    return Candidate(name, low, high, (), curve=curve)


@pytest.mark.parametrize(
    ("trials", "nodes", "expected"),
    [
        ([candidate("a")], 9, 1.0),
        ([candidate("a"), candidate("b")], 9, 2**-0.1),
        ([candidate("a"), candidate("b")], 1, 1.0),
        ([candidate(str(k), curve=ROOT) for k in range(4)], 9, 0.5),
        ([candidate(str(k), low=2, curve=ROOT) for k in range(4)], 9, 0.5),
        # Beyond the largest size as nodes**0.9: half as much a node at 4, and so on.
        ([candidate(str(k), high=4, curve=ROOT) for k in range(8)], 99, 0.5 * 2**-0.1),
    ],
)
def test_the_factor(trials, nodes, expected):
    assert sweep_factor(trials, nodes, 0.9) == pytest.approx(expected, abs=1e-4)


@given(st.lists(st.sampled_from(["", "s", "r"]), max_size=12), st.integers(1, 40))
def test_only_trials_are_weighed_and_all_of_a_sweep_alike(sweeps, nodes):
    jobs = [candidate(f"j{k}", curve=ROOT) for k in range(len(sweeps))]
    of = {f"j{k}": sweep for k, sweep in enumerate(sweeps) if sweep}
    weight_of = {c.job: c.weight for c in weigh_sweeps(jobs, of, nodes, 0.9)}
    assert list(weight_of) == [c.job for c in jobs]
    assert all(weight_of[f"j{k}"] == 1.0 for k, sweep in enumerate(sweeps) if not sweep)
    for sweep in ("s", "r"):
        weights = {weight_of[name] for name, mine in of.items() if mine == sweep}
        assert len(weights) <= 1
        assert all(0 < weight <= 1 for weight in weights)
