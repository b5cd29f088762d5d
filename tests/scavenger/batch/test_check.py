"""A lease on trial: the sentence of each step, and that nothing remains."""

from dataclasses import replace

import pytest

from scavenger.batch.check import END_TIMEOUT_S, GAP_TIMEOUT_S, START_TIMEOUT_S, try_lease
from scavenger.interface import (
    Explanation,
    Gap,
    Lease,
    LeaseState,
    PollResult,
    SchedulerError,
)
from tests.scavenger.slurm import slurm_world

WHY = Explanation("n1", "idle", False, (("idle", True, "yes"), ("turn", False, "idle for 1 s")))


class Site:
    """A main scheduler on a clock of its own."""

    def __init__(self, gap_at=0.0, refused="", starts=2.0, ends=3.0, dies=False):
        self.now = 0.0
        self.gap_at, self.refused, self.starts, self.ends, self.dies = (
            gap_at, refused, starts, ends, dies,
        )  # fmt: skip
        self.taken = self.back = None

    def sleep(self, seconds):
        self.now += seconds

    def poll(self):
        gaps = (Gap("n1", 0.0),) if self.now >= self.gap_at and self.taken is None else ()
        leases = ()
        if self.taken is not None:
            running = self.now >= self.taken + self.starts
            state = LeaseState.RUNNING if running else LeaseState.PENDING
            over = self.back is not None and self.now >= self.back + self.ends
            if over or (running and self.dies):
                state = LeaseState.ENDED
            leases = (Lease("l1", "7", state, "n1", "Priority" if not running else ""),)
        return PollResult(self.now, gaps, leases, 1, 1, (WHY,))

    def take(self, requests):
        if self.refused:
            return [Lease("l1", "", LeaseState.ENDED, "n1", self.refused)]
        self.taken = self.now
        return [Lease("l1", "7", LeaseState.PENDING, "n1")]

    def give_back(self, leases):
        self.back = self.now

    def tried(self):
        return list(try_lease(self, None, lambda: self.now, self.sleep))


def test_each_step_is_told_with_its_time():
    assert Site(gap_at=5.0).tried() == [
        (True, "n1 became a gap after 5.0 s."),
        (True, "The lease on n1 was taken as job 7."),
        (True, "It started within 2.0 s."),
        (True, "It ended within 3.0 s of being given back."),
    ]


@pytest.mark.parametrize(
    ("site", "sentence", "given_back"),
    [
        (
            Site(gap_at=1e9),
            f"No node became a gap within {GAP_TIMEOUT_S:g} s, so that no lease could be tried "
            "(n1: idle for 1 s). Try again when nodes are idle.",
            False,
        ),
        (Site(refused="invalid account"), "The lease on n1 was not taken: invalid account.", False),
        (
            Site(starts=1e9),
            f"The lease on n1 did not start within {START_TIMEOUT_S:g} s: Priority.",
            True,
        ),
        (Site(dies=True), "The lease on n1 ended before it was given back: Priority.", True),
        (
            Site(ends=1e9),
            f"The lease on n1 did not end within {END_TIMEOUT_S:g} s.",
            True,
        ),
    ],
    ids=["no gap", "refused", "never starts", "dies", "never ends"],
)
def test_the_first_step_that_does_not_work_is_the_last_one_told(site, sentence, given_back):
    *before, (works, text) = site.tried()
    assert all(ok for ok, _ in before)
    assert (works, text) == (False, sentence)
    assert (site.back is not None) is given_back


@pytest.mark.parametrize(("absent_at", "works"), [((3.0,), True), ((3.0, 4.0), False)])
def test_a_lease_that_one_poll_lacks_has_not_ended(absent_at, works):
    class Truncated(Site):
        def poll(self):
            answer = super().poll()
            return replace(answer, leases=()) if self.now in absent_at else answer

    *_, (worked, sentence) = Truncated(starts=5.0).tried()
    assert worked is works
    assert works or sentence.startswith("The lease on n1 ended before it was given back")


def test_a_poll_that_fails_is_told():
    class Silent(Site):
        def poll(self):
            raise SchedulerError("squeue: error: slurm_load_jobs: Access denied")

    assert Silent().tried() == [(False, "squeue: error: slurm_load_jobs: Access denied")]


def test_a_lease_that_cannot_be_given_back_is_named():
    class Lost(Site):
        def give_back(self, leases):
            raise SchedulerError("squeue: error: Unable to contact slurm controller.")

    words = "squeue: error: Unable to contact slurm controller."
    assert Lost().tried()[3:] == [
        (False, words),
        (False, f"Job 7 of the lease on n1 may go on until its time limit: {words} Cancel it."),
    ]
    trial = try_lease(lost := Lost(), None, lambda: lost.now, lost.sleep)
    assert [next(trial)[0], next(trial)[0]] == [True, True]
    trial.close()  # as when its process is interrupted


def test_the_job_of_a_trial_is_cancelled_although_the_scheduler_lists_no_jobs(tmp_path):
    slurm = slurm_world.World(tmp_path)
    scavenger = slurm.ready()

    def sleep(seconds):
        slurm.now += 70.0
        slurm.tools.fails("squeue", "slurm_load_jobs error: Unable to contact slurm controller")

    slurm.tools.runs("sbatch", "echo 7; exit 0")
    steps = list(try_lease(scavenger, None, lambda: slurm.now, sleep))
    assert steps[-1][0] is False
    assert "Unable to contact slurm controller" in steps[-1][1]
    assert slurm.tools.calls("scancel") == ["scancel 7"]
