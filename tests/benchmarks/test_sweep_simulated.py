"""Which trials go on, and what is compared at equal time."""

from __future__ import annotations

import csv
import gzip
import math

import pytest

from benchmarks.sweep_simulated import RUNGS, SweepOutcome, cost_at, halved, trials, write
from malletrain.sim.workload_files import read_workload


def test_a_third_goes_on_by_what_it_has_reached_so_far():
    # Trial 8 leads at first, trial 7 from the second rung on.
    rows = [[n / 100, 0.5, 0.5, 0.5] for n in range(9)]
    rows[7][1] = 0.9
    assert halved(rows) == [4] * 6 + [12, 108, 12]
    assert (
        sorted(halved([[n / 100] * 4 for n in range(81)]))
        == [4] * 54 + [12] * 18 + [36] * 6 + [108] * 3
    )


def outcome(way, hours, cost):
    return SweepOutcome(way, hours, cost, 9, 0, 0)


def test_costs_at_equal_time():
    outcomes = [
        outcome("malleable 1:4", 10.0, 100.0),
        outcome("malleable 1:2", 20.0, 80.0),
        outcome("malleable 1:1", 30.0, 90.0),
        outcome("fixed 2", 15.0, 120.0),
    ]
    assert cost_at(15.0, outcomes) == pytest.approx(90.0)
    assert cost_at(30.0, outcomes) == 80.0, "with more time the cheapest outcome counts"
    assert cost_at(99.0, outcomes) == 80.0
    assert math.isnan(cost_at(9.0, outcomes))


def test_trials_are_a_workload_of_the_simulator(tmp_path):
    table = tmp_path / "cells.csv.gz"
    with gzip.open(table, "wt", newline="") as file:
        rows = csv.writer(file)
        accuracies = [f"val_acc_{rung}ep" for rung in RUNGS]
        rows.writerow(["num_vertices", "adjacency_rowmajor", "interior_ops", *accuracies])
        for ops, reached in (("00", 0.9), ("01", 0.8), ("12", 0.7)):
            rows.writerow([4, "0100001000010000", ops, *[reached] * 4])
    jobs = trials(table, 3, 0, 108.0)
    assert sorted(job.samples for job in jobs) == [4.0, 4.0, 108.0]
    write(tmp_path / "jobs.json", jobs)
    read = read_workload(tmp_path / "jobs.json")
    assert [(j.name, j.samples, j.max_nodes, j.user, j.model) for j in read] == [
        (j.name, j.samples, j.max_nodes, j.user, j.model) for j in jobs
    ]
    assert [(j.parameters, j.flops) for j in read] == [(j.parameters, j.flops) for j in jobs]
    assert len({j.flops for j in read}) == 3, "by which alike cells are found"
    assert all(a.curve.points == b.curve.points for a, b in zip(read, jobs, strict=True))
