"""The names of the log files in a job's directory on a node. Imports nothing, because helper
scripts that run by their path import it too.
"""

from __future__ import annotations

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
