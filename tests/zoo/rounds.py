"""Classes of the drivers of both modes: changes, failed runs, results."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from tests.last_words import tail
from tests.waiting import PATIENCE_S
from tests.zoo.compare import Run
from tests.zoo.quiet import QUIET
from tests.zoo.trace import read
from tests.zoo.worker import TRACE, files_of

MOST = 3
"""Ranks that a job of the zoo may have."""
HANG_S = PATIENCE_S
"""A run that has not ended after so long hangs."""
STOP_GRACE_S = 3.0
"""Time between SIGTERM and SIGKILL of a stopped process, seconds, as ``jobs.stop_grace``."""


@dataclass(frozen=True)
class Change:
    """A change at a boundary."""

    name: str
    before: int
    """Ranks of the first round."""
    after: int
    """Ranks of the second round."""
    is_loss: bool = False
    """Whether the actor is killed there without notice."""
    actor: int = 0
    """Rank whose points are the boundaries."""
    leaver: int = -1
    """Rank that leaves in live mode."""


class RunFailed(Exception):
    """A process of the script ended with an error. ``trained``: whether a step was done before."""

    def __init__(self, sentence: str, trained: bool) -> None:
        super().__init__(sentence)
        self.trained = trained


def log_ends(folder: Path, lines: int = 3) -> str:
    """The last lines of each log in ``folder``."""
    ends = (tail(path, lines).strip() for path in sorted(folder.glob("*.log")))
    return "\n".join(end for end in ends if end)


def result_of(folder: Path) -> Run:
    """Return the records of a run in ``folder``, and remove the folder."""
    watched = folder / QUIET
    quiet = json.loads(watched.read_text()) if watched.exists() else ()
    result = Run(read(folder / TRACE), files_of(folder), frozenset(quiet))
    shutil.rmtree(folder)
    return result
