"""``malletrain check``: what would and would not work with a configuration, before anything is
started.

Each thing is tested as the daemon would use it, and nothing is left behind. A line per thing:
whether it works, and if not what to do.
"""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from malletrain.cli.check_users import users
from malletrain.cli.common import REFUSED, json_option, print_json, print_text
from malletrain.cli.daemon import load, missing
from malletrain.protocol import env

if TYPE_CHECKING:
    from malletrain.config.model import Config

Finding = tuple[str, bool | None, str]
"""(what was tested, whether it works or None: it works but look at it, a sentence)"""


@click.command()
@click.option(
    "--config",
    "config_file",
    required=True,
    metavar="FILE",
    type=click.Path(path_type=Path),
    envvar=env.CONFIG,
    show_envvar=True,
    help="Configuration of the site (TOML).",
)
@json_option
def check(config_file: Path, as_json: bool) -> None:
    """Say what would and would not work with a configuration, and what to do about it. Starts
    nothing.

    Tested are: the file itself (all its problems at once, with their lines), the state directory,
    whether a daemon runs there already, keys, addresses, the database, the main scheduler, and
    (where there are several) its users. Exit code 1 when something would not work.

    \b
    Example:
      malletrain check --config site.toml
    """
    config = load(config_file)
    findings: list[Finding] = [("configuration", True, f"{config_file} is valid.")]
    for name, test in TESTS:
        try:
            findings += [(name, works, sentence) for works, sentence in test(config)]
        except ModuleNotFoundError as error:
            findings.append((name, False, str(missing(error))))
        except Exception as error:  # a test must never hide the others
            findings.append(
                (name, False, f"{' '.join(str(error).split()) or type(error).__name__}")
            )
    good = all(works is not False for _, works, _ in findings)
    if as_json:
        print_json(
            {
                "ok": good,
                "findings": [
                    {"what": w, "works": ok is not False, "look": ok is None, "sentence": s}
                    for w, ok, s in findings
                ],
            }
        )
    else:
        _print(findings)
    if not good:
        click.get_current_context().exit(REFUSED)


def _print(findings: list[Finding]) -> None:
    from rich.text import Text

    from malletrain.render.tables import table

    verdicts = {
        True: Text("OK", "green"),
        None: Text("look", "bold yellow"),
        False: Text("would not work", "bold red"),
    }
    made = table("", "WHAT", "", wrap=("",))
    made.show_header = False
    for name, works, sentence in findings:
        made.add_row(verdicts[works], name, Text(sentence))
    print_text(made)


def _first_existing(path: Path) -> Path:
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def state_directory(config: Config) -> Iterator[tuple[bool, str]]:
    """The directory exists and can be written, or can be made; nobody else may read it."""
    path = config.state_dir
    if not path.exists():
        parent = _first_existing(path)
        if parent.is_dir() and os.access(parent, os.W_OK | os.X_OK):
            yield True, f"{path} will be created."
        else:
            yield (
                False,
                f"{path} does not exist and cannot be created, because {parent} is not writable "
                "by you; set another state_dir.",
            )
        return
    if not path.is_dir():
        yield False, f"{path} is not a directory; set state_dir in [daemon] to one."
        return
    try:
        with tempfile.NamedTemporaryFile(dir=path, prefix=".check-"):
            pass
    except OSError as error:
        yield (
            False,
            f"{path} cannot be written ({error.strerror}); make it yours, or set state_dir in "
            "[daemon] to another.",
        )
        return
    if path.stat().st_mode & 0o077:
        yield (
            False,
            f"Others may enter {path}, where keys and environments lie; run: chmod 700 {path}",
        )
        return
    yield True, f"{path} can be written, by you alone."


def keys(config: Config) -> Iterator[tuple[bool, str]]:
    """The keys are there and nobody else can read them, or will be made."""
    from malletrain.identity.keys import CLIENT, SERVER, read_key
    from malletrain.identity.state_directory import StateDirError

    folder = config.state_dir / "keys"
    if not folder.exists():
        yield True, f"Keys will be made in {folder}."
        return
    if folder.stat().st_mode & 0o077:
        yield (
            False,
            f"Others may enter {folder}; if nobody has read the keys run: chmod 700 {folder}, "
            "else delete them.",
        )
    for name in (SERVER, CLIENT):
        try:
            if (folder / name).exists():
                read_key(folder / name)
                yield True, f"{folder / name} can be used."
            else:
                yield True, f"{folder / name} will be made."
        except StateDirError as error:
            yield False, str(error)


def address(config: Config) -> Iterator[tuple[bool, str]]:
    """The addresses to listen on are free (a daemon that runs in this state directory may hold
    them).
    """
    from malletrain.client import ClientError

    try:
        running = _answers(config)
    except ClientError:
        running = False
    if running:
        yield (
            True,
            "A daemon runs in this state directory and answers, so its addresses are in use by "
            "itself.",
        )
        return
    for what, text in (
        ("listen", config.daemon.listen.removeprefix("tcp://")),
        ("metrics_listen", config.daemon.metrics_listen),
    ):
        if not text:
            continue
        host, _, port = text.rpartition(":")
        host = {"*": "0.0.0.0", "": "0.0.0.0"}.get(host.strip("[]"), host.strip("[]"))
        try:
            family, kind, proto, _, where = socket.getaddrinfo(
                host, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            with socket.socket(family, kind, proto) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(where)
        except OSError as error:
            yield (
                False,
                f"{what} = {text} cannot be listened on ({error.strerror or error}); set "
                "another address in [daemon].",
            )
        else:
            yield (
                True,
                f"{what}: any free port of {host} will be taken."
                if port == "0"
                else f"{what}: {text} is free.",
            )


def announced(config: Config) -> Iterator[tuple[bool, str]]:
    """What agents on the nodes are told leads to this machine."""
    from malletrain.daemon.advertise import AddressError
    from malletrain.daemon.backends import backend

    try:
        host = backend(config).host(config)
    except AddressError as error:
        yield False, str(error)
    else:
        yield True, f"Agents and clients are told to reach the daemon at {host}."


def database(config: Config) -> Iterator[tuple[bool, str]]:
    """The database can be opened, and its tables are of this version or can be brought to it.
    Nothing is created or migrated.
    """
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError, DBAPIError

    from malletrain.store.database import StoreError, open_engine, schema_version
    from malletrain.store.migrations import versions
    from malletrain.store.schema import HEAD

    try:
        url = make_url(config.database_url)
    except ArgumentError as error:
        yield False, f"The URL of the database cannot be read: {error}. Correct [daemon] database."
        return
    shown = url.render_as_string(hide_password=True)
    file = url.database if url.get_backend_name() == "sqlite" else None
    if file and not Path(file).exists():
        parent = _first_existing(Path(file).parent)
        works = os.access(parent, os.W_OK | os.X_OK)
        yield (
            works,
            f"{shown} will be created."
            if works
            else f"{shown} cannot be created, because {parent} is not writable by you.",
        )
        return
    try:
        engine = open_engine(config.database_url)
    except StoreError as error:
        yield False, str(error)
        return
    try:
        with engine.connect() as connection:
            current = schema_version(connection)
    except DBAPIError as error:
        yield (
            False,
            f"{shown} cannot be opened: {' '.join(str(error.orig).split())}. Correct [daemon] "
            "database, or make it reachable.",
        )
        return
    finally:
        engine.dispose()
    if current is None:
        yield True, f"{shown} can be opened; its tables will be created."
    elif current == HEAD:
        yield True, f"{shown} can be used."
    elif current in versions():
        yield (
            True,
            f"{shown} is of version {current} and will be migrated to {HEAD}; make a copy of it "
            "first.",
        )
    else:
        yield (
            False,
            f"{shown} was written by a later malletrain (schema {current}); run that version, "
            "or name another database.",
        )


def scheduler(config: Config) -> Iterator[tuple[bool, str]]:
    """What the backend of the main scheduler finds when it tests its commands."""
    from malletrain.daemon.backends import backend

    yield from backend(config).check(config)


def allocation(config: Config) -> Iterator[tuple[bool | None, str]]:
    """Plans can start jobs."""
    from malletrain.daemon.settings import controller_settings

    settings = controller_settings(config)
    caution = settings.planning.caution(settings.starvation_s)
    if caution is None:
        yield True, "A start pays for itself within the forward-looking time."
    else:
        yield (
            None,
            f"{caution} Those are t_fwd and start in [allocation], and starvation in [jobs].",
        )


def _answers(config: Config) -> bool:
    from malletrain.client import Client

    with Client.of(config.state_dir) as client:
        client.status()
    return True


TESTS: tuple[tuple[str, Callable[[Config], Iterator[tuple[bool | None, str]]]], ...] = (
    ("state directory", state_directory),
    ("keys", keys),
    ("address", address),
    ("announced address", announced),
    ("database", database),
    ("main scheduler", scheduler),
    ("users", users),
    ("allocation", allocation),
)
