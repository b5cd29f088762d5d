"""Runs cases of the zoo in several processes, each with a fork server of its own."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Iterator
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


def run_parts(parts: list[Part], jobs: int) -> Iterator[tuple[Part, list[Outcome]]]:
    """The outcomes of each part, as it ends.

    Args:
        parts: of the scripts that can be run here.
        jobs: processes among which they are divided. A process runs a case at a time.
    """
    modules = tuple(sorted({SCRIPTS[part.script].module for part in parts}))
    with tempfile.TemporaryDirectory(prefix="zoo") as root:
        pool = ProcessPoolExecutor(
            jobs,
            mp_context=multiprocessing.get_context("fork"),
            initializer=die_with_parent,
            initargs=(os.getpid(),),
        )
        with pool:
            running = {pool.submit(_outcomes, part, root, modules): part for part in parts}
            for ended in as_completed(running):
                yield running[ended], ended.result()


@cache
def _zoo(root: str, modules: tuple[str, ...]) -> Zoo:
    """The zoo of this process: its fork server, and the undisturbed runs so far."""
    preload(*modules)
    warm_up()
    return Zoo(Path(tempfile.mkdtemp(dir=root)))


def _outcomes(part: Part, root: str, modules: tuple[str, ...]) -> list[Outcome]:
    script = SCRIPTS[part.script]
    cases = _zoo(root, modules).outcomes(script, part.change, part.boundary, part.every, part.first)
    return list(cases)
