"""Which workers of a node failed, and their last output. Decides nothing about the job."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from malletrain.agent.logs import tail
from malletrain.protocol.failures import UNFIT
from malletrain.protocol.log_names import rank_log_name
from malletrain.protocol.messages import Failure

_STOCK_FAILURE = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+) \(pid: \d+\)")
"""What torchrun logs of the first worker that failed
(torch/distributed/elastic/multiprocessing/api.py).
"""

_UNFIT_WORDS = "malletrain: "


def stock_failures(
    launcher_log: str, group_rank: int, nproc_per_node: int, now: float
) -> tuple[Failure, ...]:
    """The last failure that torchrun logged, which tells its handler nothing of it."""
    matches = _STOCK_FAILURE.findall(launcher_log)
    return tuple(
        Failure(group_rank * nproc_per_node + int(local_rank), int(code), now)
        for code, local_rank in matches[-1:]
    )


def unfit(launcher_log: str, code: int, now: float) -> tuple[Failure, ...]:
    """That the job's software environment is not fit for it, in the sentence that its launcher's
    log ends with; nothing where it ended for another reason.
    """
    last = launcher_log.rstrip().rpartition("\n")[2]
    if code != UNFIT or not last.startswith(_UNFIT_WORDS):
        return ()
    return (Failure(0, code, now, cause=last.removeprefix(_UNFIT_WORDS)),)


def with_tails(
    failures: tuple[Failure, ...], log_dir: Path, generation: int
) -> tuple[Failure, ...]:
    """``failures`` of a round, each with the last lines of its rank's log where the launcher did
    not know another one.
    """
    return tuple(
        f
        if f.tail
        else msgspec.structs.replace(f, tail=tail(log_dir / rank_log_name(generation, f.rank)))
        for f in failures
    )
