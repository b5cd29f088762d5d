"""Snapshots written in the background: the training loop stops only for a copy to host memory.

Decides that at most one snapshot is being written at a time, so that the snapshot on disk is never
older than the interval plus the time of one write. :class:`malletrain.Snapshot` defines what a
snapshot is, and takes those that are requested before a suspension.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from malletrain.elastic.errors import ElasticError
from malletrain.training import report
from malletrain.training.snapshot import Snapshot, SnapshotError, Taken
from malletrain.training.step_times import counted_as


class BackgroundSnapshot(Snapshot):
    """A :class:`malletrain.Snapshot` that writes its periodic snapshots in a thread."""

    _caller = "elastic.Run"
    _refusal = ElasticError

    _thread: threading.Thread | None = None
    _due_now = False
    _refused: SnapshotError | None = None
    """Error of the thread that ends the run; None if there was none."""

    def round_entered(self) -> None:
        """Tell the agent, for a round without a restart, that this process saves on request. This
        comes before the first step, in which the job may already be suspended.
        """
        self._announce()

    def _close_epoch_later(self) -> None:
        """The run closes the epoch at its end, when all ranks have ended."""

    def wait(self) -> None:
        """Wait for the snapshot that is being written."""
        thread = self._thread
        if thread is not None:
            thread.join()

    def _save_periodically(self) -> None:
        if self._thread is not None and self._thread.is_alive():
            return
        self._raise_refused()
        self._due_now = True
        try:
            super()._save_periodically()
        finally:
            self._due_now = False

    @counted_as("snapshot")
    def _save(self, taken: Taken | None = None) -> str | None:
        if not self._due_now:
            self.wait()
            self._raise_refused()
            return super()._save(taken)
        self._tell_attributes()
        try:
            copied = Taken(to_host(self._payload()), report.totals())
        except Exception:  # the base class tries again and reports the error
            return super()._save()
        write = super()._save

        def write_copy() -> None:
            try:
                write(copied)
            except SnapshotError as error:
                self._refused = error

        self._thread = threading.Thread(target=write_copy, name="malletrain-snapshot", daemon=True)
        self._thread.start()
        return None

    def _raise_refused(self) -> None:
        if self._refused is not None:
            raise self._refused


def to_host(value: Any) -> Any:
    """Return ``value`` with a copy in host memory of every tensor in it."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: to_host(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return (
            type(value)(to_host(item) for item in value) if type(value) in (list, tuple) else value
        )
    return value
