"""The sweeps of the user as whom the page runs, from the same ledger as ``malletrain sweep``.

Decides how a sweep is shown. Where the extra ``sweep`` is not installed there are none. Runs in a
thread: each call opens the database and closes it again.
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
    trials: dict[str, int]
    """State → trials."""
    target_trials: int
    """How many there are to be."""
    best: float | None
    attended: bool
    """Whether a process runs it."""
    sentence: str
    """How it ended; empty while it has not."""


class TrialView(msgspec.Struct, frozen=True):
    """One line of ``malletrain sweep show``."""

    trial: int
    state: str
    job: str
    """Empty before it has one."""
    values: dict[str, float]
    step: int | None
    parameters: dict[str, Any]
    node_hours: float
    best: bool
    note: str


class SweepAway(Exception):
    """There is no such sweep, or no database of sweeps; the text says so."""


def sweeps(home: Path) -> list[SweepView]:
    """All sweeps kept in the state directory ``home``. Raises SweepAway."""
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
            return [_view(each, attended(home, each.name)) for each in summaries(storage)]
    except SweepError as error:
        raise SweepAway(str(error)) from None


def trials(home: Path, name: str) -> list[TrialView]:
    """The trials of a sweep, the best first. Raises SweepAway."""
    try:
        from malletrain.sweep.ledger import Ledger
        from malletrain.sweep.results import results
        from malletrain.sweep.spec import SweepError
    except ImportError:
        raise SweepAway("Sweeps need a package that is not here: malletrain[sweep].") from None
    try:
        with _storage(home) as storage:
            if storage is None:
                raise SweepAway(f"There is no sweep '{name}'.")
            ledger: Ledger = Ledger.open(storage, name)
            return [TrialView(**row) for row in results(ledger)]
    except SweepError as error:
        raise SweepAway(str(error)) from None


def _view(each: Summary, attended: bool) -> SweepView:
    return SweepView(
        each.name, dict(each.trials), each.target_trials, each.best, attended, each.end
    )


@contextlib.contextmanager
def _storage(home: Path) -> Iterator[BaseStorage | None]:
    """The database of sweeps, closed at the end; None: nobody has begun a sweep here."""
    from malletrain.sweep.ledger import open_storage, storage_url

    url = storage_url("", home)
    if url.startswith("sqlite:///") and not Path(url.removeprefix("sqlite:///")).exists():
        yield None
        return
    with open_storage(url) as storage:
        yield storage
