"""Continues Lightning's ``ModelCheckpoint`` over the rounds of a job: a step that is repeated after
a loss overwrites its file.

Decides which files of a run were written by lost steps. ``ModelCheckpoint`` never overwrites an
unknown file, and would save a repeated step beside the first file, as ``…-v1.ckpt``. The library
decides what is saved and removed.
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
"""Name of the file, in the folder of the run's checkpoint, with the files that ``ModelCheckpoint``
has written, and the versions of the loggers.
"""


class ModelFiles:
    """The files that the ``ModelCheckpoint`` callbacks of one run write.

    Args:
        folder: folder of the journal; all nodes must share it.
        run: the run. Outside MalleTrain no run continues automatically after a loss, and there is
            no journal.
    """

    def __init__(self, folder: str, run: Owner) -> None:
        self._path = os.path.join(folder, JOURNAL)
        self._run = run
        self._files: set[str] = set()
        """All files of the run, with those of lost steps."""
        self._lost_files: set[str] = set()
        """Files of lost steps that are not written again yet."""
        self._versions: list[int | str | None] = []

    def begin(self, trainer: Any) -> None:
        """Read the journal of the previous rounds, and let ``ModelCheckpoint`` and the loggers
        continue there. Call it on every rank, before they are set up.
        """
        journal = self._read() if self._run.job else {}
        self._files = set(journal.get("files", ()))
        self._lost_files = set(self._files)
        if journal:
            logs.go_on_in(trainer.loggers, journal["versions"], trainer.is_global_zero)
        self._versions = logs.versions(trainer.loggers)
        for callback in _checkpoint_callbacks(trainer):
            callback.file_exists = self._file_exists(callback.file_exists)

    def record(self, trainer: Any) -> None:
        """Write the journal. Called when the training starts, and before a new file is written."""
        if trainer.is_global_zero and self._run.job:
            self._write()

    def end(self, trainer: Any) -> None:
        """Restore the callbacks to their original state."""
        for callback in _checkpoint_callbacks(trainer):
            vars(callback).pop("file_exists", None)

    def resume(self, files: Iterable[str]) -> None:
        """Resume from a checkpoint with ``files``, the result of :meth:`written` when it was
        saved.
        """
        self._lost_files -= set(files)

    def written(self) -> list[str]:
        """Return the files of the steps so far, for the checkpoint that is being written."""
        return sorted(self._files - self._lost_files)

    def _file_exists(self, exists: Callable[[str, Any], bool]) -> Callable[[str, Any], bool]:
        """Return a replacement for the ``exists`` function that ``ModelCheckpoint`` calls on every
        rank before it writes a file.
        """

        def file_exists(filepath: str, trainer: Any) -> bool:
            path = os.path.abspath(filepath)
            if path not in self._lost_files and exists(filepath, trainer):
                return True
            self._lost_files.discard(path)
            if path not in self._files:
                self._files.add(path)
                self.record(trainer)
            return False

        return file_exists

    def _read(self) -> Mapping[str, Any]:
        """Return the journal of earlier rounds of this run; empty if there is none."""
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
            "owner": owner.to_record(self._run),
            "generation": report.generation(),
            "versions": self._versions,
            "files": sorted(self._files),
        }
        checkpoints.write_whole(self._path, json.dumps(journal))


def _checkpoint_callbacks(trainer: Any) -> list[Any]:
    return [
        callback for callback in trainer.checkpoint_callbacks if hasattr(callback, "file_exists")
    ]
