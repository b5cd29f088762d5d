"""A sweep from Python: starts or resumes it, and runs it until it is over."""

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
    """Run a sweep until it is over; resume it if a sweep of that name exists.

    Args:
        sweep: the sweep; it must have a name.
        state_dir: state directory of the daemon. Default: your own daemon's, else the site's.
        say: called with a line of text for each event.

    Returns:
        Its study.

    Raises:
        SweepError: the sweep cannot be run, or cannot continue; the sentence says why.
    """
    if not sweep.sweep.name:
        raise SweepError("A sweep from Python needs a name.")
    for sentence in check(sweep):
        say(sentence)
    home = state_dir or default_state_dir()
    with open_storage(storage_url(sweep.sweep.storage, home)) as storage:
        # Two that created it at once would give its jobs different keys.
        with process.alone(home, sweep.sweep.name), DaemonJobs(state_dir) as jobs:
            ledger = _create_or_resume(storage, sweep)
            process.run(ledger, jobs, say)
        return ledger.study


def _create_or_resume(storage: optuna.storages.BaseStorage, sweep: Sweep) -> Ledger:
    """Returns the sweep in the database; creates it if there is none of that name."""
    if sweep.sweep.name not in optuna.get_all_study_names(storage):
        return Ledger.create(storage, sweep)
    ledger = Ledger.open(storage, sweep.sweep.name)
    if different := _differences(ledger, sweep):
        raise SweepError(
            f"There is a sweep {ledger.name} with other values of {', '.join(different)}. Give "
            "this one another name"
            + (
                f"; for more trials of that one: malletrain sweep add-trials {ledger.name} COUNT."
                if different == ["sweep.trials"]
                else "."
            )
        )
    ledger.cancel(False)
    return ledger


def _differences(ledger: Ledger, sweep: Sweep) -> list[str]:
    """Returns the keys in which ``sweep`` differs from the stored one, except its storage."""
    there, here = (s.model_dump(mode="json") for s in (ledger.sweep, sweep))
    different = [
        f"{section}.{key}"
        for section, keys in here.items()
        for key in sorted({*keys, *there[section]})
        if keys.get(key) != there[section].get(key) and (section, key) != ("sweep", "storage")
    ]
    if sweep.sweep.trials == ledger.target_trials:
        different = [key for key in different if key != "sweep.trials"]
    return different
