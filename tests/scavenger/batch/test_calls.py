"""Counts of the commands, signs of an overloaded controller, and the budget of requests."""

import pytest

from scavenger.batch.calls import (
    LEASES_RATE,
    CallLog,
    RequestBudget,
    command_of,
    requests_of,
    sign_in,
)
from scavenger.batch.commands import CommandError, CommandPolicy, Commands
from tests.waiting import PATIENCE_S


class Time:
    """A clock."""

    def __init__(self):
        self.now = 50.0


@pytest.mark.parametrize(
    ("argv", "command"),
    [
        (["squeue", "-h"], "squeue"),
        (["/usr/bin/sbatch", "--parsable"], "sbatch"),
        (["sudo", "-n", "-u", "ann", "--", "/opt/pbs/bin/qdel", "1.server"], "qdel"),
        (["somethingelse", "--x"], "somethingelse"),
    ],
)
def test_a_command_is_counted_by_its_name_whatever_stands_before_it(argv, command):
    assert command_of(argv) == command


@pytest.mark.parametrize(
    "line",
    [
        "sbatch: error: Slurm temporarily unable to accept job, sleeping and retrying.",
        "sbatch: error: Batch job submission failed: Requested operation is presently disabled",
        "sbatch: error: Slurm job queue full, sleeping and retrying.",
        "squeue: error: RPC rate limited 3 time(s). Sleeping for 2 seconds then trying again.",
        "sinfo: error: RPC rate limit exceeded by uid 1000 with bucket 30 refill 2",
        "sbatch: error: Batch job submission failed: Resource temporarily unavailable",
        "qsub: Server too busy",
    ],
)
def test_signs_of_overload(line):
    assert sign_in(f"something before\n{line}\n") == line


@pytest.mark.parametrize(
    "line",
    [
        "sbatch: error: QOSMaxSubmitJobPerUserLimit",
        "scancel: error: Invalid job id 7",
        "sbatch: error: Invalid account or account/partition combination specified",
        "slurm_load_jobs error: Socket timed out on send/recv operation",
        "",
    ],
)
def test_no_signs_of_overload(line):
    assert sign_in(line) == ""


class TimedCommands:
    """Commands on a clock of their own."""

    def __init__(self):
        self.now = 0.0
        self.calls = CallLog(lambda: self.now)
        self.commands = Commands(CommandPolicy(PATIENCE_S, 1, 0.0), calls=self.calls)

    def say(self, text, status=0):
        return self.commands.run(["sh", "-c", f"echo '{text}' >&2; exit {status}"])


def stopped(tmp_path, words):
    """A shell that is stopped after it has printed these words, and no earlier."""
    mark = tmp_path / "said"
    for limit_s in (0.5, 5.0, 50.0, PATIENCE_S):
        one = TimedCommands()
        script = f"echo '{words}' >&2; touch '{mark}'; sleep 600"
        with pytest.raises(CommandError) as error:
            one.commands.run(["sh", "-c", script], timeout_s=limit_s)
        if mark.exists():
            break
    return one, str(error.value)


def test_calls_are_counted_with_their_outcome(tmp_path):
    one, message = stopped(tmp_path, "words")
    assert "stopped: words" in message
    one.say("fine")
    one.say("wrong", 1)
    one.say("Slurm temporarily unable to accept job, sleeping and retrying.")
    with pytest.raises(CommandError):
        one.commands.run(["no-such-command"])
    assert one.calls.counts() == {
        ("sh", "ok"): 1,
        ("sh", "failed"): 1,
        ("sh", "busy"): 1,
        ("sh", "silent"): 1,
        ("no-such-command", "failed"): 1,
    }


def test_a_command_that_was_stopped_while_it_tried_again_says_so(tmp_path):
    words = "sbatch: error: Slurm temporarily unable to accept job, sleeping"
    one, _ = stopped(tmp_path, words)
    assert one.calls.counts() == {("sh", "busy"): 1}


def test_a_busy_controller_is_left_alone_longer_each_time_until_it_answers():
    one = TimedCommands()
    waits = []
    for _ in range(8):
        one.say("RPC rate limit", 1)
        waits.append(one.calls.backoff_s())
        one.now += waits[-1]
    assert waits == [5, 10, 20, 40, 80, 160, 300, 300]
    assert one.calls.busy == "RPC rate limit"
    one.say("fine")
    assert (one.calls.busy, one.calls.backoff_s()) == ("", 0)


def test_a_silent_controller_is_asked_more_rarely_until_any_answer():
    one = TimedCommands()
    for _ in range(3):
        one.calls.count("squeue", "silent", "squeue gave no answer")
        one.now += one.calls.backoff_s()
    one.calls.count("squeue", "silent", "squeue gave no answer")
    assert (one.calls.backoff_s(), one.calls.busy) == (40, "squeue gave no answer")
    one.calls.count("squeue", "ok")
    assert (one.calls.backoff_s(), one.calls.busy) == (0, "")


def test_requests_of_commands_as_sdiag_counts_them():
    assert requests_of(["squeue", "-h"]) == requests_of(["sinfo"]) == 2
    assert requests_of(["scontrol", "show", "reservation"]) == requests_of(["sbatch"]) == 1
    assert requests_of(["scancel", "--signal=TERM", "7", "8", "9_[1-2]"]) == 3
    assert requests_of(["sudo", "-u", "ann", "--", "/usr/bin/scancel", "7", "8"]) == 2
    assert requests_of(["qdel", "1.pbs0"]) == 1


def test_polls_and_leases_keep_to_the_budget_together():
    calls, time = CallLog(), Time()
    budget = RequestBudget(calls, 2.0, 5.0, lambda: time.now)
    assert (budget.room, budget.poll_after_s) == (25, 0)
    for _ in range(2):
        calls.count("x", "ok", requests=5)
    assert (budget.room, budget.poll_after_s) == (15, 0)
    for _ in range(3):
        calls.count("x", "ok", requests=5)
    assert (budget.room, budget.poll_after_s) == (5, 7.5)
    calls.count("sbatch", "ok", requests=0)
    assert budget.room == 4
    calls.count("x", "ok", requests=5)
    assert budget.poll_after_s == 10
    time.now += 10
    assert (budget.room, budget.poll_after_s) == (15, 0)


def test_a_site_that_polls_often_on_purpose_may():
    calls, time = CallLog(), Time()
    budget = RequestBudget(calls, 2.0, 1.0, lambda: time.now)
    for _ in range(100):
        calls.count("x", "ok", requests=5)
        time.now += 1
        assert budget.poll_after_s == 0


@pytest.mark.parametrize("requests", [5, 8, 30])
@pytest.mark.parametrize("every_s", [0.5, 2.0])
def test_polls_that_use_up_the_budget_leave_something_for_leases(every_s, requests):
    """As while leases end, and where a site names kinds of slots."""
    calls, time, leases = CallLog(), Time(), 0
    budget = RequestBudget(calls, 2.0, every_s, lambda: time.now)
    began = time.now
    while time.now - began < 1200:
        calls.count("squeue", "ok", requests=requests)
        leases += (room := budget.room)
        for _ in range(room):
            calls.count("sbatch", "ok")
        time.now += every_s
    assert leases >= 0.49 * 1200


@pytest.mark.parametrize("interval_s", [1.0, 2.5, 3.0, 5.0, 7.5, 30.0])
@pytest.mark.parametrize("event_every_s", [0.1, 1.0, 2.0, 3.0, 5.0, 1000.0])
def test_polls_that_events_ask_for_leave_something_for_leases(event_every_s, interval_s):
    """As the daemon polls: each interval, and after events as soon as the budget allows."""
    calls, time, leases = CallLog(), Time(), 0
    budget = RequestBudget(calls, 2.0, min(interval_s, 5.0), lambda: time.now)
    began, polls = time.now, 0
    while time.now - began < 1200:
        calls.count("squeue", "ok", requests=5)
        polls += 1
        room = budget.room
        for _ in range(room):
            calls.count("sbatch", "ok")
        leases += room
        pause = min(interval_s, max(min(1.0, interval_s / 5), budget.poll_after_s))
        time.now += min(interval_s, max(pause, event_every_s))
    took = time.now - began
    assert leases >= 0.49 * took
    assert polls >= 0.99 * took / interval_s, "the regular ones are made whatever happens"
    assert polls * 5 + leases <= max(2.0, 5 / interval_s + 0.5) * took + 60


def test_leases_beyond_the_reserve_are_not_charged_to_it():
    """A burst of leases while the budget was full does not delay those that are reserved."""
    calls, time = CallLog(), Time()
    budget = RequestBudget(calls, 2.0, 5.0, lambda: time.now)
    for _ in range(budget.room):
        calls.count("sbatch", "ok")
    calls.count("squeue", "ok", requests=30)
    assert budget.room == 0
    time.now += 1 / LEASES_RATE
    assert budget.room == 1


@pytest.mark.parametrize("interval_s", [0.5, 2.5, 5.0])
def test_a_burst_of_leases_is_possible_again_after_a_while_of_polls(interval_s):
    calls, time = CallLog(), Time()
    budget = RequestBudget(calls, 2.0, interval_s, lambda: time.now)
    bursts = []
    for _ in range(2):
        for _ in range(round(600 / interval_s)):
            time.now += interval_s
            calls.count("squeue", "ok", requests=5)
            room = budget.room
        bursts.append(room)
        for _ in range(40):
            calls.count("sbatch", "ok")
    assert bursts[1] == bursts[0] >= 20
