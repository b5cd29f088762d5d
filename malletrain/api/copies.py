"""Copies the results of a job into a folder: its newest snapshot with its shards, its logs."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from malletrain.api.weights import snapshot_of
from malletrain.protocol.views import JobDetail

SHARDS = ".shards"
TRIES = 5
"""Maximum number of attempts: a running job may write its next snapshot, and remove this one,
during the copy."""


def copy_snapshot(detail: JobDetail, daemon: str, folder: Path) -> list[Path]:
    """Copy the newest snapshot of a job of ``daemon``; returns the file, and the folder of its
    shards if it has any.

    Raises:
        malletrain.training.snapshot_file.SnapshotError: there is no snapshot.
        OSError: a file cannot be read or written.
    """
    source = snapshot_of(detail, daemon)
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / os.path.basename(source)
    shards = Path(f"{target}{SHARDS}")
    for remaining in reversed(range(TRIES)):
        try:
            shutil.copy2(source, target)
            if not os.path.isdir(source + SHARDS):
                return [target]
            shutil.rmtree(shards, ignore_errors=True)
            shutil.copytree(source + SHARDS, shards)
            if os.stat(source).st_mtime_ns == os.stat(target).st_mtime_ns or not remaining:
                return [target, shards]
        except (FileNotFoundError, shutil.Error):
            if not remaining:
                raise
    return [target]


def write_log(folder: Path, stream: str, lines: list[str]) -> Path:
    """Write one log; returns its file."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{stream}.log"
    file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return file
