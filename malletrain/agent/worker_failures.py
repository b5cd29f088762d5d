"""Finds which workers of a node failed, and their last output. Decides nothing about the job."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from malletrain.agent.logs import tail
from malletrain.protocol.failures import UNFIT
from malletrain.protocol.log_names import rank_log_name
from malletrain.protocol.messages import Failure

_STOCK_FAILURE = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+) \(pid: \d+\)")
"""Log line of torchrun about the first worker that failed
(torch/distributed/elastic/multiprocessing/api.py).
"""

_UNFIT_PREFIX = "malletrain: "


def stock_failures(
    launcher_log: str, group_rank: int, nproc_per_node: int, now: float
) -> tuple[Failure, ...]:
    """Returns the last failure that torchrun logged. (torchrun does not report it to the rendezvous
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
    """Returns the failure of a launcher that ended because the job's software environment is unfit,
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
    """Returns the failures of a round, each with the last lines of its rank's log, unless the
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
