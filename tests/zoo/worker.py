"""A process of a script of the zoo: it records points, and stops at the boundary of the change."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from malletrain.elastic.link import Link, Place
from malletrain.protocol import env
from malletrain.training import report
from tests import forked
from tests.tracked import tracked
from tests.zoo.quiet import Watch
from tests.zoo.trace import Trace

_PRELOADED = ("tests.zoo.scripts.parts", "tests.zoo.restart", "tests.zoo.live", "pytest")
TRACE, REACHED, GO, TOLD = "trace.jsonl", "reached", "go", "told"
NONE, WATCHED = -1, -2
"""Instead of the number of a point: the process does not stop; it is watched
(:mod:`tests.zoo.quiet`).
"""
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


class JobGate(Gate):
    """Stops the first round's process of rank ``actor``, and says when that process has been told
    of a change. One that was let go on in the code after an epoch stops again after it, so that the
    change that waits for that code can be made.
    """

    def __init__(self, folder: Path, number: int, actor: int) -> None:
        super().__init__(folder, number)
        self.actor = actor
        self._store: TCPStore | None = None

    def __call__(self, number: int) -> None:
        place = (int(os.environ["RANK"]), int(os.environ[env.GENERATION]))
        if place != (self.actor, 1) or not 0 <= self.number <= number:
            return
        if number == self.number:
            made = self.folder / f"{REACHED}.new"
            made.write_text(f"{os.environ[env.NODE]} {os.getpid()}")
            made.rename(self.folder / REACHED)
            self._wait_for(GO)
        elif not _between_epochs[-1] and not self._is_told():
            self._wait_for(TOLD)

    def _wait_for(self, name: str) -> None:
        while not (self.folder / name).exists():
            if self._is_told():
                (self.folder / TOLD).touch()
            time.sleep(_LOOK_S)

    def _is_told(self) -> bool:
        flags = report.open_flags()
        if flags is not None and flags.drain_request() != 0:
            return True  # in live mode: the job is suspended until its new nodes are there
        newest = _links[0].newest() if _links else None
        return newest is not None and newest.generation > 1 and self._all_checked_in(newest)

    def _all_checked_in(self, place: Place) -> bool:
        """Whether the members of the next round have found one another: before, the change waits
        for them.
        """
        if self._store is None:
            self._store = TCPStore("127.0.0.1", place.port, is_master=False, wait_for_workers=False)
        return bool(self._store.check(["all"]))


def run_script(main: str, folder: str, save_every_s: float, number: int) -> None:
    """Run ``module:function`` in ``folder``, where its trace is; stop at the point ``number``, or
    see :data:`NONE` and :data:`WATCHED`.
    """
    home = Path(folder)
    multiprocessing.current_process().daemon = False  # a loader may have workers
    _run(main, home, save_every_s, Watch(home) if number == WATCHED else Gate(home, number))


def run_job(main: str, folder: str, save_every_s: float, number: int, actor: int) -> None:
    """Run a script in a process of a job; rank ``actor`` stops."""
    home = Path(folder)
    _run(main, home, save_every_s, JobGate(home, number, actor))


def _run(main: str, home: Path, save_every_s: float, at_point: Callable[[int], None]) -> None:
    os.chdir(home)
    module, _, name = main.partition(":")
    script = getattr(importlib.import_module(module), name)
    trace = Trace(home / TRACE, save_every_s, at_point)
    trace.watch_updates()
    _note_settling(home)
    _note_epochs()
    report.mark_import()  # what "import malletrain" does, which the fork server has done before
    script(trace)


_links: list[Link] = []
"""Links of this process, in live mode; at most one."""
_between_epochs = [False]
"""Whether this process is between two epochs, as its agent was told; the newest value last."""


def _note_epochs() -> None:
    between_epochs = report.between_epochs

    def noting(between: bool) -> None:
        _between_epochs.append(between)
        between_epochs(between)

    report.between_epochs = noting


def _note_settling(home: Path) -> None:
    """Have a worker that leaves in live mode say that it has done all it does: until then its
    records are on their way.
    """
    wait_round = Link.wait_round

    def noting(link: Link, after: int) -> Any:
        _links[:] = [link]
        if after:
            (home / SETTLED.format(pid=os.getpid())).touch()
        return wait_round(link, after)

    Link.wait_round = noting  # type: ignore[method-assign]


def files_of(folder: Path) -> dict[str, str]:
    """The text of each file of results, and what tools have stored."""
    results = folder / "results"
    return tracked(folder) | {
        str(path.relative_to(results)): path.read_text(errors="replace")
        for path in sorted(results.rglob("*"))
        if path.is_file()
    }
