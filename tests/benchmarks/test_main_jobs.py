"""Traces of main jobs before a Slurm that is a test."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import noharm, slots_slurm
from benchmarks.main_jobs import MainJob, MainRecord, Player, drawn, replay
from tests.waiting import until


class Slurm:
    """Its jobs run when they are submitted. ``begun``: what a job writes at its start."""

    def __init__(self, begun: str = "{at} n[1-2]\n", refuses: bool = False) -> None:
        self.begun, self.refuses = begun, refuses
        self.submitted: list[tuple[str, ...]] = []
        self.cancelled: tuple[str, ...] = ()

    def submit(self, command: str, *options: str) -> str:
        if self.refuses:
            raise RuntimeError("invalid partition")
        number = len(self.submitted)
        self.submitted.append(options)
        Path(command.split(">")[1].split(";")[0]).write_text(self.begun.format(at=5.0 + number))
        return str(number + 1)

    def run(self, *words: str) -> str:
        if words[0] == "scancel":
            self.cancelled = words[1:]
        return "1\n7\n"

    def until(self, condition, what):
        until(condition, what)


JOBS = [MainJob(0.0, 2, 30.0), MainJob(0.0, 1, 20.0, ("--gres=gpu:2", "--time=3"), gpus=2)]


def test_a_trace_is_played_with_the_options_of_its_jobs(tmp_path):
    slurm = Slurm()
    begin, [first, second] = replay(slurm, JOBS, tmp_path / "records", 0.0)
    assert slurm.submitted == [
        ("--job-name=main-0", "--nodes=2", "--exclusive", "--time=5"),
        ("--job-name=main-1", "--nodes=1", "--gres=gpu:2", "--time=3"),
    ]
    assert begin <= first.submitted <= second.submitted
    assert first == MainRecord(first.submitted, 5.0, None, ("n1", "n2"))
    assert second.started == 6.0
    assert slurm.cancelled == ("1",), "the one that Slurm still has"


def test_a_record_has_no_start_before_all_of_it_is_written(tmp_path):
    player = Player(Slurm("5.0\n"), JOBS[:1], tmp_path)
    player.start()
    until(lambda: player.played, "the trace is played")
    [record] = player.stop()
    assert (record.started, record.ended, record.nodes) == (None, None, ())


def test_a_refused_job_ends_the_replay_with_the_reason(tmp_path):
    with pytest.raises(RuntimeError, match="could not be submitted: invalid partition"):
        replay(Slurm(refuses=True), JOBS, tmp_path / "records", 0.0)


def test_a_player_that_was_never_started_can_be_stopped(tmp_path):
    assert Player(Slurm(), JOBS, tmp_path).stop() == []


def test_jobs_are_drawn_until_they_ask_for_enough():
    jobs = drawn(100.0, lambda rng: MainJob(rng.random(), 1, 20.0, gpus=2), seed=1)
    assert len(jobs) == 3, "40 GPU-seconds each"
    assert [job.arrival for job in jobs] == sorted(job.arrival for job in jobs)


def test_main_jobs_ask_for_what_they_use():
    job = noharm.workload(16, 2.0, 0.5, 3)[0]
    assert job.options[0] == "--exclusive"
    assert int(job.options[1].removeprefix("--time=")) * 60 >= job.seconds - 60
    job = slots_slurm.workload(2, 2.0, 0.5, 3)[0]
    assert f"--gres=gpu:{job.gpus}" in job.options
    assert job.nodes == 1
