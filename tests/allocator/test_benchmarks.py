"""The benchmarks run, and what they measure is right; no times are judged."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import allocation, trainers
from benchmarks.instances import KINDS, instance, read_curves


@pytest.mark.parametrize("kind", KINDS)
def test_instances_are_repeatable_and_possible(kind: str) -> None:
    one, same = instance(3, 40, 6, 16, kind), instance(3, 40, 6, 16, kind)
    assert one == same
    assigned = [name for has in one.current.values() for name in has]
    assert len(assigned) == len(set(assigned))
    assert set(assigned) <= set(one.nodes)
    assert all(len(has) <= 16 for has in one.current.values())


def test_a_row_is_the_optimum(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [
        "allocation",
        "--nodes",
        "60",
        "--jobs",
        "8",
        "--max-size",
        "16",
        "--repeats",
        "4",
        "--json",
    ]
    monkeypatch.setattr(sys, "argv", command)
    allocation.main()
    row = json.loads(capsys.readouterr().out)
    assert [row[key] for key in ("nodes", "jobs", "max_size", "gap", "oracle_checked")] == [
        60,
        8,
        16,
        0.0,
        4,
    ]
    assert row["objective"] == pytest.approx(row["oracle_objective"], rel=1e-12)
    assert 0 < row["median_ms"] <= row["worst_ms"]


def test_curves_come_from_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "curves.csv"
    file.write_text("model,nodes,samples_per_s\na,1,10\na,8,70\nb,2,5\n")
    assert [curve.points for curve in read_curves(file)] == [((1, 10.0), (8, 70.0)), ((2, 5.0),)]
    command = [
        "allocation",
        "--curves",
        str(file),
        "--nodes",
        "20",
        "--jobs",
        "4",
        "--max-size",
        "16",
        "--repeats",
        "2",
    ]
    monkeypatch.setattr(sys, "argv", command)
    allocation.main()
    printed = capsys.readouterr()
    assert "curves end at 8 nodes" in printed.err
    assert "oracle_objective" in printed.out


def test_the_comparison_with_the_node_by_node_model_agrees() -> None:
    row = allocation.compare(8, 2, seed=0, time_limit_s=60.0)
    assert row["nodewise_status"] == "optimal"
    assert row["nodewise_objective"] == pytest.approx(row["objective"], rel=1e-7)


def test_trainers_are_counted_together() -> None:
    class Now:
        def wait(self) -> None:
            pass

    load = trainers.Load(nodes=30, jobs=3, max_size=8, repeats=4)
    row = trainers.row(2, load, [trainers.run_trainer(t, load, Now()) for t in range(2)], "test")
    assert row["trainers"] == 2
    assert 0 < row["median_ms"] <= row["worst_ms"]
