"""The names of the files in a job's directory on a node that other processes look for: the logs of
workers and services, and the stacks that a worker writes on a signal. Imports the standard library
only, because training scripts import it, and helper scripts that run by their path.
"""

from __future__ import annotations

import signal

STACKS_SIGNAL = signal.SIGRTMIN + 7
"""Signal at which a worker that reports writes its stacks. Scripts and schedulers do not use it.
"""
STACKS_FILE = "stacks."
"""Prefix of the file in the job's directory; the worker's process id follows."""


SERVICE_LOG = "service.log"


def rank_log_name(generation: str | int, rank: str | int) -> str:
    """File name of one worker's output.

    Args:
        generation: The round that the worker was started for.
        rank: Its global rank there.

    Returns:
        A name without a directory.
    """
    return f"g{generation}-rank{rank}.log"
