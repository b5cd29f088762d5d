"""Fetches the samples of the next batches from other nodes before the training loop needs them.
Runs in a thread of the process that reads the samples.

The thread never reads the data set, because a data set need not be thread-safe. Loader workers have
no such thread: DataLoader has each of them read whole batches ahead.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Fetch = Callable[[Sequence[int]], Mapping[int, Any]]
"""Fetches samples from other nodes: numbers → packed bytes of those that they have."""


class SamplePrefetcher:
    """The samples that are or will be fetched in advance.

    Args:
        fetch: fetches samples; called in the thread only.
    """

    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch
        self._changed = threading.Condition()
        self._plan: list[tuple[int, ...]] = []
        """Batches that are not requested yet, the next one first."""
        self._in_flight: frozenset[int] = frozenset()
        self._staged: dict[int, Any] = {}
        self._absent: set[int] = set()
        """Samples of the plan that no other node has."""
        self._closed = False
        self._thread: threading.Thread | None = None

    def plan(self, batches: Sequence[tuple[int, ...]]) -> None:
        """Fetch the samples of ``batches``, in this order. What was fetched for other batches is
        dropped.
        """
        with self._changed:
            planned = {sample for batch in batches for sample in batch}
            self._staged = {s: data for s, data in self._staged.items() if s in planned}
            self._absent &= planned
            done = self._staged.keys() | self._absent | self._in_flight
            unknown = (tuple(s for s in batch if s not in done) for batch in batches)
            self._plan = [batch for batch in unknown if batch]
            self._changed.notify_all()
            if self._thread is None and self._plan:
                self._thread = threading.Thread(
                    target=self._run, name="malletrain-prefetch", daemon=True
                )
                self._thread.start()

    def take(self, samples: Sequence[int]) -> dict[int, Any]:
        """Return the samples that are fetched, and wait for those that are being fetched. Samples
        that are only planned are left to the caller.
        """
        with self._changed:
            needed = set(samples)
            self._plan = [
                batch
                for batch in (tuple(s for s in b if s not in needed) for b in self._plan)
                if batch
            ]
            while self._in_flight & needed and not self._closed:
                self._changed.wait()
            return {s: self._staged.pop(s) for s in needed if s in self._staged}

    @property
    def idle(self) -> bool:
        """Whether all of the plan has been fetched."""
        return not self._plan and not self._in_flight

    def close(self) -> None:
        """End the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._plan and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                batch = self._plan.pop(0)
                self._in_flight = frozenset(batch)
            samples: Mapping[int, Any] = {}
            try:
                samples = self._fetch(batch)
            finally:
                with self._changed:
                    self._staged.update(samples)
                    self._absent.update(s for s in batch if s not in samples)
                    self._in_flight = frozenset()
                    self._changed.notify_all()
