"""What the complaints of a scheduler's commands about many jobs at once mean."""

import re
import threading
from typing import NamedTuple

import pytest

from scavenger.batch.commands import CommandResult
from scavenger.batch.submission import Submitter
from scavenger.pbs.job import PBS
from scavenger.slurm.job import SLURM
from scavenger.token_bucket import TokenBucket
from tests.waiting import PATIENCE_S


class Job(NamedTuple):
    id: str
    user: str = "me"


class ComplainingCommands:
    """Commands that fail with those complaints that name none but the jobs in their arguments."""

    def __init__(self, complaints):
        self.complaints = complaints

    def run(self, argv, stdin=None, environment=None):
        other = {"5", "6"} - set(argv)
        mine = [one for one in self.complaints if other.isdisjoint(re.findall(r"\d+", one))]
        return CommandResult(tuple(argv), 1 if mine else 0, "", "\n".join(mine) + "\n", 0.0)


@pytest.mark.parametrize(
    ("dialect", "ended", "other"),
    [
        (SLURM, "scancel: error: Kill job error on job id 5: Invalid job id "
                "specified", "scancel: error: job id 6: Access denied"),
        (PBS, "qdel: Unknown Job Id 5.server", "qdel: Unauthorized Request 6.server"),
    ],
    ids=["slurm", "pbs"],
)  # fmt: skip
def test_that_one_job_has_ended_hides_no_trouble_with_another(dialect, ended, other):
    def cancel(*lines):
        return Submitter(
            dialect, (), "me", TokenBucket(1000.0, 10), ComplainingCommands(lines), {}
        ).cancel([Job("5"), Job("6")])

    assert cancel(ended) == ({"6"}, None)
    assert cancel(ended, ended) == ({"6"}, None)
    result = cancel(ended, other)
    assert other in str(result.problem)
    assert result.accepted == set(), "one has ended, the other was refused"
    assert cancel(other).accepted == {"5"}
    result = cancel("")
    assert result.problem is not None, "it failed and does not say why"
    assert result.accepted == set()
    assert cancel("connection refused").accepted == set(), "that is about all of them"


def test_jobs_that_take_a_command_each_are_cancelled_some_at_a_time():
    """PBS: each command here returns once another has begun. One at a time, none would return."""
    two = threading.Barrier(2, timeout=PATIENCE_S)

    class Meets:
        def run(self, argv, stdin=None, environment=None):
            two.wait()
            failed = argv[-1] == "3"
            return CommandResult(tuple(argv), int(failed), "", "qdel: No 3.server" * failed, 0.0)

    jobs = [Job(str(number)) for number in range(6)]
    result = Submitter(PBS, (), "me", TokenBucket(1000.0, 10), Meets(), {}).cancel(jobs)
    assert result.accepted == {"0", "1", "2", "4", "5"}
    assert "No 3.server" in str(result.problem)
