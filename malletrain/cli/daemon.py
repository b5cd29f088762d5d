"""The processes of a site, in the foreground: ``malletrain daemon`` and ``malletraind`` start the
daemon, and ``malletrain agent`` an agent. Users do not call ``agent``; the batch script of a lease
does.
"""

from __future__ import annotations

from pathlib import Path

import click

from malletrain.cli.common import ConsoleCommand, Refused, config_option


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
    config = load(config_file)
    try:
        from malletrain.daemon.main import run
    except ModuleNotFoundError as error:
        raise missing(error) from None
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
