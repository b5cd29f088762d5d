"""Continues Lightning's loggers over the rounds of a job: one version, without repeated or lost
rows.

Decides where a logger continues that would otherwise create a new version at each start, or delete
its rows. The library decides what is logged.
"""

from __future__ import annotations

import contextlib
import csv
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_ROWS_FILE = "metrics.csv"
_MAX_EMPTY_BYTES = 1000
"""Upper limit, bytes, for the size of an event file in which nothing was logged."""


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
