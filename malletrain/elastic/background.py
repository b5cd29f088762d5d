"""Snapshots written in the background: the training loop stops for a copy to host memory and no
longer.

Decides that at most one snapshot is being written at a time, so that what is on disk is never older
than the interval plus the time of one write. What a snapshot is, and the one taken on demand before
a suspension, are :class:`malletrain.Snapshot`'s.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from malletrain.elastic.errors import ElasticError
from malletrain.training import report
from malletrain.training.snapshot import Snapshot, SnapshotError, Taken


class BackgroundSnapshot(Snapshot):
    """The same as :class:`malletrain.Snapshot`; only those taken because their time has come are
    written by a thread.
    """

    _caller = "elastic.Run"
    _refusal = ElasticError

    _thread: threading.Thread | None = None
    _due_now = False
    _refused: SnapshotError | None = None
    """What the thread met that ends the run."""

    def round_entered(self) -> None:
        """Another round, without a restart: the agent is to know anew that it saves on request,
        and before the first step: the job may be suspended in it.
        """
        self._announce()

    def wait(self) -> None:
        """Wait for the one being written."""
        thread = self._thread
        if thread is not None:
            thread.join()

    def _announce_or_save(self) -> None:
        if self._thread is not None and self._thread.is_alive():
            return
        self._raise_refused()
        self._due_now = True
        try:
            super()._announce_or_save()
        finally:
            self._due_now = False

    def _save(self, taken: Taken | None = None) -> str | None:
        if not self._due_now:
            self.wait()
            self._raise_refused()
            return super()._save(taken)
        try:
            copied = Taken(to_host(self._payload()), report.totals())
        except Exception:  # said in a sentence, and tried again, by the one place that does
            return super()._save()
        write = super()._save

        def written() -> None:
            try:
                write(copied)
            except SnapshotError as error:
                self._refused = error

        self._thread = threading.Thread(target=written, name="malletrain-snapshot", daemon=True)
        self._thread.start()
        return None

    def _raise_refused(self) -> None:
        if self._refused is not None:
            raise self._refused


def to_host(value: Any) -> Any:
    """``value`` with every tensor in it copied to host memory."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: to_host(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return (
            type(value)(to_host(item) for item in value) if type(value) in (list, tuple) else value
        )
    return value
