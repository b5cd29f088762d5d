"""The requests that all ranks exchange once per step, in one small collective.

Defines the requests only. :mod:`malletrain.elastic.step` decides what follows from them.
"""

from __future__ import annotations

from typing import NamedTuple


class StepWishes(NamedTuple):
    """The requests of one rank, or those that at least one rank has made."""

    go: bool
    """Make this step the last of its group."""
    stop: bool
    """Make this step the last of the loop."""
    save: bool = False
    """Save on all ranks together."""
    hash: bool = False
    """Compute the hash of the state on all ranks together."""
    step: bool = False
    """The rank is inside a step."""
    script: bool = False
    """The rank is about to call a collective of the script, outside of a step."""
