"""Why workers failed: which failure was the first cause, described in one sentence.

Decides which failures are consequences of others. :mod:`malletrain.rounds` decides whether a
failure is the job's fault at all: it waits for reports of lost nodes.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable

from malletrain.protocol.last_output import raised
from malletrain.protocol.messages import Assignment, Failure
from malletrain.protocol.phases import AssignmentPhase

PEER_LOST = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Timed out waiting",
    "DistBackendError",
    "DistNetworkError",
    "Connect timeout",
    "failed to connect",
    "Connection refused",
)
"""Parts of a worker's last output if it failed because a peer failed (messages of gloo, NCCL and
TCPStore).
"""
_NO_WAY = re.compile(r"(?<!\] )(?:No route to host|Network is unreachable|Host is unreachable)")
"""The same if there is no route to the peer: a node is down, or a firewall rejects packets.
Messages with an errno in front ("[Errno 101] Network is unreachable") come from Python's own
sockets, such as a download, and do not match.
"""
UNFIT = 78
"""Exit code of a launcher whose job's software environment cannot be used (EX_CONFIG of
sysexits.h); its output ends with one sentence."""
NO_PACKAGE = re.compile(r"ModuleNotFoundError: No module named '(\w+)")


def unfit(assignment: Assignment) -> bool:
    """Return whether the launcher found that the job's software is not available on the node."""
    has_started = assignment.generation > 0 or assignment.phase is not AssignmentPhase.EXITED
    return not has_started and any(f.exitcode == UNFIT and f.cause for f in assignment.failures)


def no_way(text: str) -> bool:
    """Return whether the last output of a worker says that there is no route to a peer."""
    return bool(_NO_WAY.search(text))


def peer_lost(text: str) -> bool:
    """Return whether the last output of a worker, or an error message, names a lost peer."""
    return any(words in text for words in PEER_LOST) or no_way(text)


def secondary(failure: Failure) -> bool:
    """Return whether the worker was stopped by a signal or failed because of a peer: never the
    first cause.
    """
    return failure.exitcode == -15 or peer_lost(failure.tail)


def by_cause(failures: Iterable[Failure]) -> tuple[Failure, ...]:
    """Return the failures, first causes first, then in order of time."""
    return tuple(sorted(failures, key=lambda f: (secondary(f), f.time, f.rank)))


def describe(failures: Iterable[Failure]) -> str:
    """Return one sentence on the first cause of a failure."""
    first = next(iter(failures))
    if first.exitcode == UNFIT and first.cause:
        return first.cause
    exit_text = (
        f"was killed by signal {-first.exitcode}"
        if first.exitcode < 0
        else f"exited with code {first.exitcode}"
    )
    if first.cause:
        return f"Rank {first.rank} {exit_text}: {first.cause}{_advice(first.cause)}"
    if first.exitcode > 0 and (error := raised(first.tail)):
        return f"Rank {first.rank} {exit_text}: {error}{_advice(error) or '.'}"
    if first.exitcode == -signal.SIGKILL:
        exit_text += "; often the node ran out of memory"
    last = next((line.strip() for line in reversed(first.tail.splitlines()) if line.strip()), "")
    return (
        f"Rank {first.rank} {exit_text}."
        + (f" Its last line: {last}" if last else "")
        + _advice(last)
    )


def _advice(words: str) -> str:
    """Return advice on a failure with this message, empty if there is none."""
    if NO_PACKAGE.search(words):
        return (
            ". Install it for the Python that runs the job (PYTHON -m pip install …; `malletrain "
            "show` names PYTHON), or submit from an environment that has it."
        )
    return ""
