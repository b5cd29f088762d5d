"""Runs cases of the zoo in several processes, each with a fork server of its own.

The changes of one script run in one process, which has its undisturbed runs. Scripts that need the
same packages have the same fork server, which imports no others: a process forks faster from a
small one.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from malletrain.launch.supervisor import die_with_parent
from tests.zoo.cases import Outcome, Zoo
from tests.zoo.catalogue import SCRIPTS
from tests.zoo.worker import preload, warm_up


@dataclass(frozen=True)
class Part:
    """The cases of one script and one change."""

    script: str
    change: str
    boundary: str
    every: int
    first: int
    each: bool = False
    """Also boundaries that are one with the boundary before."""

    @property
    def is_whole(self) -> bool:
        """Whether it is all boundaries."""
        return not self.boundary and self.every == 1


def run_parts(
    parts: list[Part], jobs: int, ended: Callable[[Part, list[Outcome]], None] | None = None
) -> Iterator[tuple[Part, list[Outcome]]]:
    """The outcomes of each part, once all parts of its script have ended.

    Args:
        parts: of the scripts that can be run here.
        jobs: processes among which they are divided. A process runs a case at a time.
        ended: called with the outcomes of a part when it ends, in one of the processes; None: no
            function is called.
    """
    by_needs: dict[str, dict[str, list[Part]]] = defaultdict(lambda: defaultdict(list))
    for part in parts:
        by_needs[SCRIPTS[part.script].needs][part.script].append(part)
    for by_script in by_needs.values():
        modules = tuple(sorted({SCRIPTS[name].module for name in by_script}))
        with tempfile.TemporaryDirectory(prefix="zoo") as root:
            pool = ProcessPoolExecutor(
                jobs,
                mp_context=multiprocessing.get_context("fork"),
                initializer=die_with_parent,
                initargs=(os.getpid(),),
            )
            with pool:
                running = [
                    pool.submit(_outcomes, own, root, modules, ended) for own in by_script.values()
                ]
                for script in as_completed(running):
                    yield from script.result()


@cache
def _zoo(root: str, modules: tuple[str, ...]) -> Zoo:
    """The zoo of this process: its fork server, and the undisturbed runs so far."""
    preload(*modules)
    warm_up()
    return Zoo(Path(tempfile.mkdtemp(dir=root)))


def _outcomes(
    parts: list[Part],
    root: str,
    modules: tuple[str, ...],
    ended: Callable[[Part, list[Outcome]], None] | None,
) -> list[tuple[Part, list[Outcome]]]:
    zoo = _zoo(root, modules)
    done = []
    for part in parts:
        script = SCRIPTS[part.script]
        cases = zoo.outcomes(script, part.change, part.boundary, part.every, part.first, part.each)
        done.append((part, list(cases)))
        if ended is not None:
            ended(*done[-1])
    return done
