"""Adds the tasks of a farm, in groups. A request whose answer is lost, or for which the daemon has
too many requests, is repeated: the daemon adds each task once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from malletrain.client import operations
from malletrain.client.errors import RETRIED, ClientError
from malletrain.client.operations import Operation

RETRY_INTERVAL_S = 2.0
"""Time between two attempts at a daemon that is gone or busy, seconds."""
PATIENCE_S = 300.0
"""Time for which a daemon that is gone or busy is waited for, seconds: half of that after which it
cancels a farm whose tasks do not come."""


def upload(
    do: Callable[[Operation[int]], int],
    job: str,
    groups: Iterable[tuple[int, Sequence[Sequence[str]]]],
    progress: Callable[[int], None],
) -> None:
    """Add all tasks to a farm.

    Args:
        do: carries out an operation. After Unreachable, its next call looks for the daemon again.
        job: id of the farm.
        groups: number of the first task, and the values of each, in order.
        progress: called with the number of tasks that have been added.

    Raises:
        ClientError: the daemon refuses, or is gone or busy for longer than PATIENCE_S.
    """
    for first, rows in groups:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                do(operations.add_tasks(job, first, rows))
                break
            except ClientError as error:
                if error.code not in RETRIED or time.monotonic() > deadline:
                    raise
                time.sleep(RETRY_INTERVAL_S)
        progress(first + len(rows))
