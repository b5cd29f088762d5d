"""Made-up records of steps and main jobs, known accounts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.main_jobs import MainRecord
from benchmarks.requeue import number_of_trainings, ratios, with_added_waits
from benchmarks.requeue_account import (
    Account,
    Record,
    account,
    added_wait,
    gaps_of,
    outcome,
    records_of,
    waits_of,
)
from benchmarks.requeue_training import StepLog

NO_MAIN: list[MainRecord] = []


def step(began: float, position: int, total: int = 10, node: str = "n1", training: int = 0):
    """A step of a second."""
    return Record(training, node, began, began + 1.0, position, total)


def cut(began: float, ended: float, node: str = "n1") -> Record:
    return Record(0, node, began, ended, 0, 0)


def of(records: list[Record], main: list[MainRecord] = NO_MAIN, **setting) -> Account:
    """The account of one training on two nodes, from 100 to 110."""
    values = {"begin": 100.0, "end": 110.0, "nodes": ["n1", "n2"], "trainings": 1, **setting}
    return account(records, main, **values)


def test_two_steps_on_one_of_two_idle_nodes():
    assert of([step(102, 0), step(103, 10)]) == Account(
        samples=20,
        furthest=20,
        idle_node_s=20.0,
        trained_share=0.1,
        long_idle_node_s=0.0,  # gaps of 10 s
        long_trained_share=None,
        thrown_away_samples=0,
        thrown_away_node_s=0.0,
        downtime_s=8.0,
        releases=0,  # no main job has left a node
        releases_used=0,
        first_step_median_s=None,
        first_step_p90_s=None,
        main_jobs=0,
        main_wait_mean_s=0.0,
        main_wait_max_s=0.0,
    )


def test_the_records_of_several_nodes_are_one_step():
    figures = of([step(102, 0, 20), step(102.2, 0, 20, "n2"), step(103.3, 20, 20)])
    assert (figures.samples, figures.thrown_away_samples) == (40, 0)
    assert figures.trained_share == pytest.approx(3 / 20)
    assert figures.downtime_s == pytest.approx(10 - 2.2)


def test_a_training_that_went_back_has_thrown_steps_away():
    before = [step(101, 0), step(102, 10), step(103, 20)]
    figures = of([*before, step(106, 10), step(107, 20), step(108, 30)])
    assert (figures.samples, figures.thrown_away_samples) == (40, 20)
    assert figures.thrown_away_node_s == pytest.approx(2.0)
    assert figures.trained_share == pytest.approx(4 / 20)
    assert figures.downtime_s == pytest.approx(6.0)


def test_the_same_step_once_more_is_no_other_node_of_it():
    counted, thrown_away = outcome([step(101, 0), step(101.5, 0, node="n2"), step(104, 0)])
    assert [[r.began for r in each.records] for each in counted] == [[104.0]]
    assert [[r.began for r in each.records] for each in thrown_away] == [[101.0, 101.5]]


def test_a_step_at_another_number_of_nodes_replaces_those_from_its_position():
    counted, thrown_away = outcome([step(101, 0, 20), step(102, 20, 20), step(103, 20, 10)])
    assert [each.records[0].total for each in counted] == [20, 10]
    assert [each.records[0].position for each in thrown_away] == [20]


def test_records_may_come_in_any_order():
    records = [step(103, 20), step(101, 0), step(102, 10)]
    assert of(records) == of(sorted(records, key=lambda each: each.began))


def test_a_step_that_was_cut_short_is_thrown_away():
    figures = of([step(101, 0), cut(102, 102.5), cut(103, 104, "n2")])
    assert (figures.samples, figures.thrown_away_samples) == (10, 0)
    assert figures.thrown_away_node_s == pytest.approx(1.5)


def test_what_ended_after_the_end_does_not_count():
    figures = of([step(101, 0), step(109.5, 10), cut(109, 110.5)])
    assert (figures.samples, figures.thrown_away_node_s) == (10, 0.0)


def test_trainings_are_independent():
    records = [step(101, 0), step(101, 0, node="n2", training=1), step(102, 10)]
    figures = of(records, trainings=4)
    assert (figures.samples, figures.furthest) == (30, 20)
    assert figures.downtime_s == pytest.approx((8 + 9 + 10 + 10) / 4)


def test_the_time_of_a_main_job_is_not_idle():
    main = [MainRecord(101.0, 102.0, 105.0, ("n1",))]
    figures = of([step(101, 0), step(107, 10), step(108, 20)], main)
    assert figures.idle_node_s == pytest.approx(17.0)
    assert figures.trained_share == pytest.approx(3 / 17)
    assert (figures.releases, figures.releases_used) == (1, 1)
    assert (figures.first_step_median_s, figures.first_step_p90_s) == (2.0, 2.0)
    assert (figures.main_jobs, figures.main_wait_mean_s) == (1, 1.0)


def test_a_release_that_nobody_used_before_the_next_main_job():
    main = [
        MainRecord(100.0, 100.0, 102.0, ("n1", "n2")),
        MainRecord(100.0, 103.0, 105.0, ("n1",)),
    ]
    figures = of([step(102.5, 0, node="n2"), step(106, 10)], main)
    assert (figures.releases, figures.releases_used) == (3, 2)
    assert figures.first_step_median_s == pytest.approx((0.5 + 1.0) / 2)


def test_gaps_longer_than_a_minute_are_counted_apart():
    main = [MainRecord(100.0, 150.0, 160.0, ("n1",))]
    setting = {"end": 230.0, "nodes": ["n1"]}
    figures = of([step(101, 0), step(161, 10), step(162, 20)], main, **setting)
    assert (figures.idle_node_s, figures.long_idle_node_s) == (120.0, 70.0)
    assert figures.trained_share == pytest.approx(3 / 120)
    assert figures.long_trained_share == pytest.approx(2 / 70)


def test_a_main_job_that_has_not_ended_has_its_nodes_until_the_end():
    main = [MainRecord(99.0, 108.0, None, ("n1",))]
    assert gaps_of(main, ["n1", "n2"], 100.0, 110.0) == {
        "n1": ((100.0, 108.0),),
        "n2": ((100.0, 110.0),),
    }


def test_a_main_job_that_has_not_started_has_waited_until_the_end():
    main = [MainRecord(101.0, 103.0, None, ("n2",)), MainRecord(104.0, None, None, ())]
    assert waits_of([*main, MainRecord(200.0, 201.0, None, ("n2",))], 110.0) == [2.0, 6.0]


def test_the_wait_that_a_contender_adds_is_counted_job_by_job():
    assert added_wait([3.0, 1.0, 9.0], [1.0, 1.5]) == (0.75, 2.0)
    assert added_wait([], [1.0]) == (0.0, 0.0)
    alone = {"contender": "none", "main_waits_s": [1.0, 1.0]}
    rows = [alone, {"contender": "job", "main_waits_s": [2.0, 4.0]}, {"contender": "x"}]
    added = with_added_waits(rows)
    assert [row.get("added_wait_mean_s") for row in added] == [0.0, 2.0, None]
    assert with_added_waits(rows[1:]) == rows[1:]


def test_a_process_writes_its_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("MALLETRAIN_NODE", raising=False)
    monkeypatch.setenv("SLURMD_NODENAME", "n7")
    (tmp_path / "steps").mkdir()
    log = StepLog(tmp_path, 3, 0.01)
    for position, aborted in ((0, False), (64, True)):
        log.begin(position)
        log.wait_for_accelerator()
        log.end(2, aborted=aborted)
    [path] = (tmp_path / "steps").iterdir()
    os.utime(path, (0.0, 0.0))  # no step has begun since
    first, second = records_of(tmp_path / "steps")
    assert (first.training, first.node, first.position, first.total) == (3, "n7", 0, 64)
    assert (second.position, second.total) == (64, 0)
    assert first.ended - first.began > 0.01 - 2e-4  # their records have four digits
    assert second.began >= first.ended


def test_a_step_that_was_cut_short_ended_when_its_file_was_last_changed(tmp_path: Path):
    path = tmp_path / "1-n2-17-1"
    path.write_text("1 n2 100.5\n101.0 102.0 0 32\n103.0 10")
    os.utime(path, (104.5, 104.5))
    (tmp_path / "1-n3-18-1").write_text("")  # not even ready
    assert records_of(tmp_path) == [
        Record(1, "n2", 101.0, 102.0, 0, 32),
        Record(1, "n2", 102.0, 104.5, 0, 0),
    ]


def test_ratios_are_to_the_peer_with_the_most_samples():
    def row(contender: str, samples: int, furthest: int, thrown_away_s: float) -> dict:
        figures = {"samples": samples, "furthest": furthest, "downtime_s": 5.0}
        return {"contender": contender, "thrown_away_node_s": thrown_away_s, **figures}

    job, array, live = (
        row("job", 50, 50, 2.0),
        row("array", 80, 10, 0.0),
        row("live", 100, 100, 1.0),
    )
    assert ratios([job, array, live]) == {
        "best": "array",
        "live": {"samples": 1.25, "furthest": 2.0, "downtime_s": 1.0},
    }
    assert ratios([job, live])["live"]["thrown_away_node_s"] == 0.5
    assert ratios([live]) == {}
    assert ratios([{"contender": "job", "missing": "no"}, live]) == {}


def test_an_array_has_a_training_for_each_node_if_the_others_have_one():
    assert number_of_trainings("array", 1, 16) == 16
    assert number_of_trainings("array", 10, 16) == 10
    assert number_of_trainings("live", 1, 16) == 1
