"""Runs a script of the zoo as a job of a real daemon with agents.

At the boundary one process stands still. Its job is given another scale, or its node is lost. It
goes on when it has been told of the change, or when the daemon says that the change waits for it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import psutil

from malletrain.api.function_job import function_spec
from malletrain.client.operations import scale
from tests import waiting
from tests.integration.embedded import Site
from tests.zoo.cases import Script
from tests.zoo.compare import Run
from tests.zoo.rounds import MOST, Change, RunFailed, result_of
from tests.zoo.trace import STEP, read
from tests.zoo.worker import GO, REACHED, TOLD, TRACE, run_job

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys
import torch
from tests.zoo.worker import run_job
main, folder, save_every_s, point, actor = sys.argv[1:]
run_job(main, folder, float(save_every_s), int(point), int(actor))
"""
WAITS = "a rescale waits for that"
"""Part of the daemon's sentence about a job in the code after an epoch or after training."""
ENDING = "its script is about to exit"
"""Part of the second one of these."""


class JobDriver:
    """Submits scripts to the daemon of ``site``, one at a time."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self._number = 0

    def disturbed(
        self, script: Script, change: Change, point: int, as_function: bool = False
    ) -> Run:
        """A run with a change at the actor's ``point``.

        Args:
            script: of the catalogue.
            change: what is done.
            point: number of the boundary.
            as_function: submit a function that runs the script, as ``client.executor`` does.

        Raises:
            RunFailed: when the job fails.
        """
        self._number += 1
        folder = self.site.work / f"run{self._number}"
        folder.mkdir()
        save_every_s = 0.0 if change.is_loss else 3600.0
        arguments = (script.target, str(folder), save_every_s, point, change.actor)
        job = self._submit(script.mode, change, arguments, as_function)
        reached = folder / REACHED
        self.site.until(lambda: reached.exists() or self._has_ended(job), "the boundary is reached")
        if reached.exists():
            self._change(job, folder, change)
        ended = self.site.until_state(job, "completed", "failed")
        if ended.state == "failed":
            trained = any(record.kind == STEP for record in read(folder / TRACE))
            raise RunFailed(f"{ended.reason} {self.site.show(job).failure}", trained)
        return result_of(folder)

    def _submit(
        self, mode: str, change: Change, arguments: tuple[Any, ...], as_function: bool
    ) -> str:
        limits: dict[str, Any] = {
            "min_nodes": 1 if change.is_loss else change.before,
            "max_nodes": change.before,
            "mode": mode,
            "profile": False,
            "sized_for": MOST,
            "env": {"PYTHONPATH": str(ROOT)},
        }
        if not as_function:
            path = self.site.script(f"zoo{self._number}.py", SCRIPT)
            nodes = (limits.pop("min_nodes"), limits.pop("max_nodes"))
            return self.site.submit(path, *map(str, arguments), nodes=nodes, **limits)
        spec = function_spec(run_job, arguments, {}, {"workdir": str(self.site.work)})
        with self.site.client() as client:
            return client.submit(msgspec.structs.replace(spec, **limits)).id

    def _change(self, job: str, folder: Path, change: Change) -> None:
        if change.is_loss:
            node, pid = (folder / REACHED).read_text().split()
            self.site.agents()[node].kill()
            waiting.until(lambda: not psutil.pid_exists(int(pid)), "the process ends", 0.05)
            return
        with self.site.client() as client:
            client.do(scale(job, change.after, change.after))
        self.site.until(
            lambda: (
                (folder / TOLD).exists()
                or WAITS in self.site.job(job).reason
                or self._has_ended(job)
            ),
            "the process is told of the change",
        )
        (folder / GO).touch()
        self.site.until(
            lambda: (
                (folder / TOLD).exists()
                or ENDING in self.site.job(job).reason
                or self._has_ended(job)
            ),
            "the process is told of the change after all, or is done",
        )
        (folder / TOLD).touch()

    def _has_ended(self, job: str) -> bool:
        return self.site.job(job).ended is not None
