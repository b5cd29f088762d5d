"""How often a main scheduler's controller is called: counts of the calls, detection of overload,
the pauses that follow, and the budget of requests.

:class:`CallLog` counts the calls by command and outcome. It decides which messages mean overload,
and how long the controller is left alone after one. Used by :mod:`scavenger.batch.commands` for
commands, and by the bindings for their calls.

:class:`PollPause` decides the pause between two polls. A scheduler that answers slowly is polled
less often, up to the limit that the guarantees to the site set
(:attr:`~scavenger.batch.settings.BatchSettings.max_pause_s`). :class:`CallLog` handles a scheduler
that does not answer.

:class:`RequestBudget` decides how many requests may be made now. (Submissions and cancels of jobs
have a token bucket of their own in addition. A cancel takes a token for each job, because
``scancel`` sends the controller one request per job, but never waits, because another job may wait
for the node.) Nothing here waits: if there is no token, the request is not made yet.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from scavenger.backoff import Backoff, doubled_s
from scavenger.token_bucket import TokenBucket


class PollPause:
    """The pause between polls of one main scheduler.

    Args:
        longest_s: maximum pause after slow answers, seconds.
    """

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._slow = 0
        """Number of successive slow answers."""

    def after(self, took_s: float, usual_s: float, pause_ratio: float) -> float:
        """Return the seconds until the next poll.

        The first slow answer costs MIN_BACKOFF_S, each further one twice as much, because a single
        slow answer does not predict the next.

        Args:
            took_s: duration of the last poll, seconds.
            usual_s: pause after a quick answer, seconds; also the minimum.
            pause_ratio: ratio of the pause to ``took_s`` if answers stay slow.
        """
        if pause_ratio * took_s <= usual_s:
            self._slow = 0
            return usual_s
        pause_s = doubled_s(MIN_BACKOFF_S, self._slow, self._longest_s)
        self._slow += 1
        return max(usual_s, min(pause_ratio * took_s, pause_s))


OK, FAILED, BUSY, SILENT = "ok", "failed", "busy", "silent"
"""Outcomes of a call: it succeeded; it ended with an error; the controller reported that it is
overloaded; it did not answer in time.
"""
COMMANDS = frozenset(
    {
        "sacctmgr", "sbatch", "scancel", "scontrol", "sdiag", "sinfo", "squeue",
        "pbs_rstat", "pbsnodes", "qdel", "qmgr", "qrls", "qsig", "qstat", "qsub",
        "ask_pbs_ifl.py", "scavenger.slurm.ask_pyslurm",
    }
)  # fmt: skip
"""Commands that send requests to a controller. A command in front of them (sudo) does not count."""
SIGNS = re.compile(
    "|".join(
        [
            # Slurm: SlurmctldParameters=rl_enable (slurm.conf(5), from 23.02)
            r"RPC rate.?limit",
            r"communications? backoff",
            # Slurm: sbatch(1) itself retries after these, up to 15 times
            r"Slurm temporarily unable to accept job",
            r"Slurm job queue full",
            r"Job creation temporarily disabled",
            r"Requested operation is presently disabled",
            r"temporarily unable to load",
            r"Currently unable to load job state",
            # A controller, or the host of the command, is out of sockets, processes or memory
            r"Resource temporarily unavailable",
            # PBS: error codes 15007, 15033 of pbs_error.h
            r"Server too busy",
            r"too many (?:connections|requests)",
            r"Max(?:imum)? number of connections",
        ]
    ),
    re.IGNORECASE,
)
"""Messages of a controller that is overloaded or temporarily unavailable."""
REQUESTS = {"squeue": 2, "sinfo": 2, "ask_pbs_ifl.py": 2, "scavenger.slurm.ask_pyslurm": 4}
"""Number of requests (RPCs) that a command sends to its controller, if it is not one (measured with
sdiag of Slurm 22.05). scancel and qdel send one for each job.
"""
FOR_EACH_JOB = frozenset({"scancel", "qdel", "qsig"})
MIN_BACKOFF_S, MAX_BACKOFF_S = 5.0, 300.0
"""Minimum time for which the controller is left alone after such a message, and the maximum if the
caller sets none, seconds.
"""


class CallLog:
    """The calls of one process to one controller. Safe to use from several threads.

    Args:
        clock: seconds, with any origin.
        max_backoff_s: maximum time for which the controller is left alone, seconds.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, max_backoff_s: float = MAX_BACKOFF_S
    ) -> None:
        self._clock = clock
        self._max_backoff_s = max_backoff_s
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, str]] = Counter()
        self._requests = 0
        self._busy = Backoff(MIN_BACKOFF_S, max_backoff_s)
        self._silent = Backoff(MIN_BACKOFF_S, max_backoff_s)

    def count(self, command: str, outcome: str, message: str = "", requests: int = 1) -> None:
        """Count a call that has returned.

        Args:
            command: its name.
            outcome: OK, FAILED, BUSY or SILENT.
            message: the controller's message.
            requests: number of requests that it sent to the controller.
        """
        now = self._clock()
        with self._lock:
            self._counts[command, outcome] += 1
            self._requests += requests
            if outcome == SILENT:
                self._silent.refused(now, message)
                return
            self._silent = Backoff(
                MIN_BACKOFF_S, self._max_backoff_s
            )  # any answer shows that the controller is up
            if outcome == BUSY:
                self._busy.refused(now, message)
            else:
                self._busy.answered(now)

    def counts(self) -> Mapping[tuple[str, str], int]:
        """(command, outcome) → number of calls so far."""
        with self._lock:
            return dict(self._counts)

    @property
    def requests(self) -> int:
        """Number of requests that all calls have sent to the controller so far."""
        with self._lock:
            return self._requests

    def backoff_s(self) -> float:
        """Return the seconds for which the controller should still be left alone."""
        with self._lock:
            now = self._clock()
            return max(self._busy.remaining_s(now), self._silent.remaining_s(now))

    @property
    def busy(self) -> str:
        """The message that caused the present back-off, until the controller answers again; empty
        if there is none.
        """
        with self._lock:
            return self._busy.reason or self._silent.reason


def command_of(argv: Sequence[str]) -> str:
    """Return the command that asks the controller, without commands in front of it."""
    words = (os.path.basename(word) for word in argv)
    return next((word for word in words if word in COMMANDS), os.path.basename(argv[0]))


def requests_of(argv: Sequence[str]) -> int:
    """Return the number of requests that this command sends to its controller."""
    command = command_of(argv)
    if command not in FOR_EACH_JOB:
        return REQUESTS.get(command, 1)
    return max(1, sum(word[:1].isdigit() for word in argv))


def sign_in(text: str) -> str:
    """Return the line of a command's output that reports an overloaded controller; empty if there
    is none.
    """
    return next((line.strip() for line in text.splitlines() if SIGNS.search(line)), "")


POLL_REQUESTS = 5
"""Number of requests of a poll of Slurm: two each for squeue and sinfo, one for scontrol."""
BURST = 30
"""Maximum number of requests at one time: the bucket size of Slurm's rl_enable for each user by
default.
"""
EXTRA_POLL_TOKENS = 2 * POLL_REQUESTS + BURST / 3
"""Minimum number of tokens for an additional poll. Otherwise a poll for each event would leave no
tokens for leases.
"""
LEASES_RATE = 0.5
"""Requests per second that are reserved for leases, even if polls use up the budget: those every
2 s while leases end, and those of a site with kinds of slots, which are up to eight requests each.
"""
LEASES_BURST = 5
"""Maximum number of reserved requests at one time."""
SUBMISSIONS = frozenset({"sbatch", "qsub"})


class RequestBudget:
    """The budget of requests to a controller, with bursts of BURST requests. Scheduled polls are
    made even if they exceed it, and leave LEASES_RATE for leases. Safe to use from several threads.

    Args:
        calls: log of the calls, which are counted.
        rate: requests per second on average.
        poll_interval_s: interval of the polls, seconds.
        clock: returns the time, seconds.
    """

    def __init__(
        self,
        calls: CallLog,
        rate: float,
        poll_interval_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._calls = calls
        self._seen = calls.requests
        self._submitted = self._submissions()
        self._lock = threading.Lock()
        # More than the polls, so that the bucket is full again some time after a burst.
        min_rate = POLL_REQUESTS / poll_interval_s + LEASES_RATE
        self._bucket = TokenBucket(max(rate, min_rate), BURST, clock)
        # Leases that the bucket pays for cost no future ones of the reserve.
        self._reserve = TokenBucket(LEASES_RATE, LEASES_BURST, clock, max_debt=0)

    @property
    def room(self) -> int:
        """Number of leases that may be requested now in addition to a poll."""
        self._settle()
        return max(self._reserve.available, self._bucket.available - POLL_REQUESTS)

    @property
    def poll_after_s(self) -> float:
        """Seconds after which an additional poll, and leases with it, fit the budget."""
        self._settle()
        return self._bucket.missing_s(EXTRA_POLL_TOKENS)

    def _settle(self) -> None:
        with self._lock:
            spent = self._calls.requests
            self._bucket.spend(spent - self._seen)
            self._seen = spent
            submitted = self._submissions()
            self._reserve.spend(submitted - self._submitted)
            self._submitted = submitted

    def _submissions(self) -> int:
        return sum(n for (command, _), n in self._calls.counts().items() if command in SUBMISSIONS)


def too_busy(title: str, calls: CallLog) -> str:
    """Return why the scheduler must not be asked now; empty if it may be. ``title``: its name."""
    if calls.backoff_s() <= 0:
        return ""
    return f"{title} has too much to do just now: {calls.busy}"
