"""Lightning's loggers over the rounds of a job: one version, no row twice or lost.

Decides where a logger goes on that would begin a new version with each start, or delete what it has
written. What is logged is the library's.
"""

from __future__ import annotations

import contextlib
import csv
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_ROWS = "metrics.csv"
_FRESH_BYTES = 1000
"""A file of events in which nothing was logged is smaller."""


def versions(loggers: Sequence[Any]) -> list[int | str | None]:
    """The version of each logger, for :func:`go_on`; None where it has none."""
    return [logger.version if hasattr(logger, "_version") else None for logger in loggers]


def keep(loggers: Sequence[Any], path: str) -> None:
    """Keep the rows that CSV loggers have written until now beside the checkpoint ``path``; call it
    on rank 0 before the checkpoint is written.
    """
    for number, logger in enumerate(loggers):
        if type(logger).__name__ == "CSVLogger":
            logger.save()
            with contextlib.suppress(FileNotFoundError):  # there is no row yet
                shutil.copyfile(os.path.join(logger.log_dir, _ROWS), _rows_path(path, number))


def go_on_in(
    loggers: Sequence[Any], recorded: Sequence[int | str | None], writes: bool
) -> list[tuple[int, Any]]:
    """Have the loggers write on in the versions of the round before.

    Args:
        loggers: the trainer's.
        recorded: their versions, as :func:`versions` said.
        writes: whether this process is the one that logs.

    Returns:
        Those that do, each with its number.
    """
    going_on = []
    for number, (logger, version) in enumerate(zip(loggers, recorded, strict=False)):
        kind = type(logger).__name__
        if version is None or kind not in ("CSVLogger", "TensorBoardLogger"):
            continue
        if writes and logger.version != version:
            _forget(logger)
        logger._version, logger._experiment = version, None
        if kind == "TensorBoardLogger":
            logger._kwargs["purge_step"] = 0
        going_on.append((number, logger))
    return going_on


def go_on(
    loggers: Sequence[Any],
    recorded: Sequence[int | str | None],
    path: str,
    step: int,
    writes: bool,
) -> None:
    """Have the loggers write on where those of the round before did.

    Args:
        loggers: the trainer's.
        recorded: their versions, as :func:`versions` said.
        path: of the checkpoint.
        step: its global step; what was logged at it and later comes again.
        writes: whether this process is the one that logs.
    """
    for number, logger in go_on_in(loggers, recorded, writes):
        if type(logger).__name__ == "TensorBoardLogger":
            logger._kwargs["purge_step"] = step
        elif writes:
            _put_back(logger, _rows_path(path, number), step)


def _rows_path(path: str, number: int) -> str:
    return f"{path}.{number}.csv"


def _forget(logger: Any) -> None:
    """Remove the folder of the version that the logger has begun in this process."""
    folder = Path(logger.log_dir)
    writer: Any = getattr(logger, "_experiment", None)
    if hasattr(writer, "close"):
        writer.close()
    with contextlib.suppress(OSError):  # something is in it
        for file in folder.glob("events.out.tfevents.*"):
            if file.stat().st_size < _FRESH_BYTES:
                file.unlink()
        folder.rmdir()


def _put_back(logger: Any, rows_path: str, step: int) -> None:
    """Write the rows before ``step`` again; a CSV logger's writer deletes what its file had."""
    writer = logger.experiment
    if not os.path.exists(rows_path):
        return
    with open(rows_path, newline="") as file:
        reader = csv.DictReader(file)
        names = list(reader.fieldnames or ())
        rows = [row for row in reader if int(row.get("step") or 0) < step]
    writer.metrics_keys = names
    with open(os.path.join(logger.log_dir, _ROWS), "w", newline="") as file:
        written = csv.DictWriter(file, names)
        written.writeheader()
        written.writerows(rows)
