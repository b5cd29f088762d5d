"""Lightning's ``ModelCheckpoint`` over the rounds of a job: a step that comes again after a loss
overwrites its file.

Decides which files of a run were written by steps that are lost. ``ModelCheckpoint`` never
overwrites a file that it does not know, and would save such a step again beside the first file, as
``…-v1.ckpt``. What is saved, and what is removed, stays the library's.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from malletrain.integrations import checkpoints, logs
from malletrain.training import owner, report
from malletrain.training.owner import Owner

JOURNAL = "malletrain.files.json"
"""In the folder of the run's checkpoint: the files that ``ModelCheckpoint`` has written, and the
versions of the loggers."""


class ModelFiles:
    """The files that the ``ModelCheckpoint`` callbacks of one run write.

    Args:
        folder: where the journal lies; all nodes must share it.
        run: whose files they are. Outside MalleTrain no run goes on after a loss by itself, and
            there is no journal.
    """

    def __init__(self, folder: str, run: Owner) -> None:
        self._path = os.path.join(folder, JOURNAL)
        self._run = run
        self._files: set[str] = set()
        """All of the run, those of lost steps too."""
        self._lost: set[str] = set()
        """Of lost steps, until they are written again."""
        self._versions: list[int | str | None] = []

    def begin(self, trainer: Any) -> None:
        """Read what the rounds before have written, and have ``ModelCheckpoint`` and the loggers go
        on there. Call it on every rank, before they are set up.
        """
        before = self._read() if self._run.job else {}
        self._files = set(before.get("files", ()))
        self._lost = set(self._files)
        if before:
            logs.go_on_in(trainer.loggers, before["versions"], trainer.is_global_zero)
        self._versions = logs.versions(trainer.loggers)
        for callback in _savers(trainer):
            callback.file_exists = self._asking(callback.file_exists)

    def record(self, trainer: Any) -> None:
        """Write the journal: when the training begins, and before a new file."""
        if trainer.is_global_zero and self._run.job:
            self._write()

    def end(self, trainer: Any) -> None:
        """The callbacks are as their owner made them."""
        for callback in _savers(trainer):
            vars(callback).pop("file_exists", None)

    def resume(self, files: Iterable[str]) -> None:
        """Go on from a checkpoint; ``files``: what :meth:`written` said when it was saved."""
        self._lost -= set(files)

    def written(self) -> list[str]:
        """The files of the steps so far, for the checkpoint that is being written."""
        return sorted(self._files - self._lost)

    def _asking(self, exists: Callable[[str, Any], bool]) -> Callable[[str, Any], bool]:
        """``ModelCheckpoint`` asks whether a file is there, on every rank, before it writes it."""

        def file_exists(filepath: str, trainer: Any) -> bool:
            path = os.path.abspath(filepath)
            if path not in self._lost and exists(filepath, trainer):
                return True
            self._lost.discard(path)
            if path not in self._files:
                self._files.add(path)
                self.record(trainer)
            return False

        return file_exists

    def _read(self) -> Mapping[str, Any]:
        """The journal of earlier rounds of this run; empty where there is none."""
        try:
            with open(self._path) as file:
                journal: dict[str, Any] = json.load(file)
        except (OSError, ValueError):
            return {}
        is_own = checkpoints.is_own(journal, self._run)
        return journal if is_own and journal["generation"] < report.generation() else {}

    def _write(self) -> None:
        os.makedirs(os.path.dirname(self._path), exist_ok=True)
        journal = {
            "owner": owner.named(self._run),
            "generation": report.generation(),
            "versions": self._versions,
            "files": sorted(self._files),
        }
        checkpoints.write_whole(self._path, json.dumps(journal))


def _savers(trainer: Any) -> list[Any]:
    return [one for one in trainer.checkpoint_callbacks if hasattr(one, "file_exists")]
