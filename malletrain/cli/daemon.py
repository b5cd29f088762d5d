"""A site: its processes, and what its setup needs.

``malletrain daemon`` and ``malletraind`` run the daemon, and ``malletrain agent`` an agent, in the
foreground; ``malletrain cluster`` shows and stops the embedded cluster of a configuration. Users do
not call ``agent``; the batch script of a lease does. The cluster runs with or without a daemon, so
no daemon is asked about it.

``malletrain shipped`` says where the files that come with MalleTrain are, ``malletrain key`` prints
a user's key for the list of users.
"""

from __future__ import annotations

import gc
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import click

from malletrain.cli.common import (
    CommandGroup,
    ConsoleCommand,
    Refused,
    config_option,
    json_option,
    print_json,
    say,
)

if TYPE_CHECKING:
    from scavenger.embedded.cluster_process import ClusterProcess

SLACK_S = 30.0
"""Maximum time for the cluster to end beyond its grace time, seconds."""


@click.command(cls=ConsoleCommand)
@config_option("Configuration of the site (TOML).")
def daemon(config_file: Path) -> None:
    """Run the daemon until it gets SIGTERM or SIGINT. Jobs continue without it; the next daemon of
    this state directory adopts them.

    \b
    Examples:
      malletrain check --config site.toml     check first whether it works
      malletrain daemon --config site.toml
      malletraind --config site.toml          the same, for systemd
    """
    # Imported objects stay, and garbage collection in between would take a tenth of the time.
    gc.disable()
    try:
        config = load(config_file)
        from malletrain.daemon.main import run
    except ModuleNotFoundError as error:
        raise missing(error) from None
    finally:
        gc.enable()
    code = run(config, config_file.resolve())
    if code:
        click.get_current_context().exit(code)


@click.command(
    hidden=True, add_help_option=False, context_settings={"ignore_unknown_options": True}
)
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def agent(args: tuple[str, ...]) -> int:
    """Run the agent of one leased node (the same as python -m malletrain.agent)."""
    import sys

    from malletrain.agent.__main__ import main

    sys.argv = ["malletrain agent", *args]
    return main()


def load(config_file: Path):  # type: ignore[no-untyped-def]  # Config needs the daemon's extra
    """Return the configuration in ``config_file``. Raises Refused with all its problems."""
    try:
        from malletrain.config.model import ConfigError, load_config
    except ModuleNotFoundError as error:
        raise missing(error) from None
    try:
        return load_config(config_file)
    except ConfigError as error:
        raise Refused(str(error)) from None


def missing(error: ModuleNotFoundError) -> Refused:
    """Return the error for a package of the daemon's extra that is not installed."""
    if error.name is None or error.name.split(".")[0] in (
        "malletrain",
        "scavenger",
        "allocator",
        "jpa",
    ):
        raise error
    return Refused(
        f"The daemon needs the package {error.name}, which is not installed; run: "
        "pip install --find-links WHEELS 'malletrain[daemon]'"
    )


def main() -> None:
    """Console script ``malletraind``."""
    daemon.main(prog_name="malletraind")


of_cluster = config_option("Configuration with which the daemon started the cluster (TOML).")


@click.group(cls=CommandGroup)
def cluster() -> None:
    """Show or stop the embedded cluster.

    The embedded cluster is the main scheduler of a configuration with kind = "local". It is a
    separate process and outlives the daemon, with the jobs on its nodes. A changed
    [scheduler.local] takes effect after the cluster was stopped and the daemon has started it
    again.

    \b
    Example:
      malletrain cluster stop --config local.toml
      malletrain daemon --config local.toml
    """


@cluster.command()
@of_cluster
@json_option
def status(config_file: Path, as_json: bool) -> None:
    """Show whether the embedded cluster runs, and its options.

    With --json: directory, pid, options, nodes.
    """
    running = _running(config_file)
    scavenger = running.scavenger()
    options, nodes = scavenger.options(), _states(running)
    if as_json:
        print_json(
            {
                "directory": str(running.directory),
                "pid": running.pid,
                "options": options,
                "nodes": nodes,
            }
        )
        return
    from scavenger.embedded.scavenger import describe_size

    counts = Counter(nodes.values())
    summary = ", ".join(f"{counts[state]} {state}" for state in ("leased", "idle", "busy"))
    click.echo(
        f"An embedded cluster of {describe_size(nodes)} runs in {running.directory} (process "
        f"{running.pid}): {summary}."
    )
    for name, value in options.items():
        click.echo(f"  {name} = {'not given' if value is None else value}")


@cluster.command()
@of_cluster
def stop(config_file: Path) -> None:
    """Stop the embedded cluster with all processes on its nodes.

    Jobs get the notice of a preemption and have the grace time to save; they continue when there
    are nodes again. A running daemon has no nodes from then on: restart it, too.
    """
    from scavenger.interface import SchedulerError

    running = _running(config_file)
    grace_s = float(running.scavenger().options()["grace"])
    leased = sum(state == "leased" for state in _states(running).values())
    say(
        f"Stopping the embedded cluster (process {running.pid}); {leased} leased nodes have "
        f"{grace_s:g} s to leave."
    )
    try:
        running.stop(grace_s + SLACK_S)
    except SchedulerError as error:
        raise Refused(str(error)) from None
    click.echo(f"The embedded cluster in {running.directory} has stopped.")


def _states(running: ClusterProcess) -> dict[str, str]:
    return {e.node: e.state for e in running.scavenger().poll().explanations}


def _running(config_file: Path) -> ClusterProcess:
    """Return the running cluster of the configuration. Raises Refused if there is none."""
    config = load(config_file)
    if config.scheduler.kind != "local":
        raise Refused(
            f"The main scheduler of {config_file} is {config.scheduler.kind}; only the embedded "
            'one (kind = "local") is started and stopped by MalleTrain.'
        )
    try:
        from scavenger.embedded.cluster_process import ClusterProcess
        from scavenger.interface import SchedulerError
    except ModuleNotFoundError as error:
        raise missing(error) from None
    try:
        return ClusterProcess.attach(config.cluster_dir)
    except SchedulerError as error:
        raise Refused(str(error)) from None


@click.command()
@click.argument("name", required=False)
def shipped(name: str | None) -> None:
    """Print the path of a file that comes with MalleTrain, or the names of all of them.

    These are configurations of sites, the systemd unit, batch scripts of the leases and examples.

    \b
    Examples:
      malletrain shipped
      cp "$(malletrain shipped site-configs/slurm.toml)" site.toml
    """
    from malletrain.shipped import names
    from malletrain.shipped import shipped as path_of

    if name is None:
        for file in names():
            click.echo(file)
        return
    try:
        click.echo(path_of(name))
    except FileNotFoundError as error:
        raise Refused(str(error)) from None


@click.command()
def key() -> None:
    """Print your name and public key, as a line for the list of users of a site's daemon.

    The key pair is created at the first call and stored in ~/.config/malletrain; the secret half
    never leaves it. Not needed for a daemon of your own, nor if the site's daemon accepts MUNGE.

    \b
    Example, for the operator:
      malletrain key >> /etc/malletrain/users
    """
    from malletrain.identity.keys import own_key, user_name
    from malletrain.identity.state_directory import StateDirError

    try:
        click.echo(f"{user_name()} {own_key().public}")
    except StateDirError as error:
        raise Refused(str(error)) from None
