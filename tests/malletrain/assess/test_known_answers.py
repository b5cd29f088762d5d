"""Machines of which everybody knows what they would yield, as Slurm's accounting tells of them."""

from __future__ import annotations

import json
from datetime import datetime, timedelta

import pytest

from malletrain.cli import main
from tests.command_runner import CliRunner

MONTH = ["--from", "2024-01-01", "--to", "2024-02-01"]
START_S = 18.0 + 1.0
"""What a start costs, and the settle time before a plan, unless something else is asked for."""


def at(hours):
    return (datetime(2024, 1, 1) + timedelta(hours=hours)).isoformat()


@pytest.fixture
def yields(tmp_path):
    """What ``malletrain assess`` answers for jobs of (first hour, last hour, node)."""

    def assess(jobs, *more):
        rows = ["JobID|Submit|Start|End|State|NNodes|NodeList"] + [
            f"{k}|{at(a)}|{at(a)}|{at(b)}|COMPLETED|1|{node}" for k, (a, b, node) in enumerate(jobs)
        ]
        log = tmp_path / "january.txt"
        log.write_text("\n".join(rows) + "\n")
        report = tmp_path / "report.html"
        argv = ["assess", "--sacct", str(log), "--output", str(report), "--json", *MONTH, *more]
        done = CliRunner().invoke(main, argv)
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    return assess


BUSY = [(6 * k, 6 * k + 6, f"n{n}") for n in range(4) for k in range(31 * 4)]


def test_a_machine_that_is_busy_all_month_yields_nothing(yields):
    assessment = yields(BUSY)
    assert assessment["gaps"]["idle_node_hours"] == 0.0
    assert assessment["cases"] == []


def test_a_machine_that_is_idle_all_month_yields_all_but_one_start(yields):
    assessment = yields([(0, 0.001, "n1"), (743.9, 744, "n1")], "--jobs", "1", "--samples", "1e10")
    case = assessment["cases"][0]
    assert assessment["gaps"]["idle_fraction"] > 0.999
    assert case["harvested_fraction"] == pytest.approx(1 - START_S / (168 * 3600))
    assert case["hours"] == 168.0


def test_one_gap_of_an_hour_yields_an_hour_without_a_start(yields):
    """The gap is in the simulated week, however long the machine was busy before and after it."""
    first = [job for job in BUSY if job != (240, 246, "n2")]
    assessment = yields([*first, (241, 246, "n2")], "--max-jobs", "1")
    case = assessment["cases"][0]
    assert assessment["gaps"]["idle_node_hours"] == pytest.approx(1.0)
    assert assessment["gaps"]["gaps"] == 1
    assert case["harvested_fraction"] == pytest.approx(1 - START_S / 3600)
