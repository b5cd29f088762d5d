"""``malletrain sweep``: many trials of one script, each a malleable job."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from malletrain.cli.common import (
    CommandGroup,
    Refused,
    client_of,
    json_option,
    print_json,
    print_text,
    say,
    state_dir_option,
)
from malletrain.protocol import env
from malletrain.protocol.counting import counted

if TYPE_CHECKING:
    from malletrain.sweep.ledger import Ledger, Summary

F = TypeVar("F", bound=Callable[..., Any])


@click.group(cls=CommandGroup)
def sweep() -> None:
    """Search for good parameters or architectures: many trials of one script.

    Each trial is a malleable job. A sweep is described in a file; its results are an Optuna study,
    which optuna-dashboard and Optuna's plots read. Needs Optuna (the extra "sweep").

    \b
    Examples:
      malletrain sweep run lr.toml
      malletrain sweep status
      malletrain sweep show lr --csv > lr.csv
    """


def storage_option(command: F) -> F:
    """Add ``--storage``, the database of sweeps."""
    return click.option(
        "--storage",
        metavar="URL",
        default="",
        envvar=env.SWEEPS,
        show_envvar=True,
        help="SQLAlchemy URL of the sweeps' database.  [default: sweeps.db in the state directory]",
    )(command)


detach_option = click.option(
    "--detach", is_flag=True, help="Continue in a background process, and return at once."
)


@sweep.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--name", help="Name of the sweep. Default: as in the file, else the file's name.")
@detach_option
@storage_option
@state_dir_option
def run(file: Path, name: str | None, detach: bool, storage: str, state_dir: Path | None) -> None:
    """Start the sweep that FILE describes, and run it until it is over.

    This process submits trials, prunes those without promise and weights the others. You can stop
    it at any time: its jobs continue to train, and 'malletrain sweep resume' takes over.

    \b
    Examples:
      malletrain sweep run lr.toml
      malletrain sweep run lr.toml --name second --detach
    """
    with _sentences():
        from malletrain.sweep import process
        from malletrain.sweep.ledger import open_storage, storage_url
        from malletrain.sweep.spec import load_sweep
        from malletrain.sweep.trials import check

        description = load_sweep(file, name)
        for sentence in check(description):
            click.echo(sentence, err=True)
        with client_of(state_dir) as client:
            client.status()  # report a missing daemon before anything is stored
        home = _home(state_dir)
        url = storage_url(storage or description.sweep.storage, home)
        with open_storage(url) as opened:
            # Two processes would give the sweep's jobs different keys.
            with process.alone(home, description.sweep.name):
                ledger = process.create(opened, description)
            click.echo(
                f"Sweep {ledger.name}: {_trials(ledger.target_trials)} of {description.job.script}."
            )
            _attend(ledger, state_dir, url, detach)


@sweep.command()
@click.argument("name")
@detach_option
@storage_option
@state_dir_option
def resume(name: str, detach: bool, storage: str, state_dir: Path | None) -> None:
    """Resume a sweep that no process runs, or that was cancelled.

    Trials whose jobs continued meanwhile are followed from their current state; none is restarted.
    """
    with _opened(name, storage, state_dir) as (ledger, url):
        ledger.cancel(False)
        _attend(ledger, state_dir, url, detach)


@sweep.command()
@click.argument("name", required=False)
@storage_option
@state_dir_option
@json_option
def status(name: str | None, storage: str, state_dir: Path | None, as_json: bool) -> None:
    """List sweeps, or show the state of the sweep NAME."""
    from malletrain.render import tables

    with _sentences():
        from malletrain.sweep.ledger import Ledger, open_storage, storage_url, summaries
        from malletrain.sweep.process import attended

        home = _home(state_dir)
        with open_storage(storage_url(storage, home)) as opened:
            sweeps = [Ledger.open(opened, name).summary()] if name else summaries(opened)
        rows = [
            {
                "name": each.name,
                "trials": dict(each.trials),
                "target_trials": each.target_trials,
                "best": each.best,
                "attended": attended(home, each.name, each.engine),
                "sentence": " ".join(
                    filter(
                        None, (_stands(each, attended(home, each.name, each.engine)), each.change)
                    )
                ),
            }
            for each in sweeps
        ]
    if as_json:
        print_json(rows)
    else:
        print_text(tables.sweeps(rows))


@sweep.command()
@click.argument("name")
@click.option("--csv", "as_csv", is_flag=True, help="Print comma-separated values.")
@storage_option
@state_dir_option
@json_option
def show(name: str, as_csv: bool, storage: str, state_dir: Path | None, as_json: bool) -> None:
    """List the trials of a sweep, the best first."""
    from malletrain.render import tables

    with _opened(name, storage, state_dir) as (ledger, _):
        from malletrain.sweep.ledger import results

        rows = results(ledger)
    if as_json:
        print_json(rows)
    elif as_csv:
        click.echo(tables.trials_csv(rows), nl=False)
    else:
        print_text(tables.trials(rows, ledger.sweep.sweep.metrics))


@sweep.command()
@click.argument("name")
@storage_option
@state_dir_option
@json_option
def best(name: str, storage: str, state_dir: Path | None, as_json: bool) -> None:
    """Show the best trial, its values, and the path of its snapshot."""
    with _opened(name, storage, state_dir) as (ledger, _):
        from malletrain.sweep.ledger import results
        from malletrain.sweep.trials import best_snapshot, snapshot_note

        rows = [row for row in results(ledger) if row["best"]]
        snapshot, note = best_snapshot(ledger), snapshot_note(ledger)
    if not rows:
        raise Refused(f"No trial of {name} has completed yet.")
    if as_json:
        print_json({"trials": rows, "snapshot": str(snapshot) if snapshot else None})
        return
    for row in rows:
        values = ", ".join(f"{m} {v:.6g}" for m, v in row["values"].items())
        click.echo(f"Trial {row['trial']} ({row['job']}): {values}")
        for parameter, value in row["parameters"].items():
            click.echo(f"  {parameter} = {value}")
    if snapshot is None:
        click.echo("It left no snapshot.")
        return
    whose = f" of trial {rows[0]['trial']}" if len(rows) > 1 else ""
    click.echo(f"Snapshot{whose}: {snapshot}")
    if note:
        click.echo(note)


@sweep.command()
@click.argument("name")
@storage_option
@state_dir_option
def cancel(name: str, storage: str, state_dir: Path | None) -> None:
    """End a sweep: cancel the jobs of its trials. Ended trials are kept."""
    with _opened(name, storage, state_dir) as (ledger, url):
        from malletrain.sweep.process import holds_lock

        ledger.cancel()
        if holds_lock(_home(state_dir), name):
            click.echo(f"Sweep {name} is cancelled; the process that runs it ends its jobs.")
            return
        from malletrain.sweep.process import OtherEngineError

        try:
            _attend(ledger, state_dir, url, detach=False)
        except OtherEngineError as error:
            click.echo(f"Sweep {name} is cancelled; {error.engine} ends its jobs.")


class _Trials(click.IntRange):
    """Type of the number of trials."""

    def convert(self, value: Any, *where: Any) -> int:
        try:
            return super().convert(value, *where)
        except click.BadParameter:
            self.fail(
                f"'{value}' is no number of trials. Give the number of trials to add, 1 or more: "
                "malletrain sweep add-trials NAME 10",
                *where,
            )


class _Weight(click.FloatRange):
    """Type of the weight of a sweep."""

    def convert(self, value: Any, *where: Any) -> float:
        try:
            return super().convert(value, *where)
        except click.BadParameter:
            self.fail(
                f"'{value}' is no weight. Give a number from {self.min:g} to {self.max:,.0f}. The "
                "default is 1, and with 2 a sweep counts twice as much: malletrain sweep weigh "
                "NAME 2",
                *where,
            )


@sweep.command("add-trials")
@click.argument("name")
@click.argument("count", type=_Trials(min=1))
@storage_option
@state_dir_option
def add_trials(name: str, count: int, storage: str, state_dir: Path | None) -> None:
    """Add COUNT trials to a sweep. If it is over, continue it with 'malletrain sweep resume'."""
    with _opened(name, storage, state_dir) as (ledger, _):
        from malletrain.sweep.process import attended

        ledger.want(ledger.target_trials + count)
        click.echo(f"Sweep {name} is to have {_trials(ledger.target_trials)}.")
        if not attended(_home(state_dir), name, ledger.engine):
            say(f"No process runs it. Resume it: malletrain sweep resume {name}")


@sweep.command()
@click.argument("name")
@click.argument("weight", type=_Weight(min=1e-4, max=1e6))
@storage_option
@state_dir_option
def weigh(name: str, weight: float, storage: str, state_dir: Path | None) -> None:
    """Change the weight of a sweep relative to other jobs.

    WEIGHT is the weight of its most promising trial, instead of 'weight' in [job]; its other trials
    have lower weights, depending on their progress.

    \b
    Example:
      malletrain sweep weigh lr 2
    """
    with _opened(name, storage, state_dir) as (ledger, _):
        from malletrain.sweep.process import attended

        ledger.weigh(weight)
        click.echo(f"The most promising trial of {name} counts {weight:g}.")
        if not attended(_home(state_dir), name, ledger.engine):
            say(
                "No process runs the sweep, so its jobs keep their weights until you resume it: "
                f"malletrain sweep resume {name}"
            )


# --- common parts ---


def _stands(summary: Summary, attended: bool) -> str:
    from malletrain.sweep.process import is_alive, named

    if summary.end:
        return summary.end
    if attended:
        return "A process runs it."
    resume = f"malletrain sweep resume {summary.name}"
    if summary.engine and is_alive(summary.engine) is None:
        return (
            f"{named(summary.engine).capitalize()} ran it last. If that process has ended, resume "
            f"it: {resume}"
        )
    return f"No process runs it. Resume it: {resume}"


def _trials(count: int) -> str:
    return counted(count, "trial")


@contextmanager
def _sentences() -> Iterator[None]:
    """Convert errors of a sweep, and a missing package, to a sentence and an exit code."""
    try:
        importlib.import_module("malletrain.sweep.ledger")  # Optuna
        from malletrain.sweep.spec import SweepError  # pydantic, which a daemon has too
    except ImportError as error:
        raise Refused(
            f"Sweeps need a package that is not here ({error}): "
            "pip install --find-links WHEELS 'malletrain[sweep]'"
        ) from None
    try:
        yield
    except SweepError as error:
        raise Refused(str(error)) from None


def _home(state_dir: Path | None) -> Path:
    """Return the directory of this user's sweeps."""
    from malletrain.identity.state_directory import StateDirError, default_state_dir

    try:
        return state_dir or default_state_dir()
    except StateDirError as error:
        raise Refused(str(error)) from None


@contextmanager
def _opened(name: str, storage: str, state_dir: Path | None) -> Iterator[tuple[Ledger, str]]:
    """Yield the sweep of that name and its database's URL; errors become a sentence."""
    with _sentences():
        from malletrain.sweep.ledger import Ledger, open_storage, storage_url

        url = storage_url(storage, _home(state_dir))
        with open_storage(url) as opened:
            yield Ledger.open(opened, name), url


def _attend(ledger: Ledger, state_dir: Path | None, url: str, detach: bool) -> None:
    """Run the sweep's engine, here or in a background process."""
    from malletrain.sweep import process
    from malletrain.sweep.daemon_jobs import DaemonJobs
    from malletrain.sweep.process import MAX_SILENCE_S, is_alive, named

    home = _home(state_dir)
    if detach:
        if process.holds_lock(home, ledger.name):
            raise Refused(f"A process runs the sweep {ledger.name} already.")
        options = ["--state-dir", str(state_dir)] if state_dir else []
        before = ledger.engine
        pid = process.detach(ledger.name, home, options, url)
        click.echo(f"Process {pid} runs it; its output is in {process.log_path(home, ledger.name)}")
        if before and is_alive(before) is not False:
            say(
                f"{named(before).capitalize()} ran it last. If it still runs it, process {pid} "
                f"ends within {MAX_SILENCE_S:g} s, and its output says so."
            )
        return
    with process.alone(home, ledger.name), DaemonJobs(state_dir) as jobs:
        try:
            end = process.run(ledger, jobs, process.going_on(click.echo))
        except KeyboardInterrupt:
            say(
                "The running trials continue to train. Resume the sweep: malletrain sweep resume "
                f"{ledger.name}"
            )
            raise
    click.echo(end)
    for trial in ledger.best():
        values = " ".join(f"{v:.6g}" for v in trial.values)
        click.echo(
            f"Best: trial {trial.number}, {values}. See: malletrain sweep best {ledger.name}"
        )
