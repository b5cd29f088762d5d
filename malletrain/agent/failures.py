"""What failed on this node, and why: from torchrun's log, the launcher's last words and its exit
code. Decides nothing about the job.
"""

from __future__ import annotations

import errno
import os
import re
import signal
from pathlib import Path

import msgspec

from malletrain.agent.logs import tail
from malletrain.protocol.failures import CANNOT_START, UNFIT
from malletrain.protocol.job_files import rank_log_name
from malletrain.protocol.messages import Failure

_STOCK_FAILURE = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+) \(pid: \d+\)")
"""Log line of torchrun about the first worker that failed
(torch/distributed/elastic/multiprocessing/api.py).
"""

_UNFIT_PREFIX = "malletrain: "


def stock_failures(
    launcher_log: str, group_rank: int, nproc_per_node: int, now: float
) -> tuple[Failure, ...]:
    """Return the last failure that torchrun logged. (torchrun does not report it to the rendezvous
    handler.)

    Args:
        launcher_log: end of the launcher's log.
        group_rank: rank of the node in the round.
        nproc_per_node: number of workers per node.
        now: time of the failure, seconds since the epoch.
    """
    matches = _STOCK_FAILURE.findall(launcher_log)
    return tuple(
        Failure(group_rank * nproc_per_node + int(local_rank), int(code), now)
        for code, local_rank in matches[-1:]
    )


def unfit(launcher_log: str, code: int, now: float) -> tuple[Failure, ...]:
    """Return the failure of a launcher that ended because the job's software environment is unfit,
    with the last sentence of its log as the cause; empty if it ended for another reason.

    Args:
        launcher_log: end of the launcher's log.
        code: exit code of the launcher.
        now: time of the failure, seconds since the epoch.
    """
    last = launcher_log.rstrip().rpartition("\n")[2]
    if code != UNFIT or not last.startswith(_UNFIT_PREFIX):
        return ()
    return (Failure(0, code, now, cause=last.removeprefix(_UNFIT_PREFIX)),)


def with_tails(
    failures: tuple[Failure, ...], log_dir: Path, generation: int
) -> tuple[Failure, ...]:
    """Return the failures of a round, each with the last lines of its rank's log, unless the
    launcher has reported other lines.

    Args:
        failures: the failures.
        log_dir: directory of the workers' logs.
        generation: number of the round.
    """
    return tuple(
        f
        if f.tail
        else msgspec.structs.replace(f, tail=tail(log_dir / rank_log_name(generation, f.rank)))
        for f in failures
    )


def signal_of(code: int) -> int:
    """Return the number of the signal that killed a process, from its exit code; 0 if none did.

    Args:
        code: exit code; 128 and the number, as of a shell, or the negative number.
    """
    number = -code if code < 0 else code - 128
    return number if number in signal.valid_signals() else 0


def killed(code: int, rank: int, now: float) -> tuple[Failure, ...]:
    """Return the failure of a launcher that was killed by a signal while its workers ran; empty if
    it ended by itself. The workers of other nodes fail because of it.

    Args:
        code: exit code of the launcher.
        rank: lowest rank on the node.
        now: time of the failure, seconds since the epoch.
    """
    number = signal_of(code)
    if not number:
        return ()
    advice = "; often the node ran out of memory" if number == signal.SIGKILL else ""
    return (Failure(rank, -number, now, cause=f"The launcher was killed{advice}."),)


def lacks_folder(launcher_log: str, code: int, folder: str, now: float) -> tuple[Failure, ...]:
    """Return the failure of a launcher that could not be started because the job's working
    directory is missing on the node; empty if it ended for another reason. The directory itself is
    not looked at, because its file system may hang.

    Args:
        launcher_log: end of the launcher's log.
        code: exit code of the launcher.
        folder: the job's working directory.
        now: time of the failure, seconds since the epoch.
    """
    last = launcher_log.rstrip().rpartition("\n")[2]
    missing = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), folder)
    if code != CANNOT_START or last != f"The process cannot be started: {missing}.":
        return ()
    return (Failure(0, code, now, cause=f"There is no folder {folder} on this node."),)
