"""What a process of a script of the zoo does: it records, and stops at the boundary of the
change.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

from tests import forked
from tests.zoo.trace import Trace

_PRELOADED = ("tests.zoo.scripts.parts", "tests.zoo.restart", "tests.zoo.live", "pytest")
TRACE, REACHED, GO = "trace.jsonl", "reached", "go"
SETTLED = "settled-{pid}"
"""Made by a process in live mode that has left its round and waits for the next one."""
_LOOK_S = 0.001


def preload(*more: str) -> None:
    """Have the server import these, too; call it before the first worker is started."""
    forked.preload(*_PRELOADED, *more)


def warm_up() -> None:
    """Wait until the server has imported what it is to import: that is no part of a run."""
    process = forked.CONTEXT.Process(target=int)
    process.start()
    process.join()
    process.close()


class Gate:
    """Stops this process at one of its points until the driver lets it go on.

    Args:
        folder: where the files ``reached`` and ``go`` are made.
        number: of the point; -1: none.
    """

    def __init__(self, folder: Path, number: int) -> None:
        self.folder = folder
        self.number = number

    def __call__(self, number: int) -> None:
        if number != self.number:
            return
        (self.folder / REACHED).touch()
        while not (self.folder / GO).exists():
            time.sleep(_LOOK_S)


def run_script(main: str, folder: str, save_every_s: float, number: int) -> None:
    """Run ``module:function`` in ``folder``, where its trace is; stop at the point ``number``."""
    home = Path(folder)
    os.chdir(home)
    multiprocessing.current_process().daemon = False  # a loader may have workers
    module, _, name = main.partition(":")
    script = getattr(importlib.import_module(module), name)
    trace = Trace(home / TRACE, save_every_s, Gate(home, number))
    trace.watch_updates()
    _note_settling(home)
    script(trace)


def _note_settling(home: Path) -> None:
    """Have a worker that leaves in live mode say that it has done all it does: until then its
    records are on their way.
    """
    from malletrain.elastic.link import Link

    wait_round = Link.wait_round

    def noting(link: Link, after: int) -> Any:
        if after:
            (home / SETTLED.format(pid=os.getpid())).touch()
        return wait_round(link, after)

    Link.wait_round = noting  # type: ignore[method-assign]


def files_of(folder: Path) -> dict[str, str]:
    """The text of each file of results."""
    results = folder / "results"
    return {
        str(path.relative_to(results)): path.read_text(errors="replace")
        for path in sorted(results.rglob("*"))
        if path.is_file()
    }
