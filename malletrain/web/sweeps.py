"""Reads the sweeps of the user as whom the page runs, from the same ledger as ``malletrain sweep``.

Decides how a sweep is shown. Without the extra ``sweep`` there are none. Runs in a thread: each
call opens the database and closes it again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from optuna.storages import BaseStorage

    from malletrain.sweep.ledger import Ledger, Summary


class SweepView(msgspec.Struct, frozen=True):
    """One line of ``malletrain sweep status``."""

    name: str
    """Name of the sweep."""
    trials: dict[str, int]
    """State → number of trials."""
    target_trials: int
    """Planned number of trials."""
    best: float | None
    """Best value, if the sweep has one objective; None if there is none."""
    attended: bool
    """Whether a process runs it."""
    sentence: str
    """How it ended, as a sentence; empty if it has not ended."""


class TrialView(msgspec.Struct, frozen=True):
    """One line of ``malletrain sweep show``."""

    trial: int
    """Number of the trial."""
    state: str
    """State of the trial."""
    job: str
    """Id of its job; empty before it has one."""
    values: dict[str, float]
    """Metric → value."""
    step: int | None
    """Last reported step; None before the first."""
    parameters: dict[str, Any]
    """Parameter → value."""
    node_hours: float
    """Charged node-hours."""
    best: bool
    """Whether it is the best trial."""
    note: str
    """Remark for users."""


class SweepUnavailableError(Exception):
    """The sweep does not exist, or the database of sweeps cannot be used; the message says so."""


def sweeps(home: Path) -> list[SweepView]:
    """Return all sweeps in the state directory ``home``. Raises SweepUnavailableError."""
    try:
        from malletrain.sweep.ledger import summaries
        from malletrain.sweep.process import attended
    except ImportError:
        return []
    from malletrain.sweep.spec import SweepError

    try:
        with _storage(home) as storage:
            if storage is None:
                return []
            return [
                _view(each, attended(home, each.name, each.engine)) for each in summaries(storage)
            ]
    except SweepError as error:
        raise SweepUnavailableError(str(error)) from None


def trials(home: Path, name: str) -> list[TrialView]:
    """Return the trials of a sweep, the best first. Raises SweepUnavailableError."""
    try:
        from malletrain.sweep.ledger import Ledger, results
        from malletrain.sweep.spec import SweepError
    except ImportError:
        raise SweepUnavailableError(
            "Sweeps need a package that is not installed: malletrain[sweep]."
        ) from None
    try:
        with _storage(home) as storage:
            if storage is None:
                raise SweepUnavailableError(f"There is no sweep '{name}'.")
            ledger: Ledger = Ledger.open(storage, name)
            return [TrialView(**row) for row in results(ledger)]
    except SweepError as error:
        raise SweepUnavailableError(str(error)) from None


def _view(summary: Summary, attended: bool) -> SweepView:
    return SweepView(
        summary.name,
        dict(summary.trials),
        summary.target_trials,
        summary.best,
        attended,
        summary.end,
    )


@contextlib.contextmanager
def _storage(home: Path) -> Iterator[BaseStorage | None]:
    """Open the database of sweeps, and close it at the end. Yields None if there is no sweep."""
    from malletrain.sweep.ledger import open_storage, storage_url

    url = storage_url("", home)
    if url.startswith("sqlite:///") and not Path(url.removeprefix("sqlite:///")).exists():
        yield None
        return
    with open_storage(url) as storage:
        yield storage
