"""Continues what Lightning holds beside model and optimizer over the rounds of a job: loggers, the
files of ``ModelCheckpoint``, the results accumulated over an epoch, and the position of the loader.

:func:`keep`, :func:`go_on_in` and :func:`go_on` continue the loggers: one version, without repeated
or lost rows. They decide where a logger continues that would otherwise create a new version at each
start, or delete its rows. Lightning decides what is logged, and when.

:class:`ModelFiles` decides which files of a run were written by lost steps, so that a repeated step
overwrites its file. ``ModelCheckpoint`` never overwrites an unknown file, and would save the
repeated step beside the first file, as ``…-v1.ckpt``. Lightning decides what is saved and removed.

:class:`EpochResults` preserves means and metrics that Lightning accumulates over an epoch when the
epoch continues at another number of ranks. It decides what a checkpoint stores of the trained part
of an epoch: the sums over all ranks, with which one rank continues.

:class:`StepSchedulers` lets the ``frequency`` of a scheduler with ``interval="step"`` count steps,
as at one micro-batch a step. Lightning counts the micro-batches of a rank, whose number depends on
the number of ranks. Lightning calls the schedulers.

:class:`Loader` is what ``MalleTrainCallback.loader()`` returns for ``trainer.fit()``. It decides
when torch's generator advances: as with torch's loader alone, also where a run resumes and
Lightning makes the iterator in another place.
"""

from __future__ import annotations

import contextlib
import csv
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from malletrain.integrations import checkpoints
from malletrain.integrations.constant_batch import ConstantBatch
from malletrain.training import owner, report, rng
from malletrain.training.owner import RunIdentity

_ROWS_FILE = "metrics.csv"
_MAX_EMPTY_BYTES = 1000
"""Upper limit, bytes, for the size of an event file in which nothing was logged."""
JOURNAL = "malletrain.files.json"
"""Name of the file, in the folder of the run's checkpoint, with the files that ``ModelCheckpoint``
has written, and the versions of the loggers.
"""
NEVER = 10**12
"""Interval, micro-batches, between two validations, logs, or steps of a scheduler, if none is
due.
"""


def versions(loggers: Sequence[Any]) -> list[int | str | None]:
    """Return the version of each logger, for :func:`go_on`; None for a logger without versions."""
    return [logger.version if hasattr(logger, "_version") else None for logger in loggers]


def keep(loggers: Sequence[Any], path: str) -> None:
    """Copy the rows that CSV loggers have written so far beside the checkpoint ``path``. Call it on
    rank 0 before the checkpoint is written.
    """
    for number, logger in enumerate(loggers):
        if type(logger).__name__ == "CSVLogger":
            logger.save()
            with contextlib.suppress(FileNotFoundError):  # no row is written yet
                shutil.copyfile(os.path.join(logger.log_dir, _ROWS_FILE), _rows_path(path, number))


def go_on_in(
    loggers: Sequence[Any], recorded: Sequence[int | str | None], writes: bool
) -> list[tuple[int, Any]]:
    """Set the loggers to the versions of the previous round.

    Args:
        loggers: the trainer's loggers.
        recorded: their versions, a result of :func:`versions`.
        writes: whether this process writes the logs.

    Returns:
        (number, logger) of the loggers that continue.
    """
    continuing = []
    for number, (logger, version) in enumerate(zip(loggers, recorded, strict=False)):
        kind = type(logger).__name__
        if version is None or kind not in ("CSVLogger", "TensorBoardLogger"):
            continue
        if writes and logger.version != version:
            _remove_version(logger)
        logger._version, logger._experiment = version, None
        if kind == "TensorBoardLogger":
            logger._kwargs["purge_step"] = 0
        continuing.append((number, logger))
    return continuing


def go_on(
    loggers: Sequence[Any],
    recorded: Sequence[int | str | None],
    path: str,
    step: int,
    writes: bool,
) -> None:
    """Continue the loggers of the previous round after a checkpoint.

    Args:
        loggers: the trainer's loggers.
        recorded: their versions, a result of :func:`versions`.
        path: path of the checkpoint.
        step: its global step. Rows of this and later steps are dropped, because they are logged
            again.
        writes: whether this process writes the logs.
    """
    for number, logger in go_on_in(loggers, recorded, writes):
        if type(logger).__name__ == "TensorBoardLogger":
            logger._kwargs["purge_step"] = step
        elif writes:
            _restore_rows(logger, _rows_path(path, number), step)


def _rows_path(path: str, number: int) -> str:
    return f"{path}.{number}.csv"


def _remove_version(logger: Any) -> None:
    """Remove the folder of the version that the logger has created in this process."""
    folder = Path(logger.log_dir)
    writer: Any = getattr(logger, "_experiment", None)
    if hasattr(writer, "close"):
        writer.close()
    with contextlib.suppress(OSError):  # the folder is not empty
        for file in folder.glob("events.out.tfevents.*"):
            if file.stat().st_size < _MAX_EMPTY_BYTES:
                file.unlink()
        folder.rmdir()


def _restore_rows(logger: Any, rows_path: str, step: int) -> None:
    """Write the rows before ``step`` again, because a CSV logger's writer deletes the file's old
    content.
    """
    writer = logger.experiment
    if not os.path.exists(rows_path):
        return
    with open(rows_path, newline="") as file:
        reader = csv.DictReader(file)
        names = list(reader.fieldnames or ())
        rows = [row for row in reader if int(row.get("step") or 0) < step]
    writer.metrics_keys = names
    with open(os.path.join(logger.log_dir, _ROWS_FILE), "w", newline="") as file:
        writer_ = csv.DictWriter(file, names)
        writer_.writeheader()
        writer_.writerows(rows)


class ModelFiles:
    """The files that the ``ModelCheckpoint`` callbacks of one run write.

    Args:
        folder: folder of the journal; all nodes must share it.
        run: the run. Outside MalleTrain no run continues automatically after a loss, and there is
            no journal.
    """

    def __init__(self, folder: str, run: RunIdentity) -> None:
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
            go_on_in(trainer.loggers, journal["versions"], trainer.is_global_zero)
        self._versions = versions(trainer.loggers)
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


States = dict[str, dict[str, Any]]
"""Accumulated values over all ranks, by kind (``means``, ``metrics``) and name."""


class EpochResults:
    """The accumulated results of one trainer.

    Args:
        total: sums each number over the ranks. Collective.
    """

    def __init__(self, total: Callable[[list[float]], list[float]]) -> None:
        self._total = total
        self._restored: dict[str, Any] = {}
        """Restored means that this rank has not logged since."""

    def whole(self, trainer: Any, module: Any) -> States:
        """Return the results of this epoch so far over all ranks. Collective."""
        means: dict[str, Any] = {}
        for name, result in _means(trainer):
            size = float(result.cumulated_batch_size)
            means[name] = self._total([float(result.value), size])
        metrics = {name: _synced_state(metric) for name, metric in _metrics(module)}
        return {"means": {**self._restored, **means}, "metrics": metrics}

    def restore(self, module: Any, states: States, continues_here: bool) -> None:
        """Continue with the results of a checkpoint on one rank.

        Args:
            module: the LightningModule.
            states: result of :meth:`whole` in the checkpoint.
            continues_here: whether this rank is the one that continues with them.
        """
        if not continues_here:
            return
        self._restored = dict(states.get("means", {}))
        saved = states.get("metrics", {})
        metrics = {
            name: part for name, part in _parts(module) if name in saved and _is_metric(part)
        }
        for name, metric in metrics.items():
            for key, value in saved[name].items():
                listed = isinstance(metric._defaults[key], list) and isinstance(value, torch.Tensor)
                setattr(metric, key, [value] if listed else value)
            metric._update_count = 1

    def after_batch(self, trainer: Any) -> None:
        """Add the restored means to those that were logged in this process."""
        for name, result in _means(trainer):
            # Lightning averages this number over the ranks, and would truncate an integer.
            result.cumulated_batch_size = result.cumulated_batch_size.to(torch.float64)
            if name in self._restored:
                value, size = self._restored.pop(name)
                result.value = result.value + value
                result.cumulated_batch_size = result.cumulated_batch_size + size

    def forget(self) -> None:
        """Drop the restored results: the epoch is over."""
        self._restored = {}


class StepSchedulers:
    """The schedulers of one fit that make a step after every few steps of the training."""

    def __init__(self) -> None:
        self._frequencies: list[tuple[Any, int]] = []
        """Lightning's configuration of each scheduler, and the script's frequency."""

    def begin(self, trainer: Any) -> None:
        """Take over the frequencies of ``trainer``."""
        self._frequencies = [
            (config, config.frequency)
            for config in trainer.lr_scheduler_configs
            if config.interval == "step" and config.frequency > 1
        ]

    def before_step(self, step: int) -> None:
        """Set the frequencies so that Lightning calls the schedulers that are due at the end of
        ``step``, counted from 1 in the epoch.
        """
        for config, frequency in self._frequencies:
            config.frequency = 1 if step % frequency == 0 else NEVER

    def end(self) -> None:
        """Restore the script's frequencies."""
        for config, frequency in self._frequencies:
            config.frequency = frequency
        self._frequencies = []


def _means(trainer: Any) -> Iterator[tuple[str, Any]]:
    """Yield the means over a training epoch, with their names."""
    results: Any = trainer.fit_loop.epoch_loop._results
    for name, result in results.items():
        if result.is_tensor and result.meta.on_epoch and result.meta.is_mean_reduction:
            yield name, result


def _parts(module: Any) -> Iterator[tuple[str, Any]]:
    return iter(module.named_modules())


def _is_metric(part: Any) -> bool:
    torchmetrics = sys.modules.get("torchmetrics")
    return torchmetrics is not None and isinstance(part, torchmetrics.Metric)


def _metrics(module: Any) -> Iterator[tuple[str, Any]]:
    """Yield the torchmetrics objects that have data which the ranks can combine, with their
    names.
    """
    for name, part in _parts(module):
        if _is_metric(part) and part.update_called and part._defaults:
            lone = (isinstance(value, torch.Tensor) and part._reductions[key] is None
                    for key, value in part._defaults.items())  # fmt: skip
            if not any(lone):
                yield name, part


def _synced_state(metric: Any) -> dict[str, Any]:
    """Return the state of a metric over all ranks."""
    with metric.sync_context(should_sync=torch.distributed.is_initialized()):
        return {name: getattr(metric, name) for name in metric._defaults}


class Loader:
    """The batches for ``fit``. Not a DataLoader, because Lightning would distribute its batches
    over the ranks a second time.
    """

    def __init__(self, loader: DataLoader[Any], batches: ConstantBatch) -> None:
        self._loader = loader
        self._batches = batches
        self._draws = False
        """Whether torch's loader drew a number the last time."""
        self.is_late = False
        """Whether the generators were set after the iterator was made, to a state before that."""

    def __iter__(self) -> Iterator[Any]:
        """Start to read. The seed of the loader's workers follows from the state of torch's
        generator and from the position: where a run resumes, Lightning calls this in another place
        than in a run without changes. The generator advances as with the loader alone.
        """
        state = torch.get_rng_state()
        rng.branch(self._batches.samples_done)
        before = torch.get_rng_state()
        try:
            batches = iter(self._loader)
            draws = not torch.equal(before, torch.get_rng_state())
        finally:
            torch.set_rng_state(state)
        self._draws, self.is_late = draws, False
        self.draw()
        return batches

    def draw(self) -> None:
        """Advance torch's generator as its loader does when it draws that seed."""
        if self._draws:
            torch.empty((), dtype=torch.int64).random_()

    def __len__(self) -> int:
        return len(self._batches)

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state; Lightning calls it to see whether the loader can resume. The
        callback sets the start.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: there is no state."""
