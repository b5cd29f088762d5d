"""A sweep from Python: begin it, or go on with it, and attend to it until it is over."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import optuna

from malletrain.identity.state_directory import default_state_dir
from malletrain.sweep import process
from malletrain.sweep.daemon_jobs import DaemonJobs
from malletrain.sweep.ledger import Ledger, open_storage, storage_url
from malletrain.sweep.spec import Sweep, SweepError
from malletrain.sweep.trials import check


def run_sweep(
    sweep: Sweep, state_dir: Path | None = None, say: Callable[[str], None] = lambda line: None
) -> optuna.Study:
    """Run a sweep until it is over; one of that name that there is already is gone on with.

    Args:
        sweep: as described; it must have a name.
        state_dir: of the daemon. Default: your own daemon's, else the site's.
        say: told a line when something happened.

    Returns:
        Its study.

    Raises:
        SweepError: it cannot be run, or cannot go on; the sentence says why.
    """
    if not sweep.sweep.name:
        raise SweepError("A sweep from Python needs a name.")
    for sentence in check(sweep):
        say(sentence)
    home = state_dir or default_state_dir()
    with open_storage(storage_url(sweep.sweep.storage, home)) as storage:
        ledger = _begun(storage, sweep)
        with process.alone(home, ledger.name), DaemonJobs(state_dir) as jobs:
            process.run(ledger, jobs, say)
        return ledger.study


def _begun(storage: optuna.storages.BaseStorage, sweep: Sweep) -> Ledger:
    """The sweep as it is in the database; a new one, where there is none of that name."""
    if sweep.sweep.name not in optuna.get_all_study_names(storage):
        return Ledger.create(storage, sweep)
    ledger = Ledger.open(storage, sweep.sweep.name)
    if ledger.sweep.space != sweep.space or ledger.sweep.sweep.metrics != sweep.sweep.metrics:
        raise SweepError(
            f"There is a sweep {ledger.name} that looks for something else. Give this one "
            "another name."
        )
    ledger.cancel(False)
    return ledger
