"""Writes the files of the embedded cluster: state, answers and history. A full disk does not stop
the cluster.
"""

from __future__ import annotations

import contextlib
import csv
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from scavenger.embedded.layout import Layout, pending_requests, write_json

ANSWER_LIFETIME_S = 60.0
HISTORY_HEADER = ("time", "node", "event", "lease", "reason")


class Record:
    """The files of one cluster. Write errors are reported on standard error, once."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._history: TextIO | None = None
        self._last_complaint = ""

    def open(self) -> None:
        """Create the history, or append to it. Raises OSError."""
        self._history = open(self.layout.history, "a", newline="")  # noqa: SIM115
        if self.layout.history.stat().st_size == 0:
            csv.writer(self._history).writerow(HISTORY_HEADER)

    def close(self) -> None:
        """Close the history."""
        if self._history is not None:
            self._history.close()

    def log(self, node: str, event: str, lease: str = "", reason: str = "") -> None:
        """Append a line to the history."""
        if self._history is None:
            return
        try:
            csv.writer(self._history).writerow((f"{time.time():.3f}", node, event, lease, reason))
            self._history.flush()
        except OSError as error:
            self._complain(f"The history could not be written: {error}.")

    def state(self, value: Mapping[str, Any]) -> bool:
        """Write cluster.json. Returns False if that failed, to be tried again in the next
        iteration.
        """
        try:
            write_json(self.layout.state, value)
            for path in pending_requests(self.layout.answers):
                with contextlib.suppress(FileNotFoundError):  # removed by the client
                    if time.time() - path.stat().st_mtime > ANSWER_LIFETIME_S:
                        path.unlink()
        except OSError as error:
            self._complain(f"The state could not be written: {error}.")
            return False
        return True

    def answer(self, request: Path, value: Mapping[str, Any]) -> None:
        """Answer a request, and delete it."""
        try:
            write_json(self.layout.answers / request.name, value)
            request.unlink()
        except OSError as error:
            self._complain(f"An answer could not be written: {error}.")

    def _complain(self, sentence: str) -> None:
        if sentence != self._last_complaint:
            self._last_complaint = sentence
            print(sentence, file=sys.stderr, flush=True)
