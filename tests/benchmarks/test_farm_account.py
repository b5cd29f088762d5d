"""Made-up records of tasks and main jobs, known accounts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import farm_task
from benchmarks.farm_account import Account, Try, account, tries_of
from benchmarks.farm_peers import lengths, ratios
from benchmarks.main_jobs import SLACK_S, MainJob, MainRecord, peak, workload

NO_MAIN: list[MainRecord] = []


def done(task: int, started: float, ended: float) -> Try:
    return Try(task, "n1", started, ended, True)


def cut(task: int, started: float, ended: float) -> Try:
    return Try(task, "n1", started, ended, False)


def of(tries: list[Try], main: list[MainRecord] = NO_MAIN, **setting: float) -> Account:
    """The account of two tasks on one node of one core, submitted at 100."""
    values = {"nodes": 1, "cores": 1, "tasks": 2, **setting}
    return account(tries, main, begin=100.0, **values)


def test_two_tasks_one_after_the_other():
    assert of([done(0, 101, 104), done(1, 105, 107)]) == Account(
        done=2,
        seconds=7.0,
        wasted_node_s=0.0,
        repeated=0,
        done_twice=0,
        idle_node_s=2.0,  # 100 to 101 and 104 to 105
        free_node_s=7.0,
        main_jobs=0,
        main_wait_mean_s=0.0,
        main_wait_median_s=0.0,
        main_wait_p99_s=0.0,
        main_wait_max_s=0.0,
    )


def test_a_task_cut_short_is_thrown_away_and_run_again():
    figures = of([cut(0, 100, 103), done(0, 103, 108), done(1, 108, 110)], cores=1)
    assert (figures.wasted_node_s, figures.repeated, figures.done_twice) == (3.0, 1, 0)
    assert (figures.done, figures.seconds) == (2, 10.0)


def test_node_seconds_are_core_seconds_by_the_cores_of_a_node():
    figures = of([cut(0, 100, 103), done(0, 103, 108), done(1, 100, 110)], cores=2)
    assert figures.wasted_node_s == 1.5


def test_work_on_a_task_that_was_done_is_thrown_away():
    figures = of([done(0, 100, 104), done(0, 101, 107), done(1, 104, 105)], nodes=2)
    assert (figures.done, figures.repeated, figures.done_twice) == (2, 1, 1)
    assert figures.wasted_node_s == 6.0
    assert figures.seconds == 5.0  # the second result of task 0 is not waited for


def test_cores_are_idle_only_while_tasks_wait():
    figures = of([done(0, 100, 110), done(1, 100, 102)], nodes=3)
    assert figures.idle_node_s == 0.0  # the third node had nothing to take


def test_a_node_of_a_main_job_is_not_idle():
    main = [MainRecord(101.0, 102.0, 105.0, ("n1",))]
    figures = of([done(0, 106, 108), done(1, 108, 109)], main)
    assert figures.idle_node_s == 3.0  # 100 to 102 and 105 to 106
    assert figures.free_node_s == 6.0
    assert (figures.main_jobs, figures.main_wait_mean_s) == (1, 1.0)


def test_a_main_job_that_has_not_started_has_waited_until_the_end():
    main = [
        MainRecord(101.0, 103.0, None, ("n2",)),
        MainRecord(104.0, None, None, ()),
        MainRecord(200.0, 201.0, None, ("n2",)),
    ]
    figures = of([done(0, 100, 110), done(1, 100, 110)], main, nodes=2)
    assert (figures.main_jobs, figures.main_wait_mean_s, figures.main_wait_max_s) == (2, 4.0, 6.0)
    assert figures.main_wait_median_s == 4.0
    assert figures.main_wait_p99_s == pytest.approx(5.96)


def test_a_farm_that_was_given_up_counts_what_is_done():
    figures = of([done(0, 101, 104), cut(1, 101, 103)], nodes=2)
    assert (figures.done, figures.seconds, figures.wasted_node_s) == (1, 4.0, 2.0)


def test_a_task_writes_its_record(tmp_path: Path):
    for folder in ("tries", "done"):
        (tmp_path / folder).mkdir()
    (tmp_path / "lengths").write_text("9.0 0.05")
    environment = {**os.environ, "SLURMD_NODENAME": "n7"}
    command = [sys.executable, "-I", "-S", str(farm_task.__file__), str(tmp_path), "1"]
    subprocess.run(command, env=environment, check=True)
    [one] = tries_of(tmp_path / "tries")
    assert (one.task, one.node, one.finished) == (1, "n7", True)
    assert one.ended - one.started >= 0.05
    assert [path.name for path in (tmp_path / "done").iterdir()] == ["1"]


def test_a_try_that_was_cut_short_ended_when_its_record_was_last_changed(tmp_path: Path):
    (tmp_path / "3-17-1").write_text("100.5 n2\n")
    (tmp_path / "4-18-1").write_text("")  # not even its start
    os.utime(tmp_path / "3-17-1", (102.0, 102.0))
    assert list(tries_of(tmp_path)) == [Try(3, "n2", 100.5, 102.0, False)]


def test_ratios_need_both_and_all_tasks():
    array = {"contender": "array", "done": 9, "seconds": 10.0, "wasted_node_s": 0.0}
    product = {"contender": "malletrain", "done": 9, "seconds": 7.0, "wasted_node_s": 2.0}
    assert ratios([array, product]) == {"seconds": 0.7}
    assert ratios([array, {**product, "done": 8}]) == {}
    assert ratios([{"contender": "array", "missing": "no"}, product]) == {}


def test_lengths_have_their_seed_and_their_bounds():
    assert lengths(100, 1.0, 7) == lengths(100, 1.0, 7) != lengths(100, 1.0, 8)
    assert 0.5 <= min(lengths(100, 1.0, 7)) < max(lengths(100, 1.0, 7)) <= 20.0
    assert lengths(1, 0.5, 7) == [0.5 * lengths(1, 1.0, 7)[0]]


def test_the_peak_counts_a_job_until_its_latest_end():
    jobs = [MainJob(0.0, 3, 10.0), MainJob(10.0 + SLACK_S - 1.0, 2, 10.0)]
    assert peak(jobs, 0.0, 100.0) == 5
    assert peak(jobs, 0.0, 20.0) == 3
    assert peak(jobs, 10.0 + SLACK_S, 100.0) == 2


@pytest.mark.parametrize("seed", range(5))
def test_main_jobs_never_wait_for_each_other(seed: int):
    jobs = workload(16, 900.0, 0.5, seed)
    assert peak(jobs, 0.0, 1000.0) <= 14
    requested_s = sum(job.nodes * job.seconds for job in jobs)
    assert 0.35 <= requested_s / (16 * 900) <= 0.55
    assert jobs == workload(16, 900.0, 0.5, seed)
