"""Why workers failed: which failure was the first cause, told in one sentence.

Decides which failures are mere consequences. Whether a failure is the job's fault at all (a node
may have been lost) is decided by :mod:`malletrain.rounds`, which waits for the news.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable

from malletrain.protocol.last_words import raised
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
"""What a worker's last words look like when it died of another's death (gloo, NCCL and TCPStore
messages).
"""
_NO_WAY = re.compile(r"(?<!\] )(?:No route to host|Network is unreachable|Host is unreachable)")
"""The same where there is no way to the peer: a node is down, or a firewall rejects. Python's own
sockets say the error's number first ("[Errno 101] Network is unreachable"): a download, say.
"""
UNFIT = 78
"""Exit code of a launcher whose job's software environment is not fit for it (EX_CONFIG of
sysexits.h); its last words are one sentence."""
NO_PACKAGE = re.compile(r"ModuleNotFoundError: No module named '(\w+)")


def unfit(assignment: Assignment) -> bool:
    """Whether the launcher found that the job's software cannot be had on the node."""
    began = assignment.generation > 0 or assignment.phase is not AssignmentPhase.EXITED
    return not began and any(f.exitcode == UNFIT and f.cause for f in assignment.failures)


def no_way(text: str) -> bool:
    """Whether last words say that there is no way to a peer."""
    return bool(_NO_WAY.search(text))


def peer_lost(text: str) -> bool:
    """Whether last words, or an error's, speak of a lost peer."""
    return any(words in text for words in PEER_LOST) or no_way(text)


def secondary(failure: Failure) -> bool:
    """Whether the worker was stopped by somebody or died of a peer's death: never the first
    cause.
    """
    return failure.exitcode == -15 or peer_lost(failure.tail)


def by_cause(failures: Iterable[Failure]) -> tuple[Failure, ...]:
    """The failures, first causes first, then in order of time."""
    return tuple(sorted(failures, key=lambda f: (secondary(f), f.time, f.rank)))


def describe(failures: Iterable[Failure]) -> str:
    """One sentence on the first cause of a failure."""
    first = next(iter(failures))
    if first.exitcode == UNFIT and first.cause:
        return first.cause
    how = (
        f"was killed by signal {-first.exitcode}"
        if first.exitcode < 0
        else f"exited with code {first.exitcode}"
    )
    if first.cause:
        return f"Rank {first.rank} {how}: {first.cause}{_mend(first.cause)}"
    if first.exitcode > 0 and (error := raised(first.tail)):
        return f"Rank {first.rank} {how}: {error}{_mend(error) or '.'}"
    if first.exitcode == -signal.SIGKILL:
        how += "; often the node ran out of memory"
    last = next((line.strip() for line in reversed(first.tail.splitlines()) if line.strip()), "")
    return f"Rank {first.rank} {how}." + (f" Its last line: {last}" if last else "") + _mend(last)


def _mend(words: str) -> str:
    """What to do about a failure of which this is known, where that is known."""
    if NO_PACKAGE.search(words):
        return (
            ". Install it for the Python that runs the job (PYTHON -m pip install …; `malletrain "
            "show` names PYTHON), or submit from an environment that has it."
        )
    return ""
