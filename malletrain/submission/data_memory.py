"""``--data-memory``: the memory of each node for the job's data cache. Decides which texts mean a
size.
"""

from __future__ import annotations

from collections.abc import Mapping

from malletrain.protocol import env
from malletrain.protocol.sizes import share_or_size
from malletrain.submission.error import SpecError


def with_data_memory(variables: Mapping[str, str], memory: str | None) -> dict[str, str]:
    """Returns the environment variables of a job, with the memory for its data cache.

    Args:
        variables: its own variables.
        memory: a part of a node's memory, such as ``25%``, or a size, such as ``8G``; None for the
            script's own.

    Raises:
        SpecError: it is neither.
    """
    if memory is None:
        return dict(variables)
    try:
        share_or_size(memory, 1 << 40)
    except ValueError as error:
        raise SpecError(f"--data-memory: {error}", "data_memory") from None
    return {**variables, env.DATA_MEMORY: memory}
