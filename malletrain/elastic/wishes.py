"""What all ranks ask each other once a step, in one small collective.

Decides the words only. What follows from them is decided by :mod:`malletrain.elastic.step`.
"""

from __future__ import annotations

from typing import NamedTuple


class StepWishes(NamedTuple):
    """What one rank asks for, or at least one of all."""

    go: bool
    """The step is the last of its group."""
    stop: bool
    """It is the last of the loop."""
    save: bool = False
    """All ranks are to save together."""
    hash: bool = False
    """All ranks are to compute the hash of their state together."""
    step: bool = False
    """It is asked within a step."""
    script: bool = False
    """A collective of the script, outside of a step, is about to begin."""
