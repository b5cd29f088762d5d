"""Daemons of tests, as forks of a process that has imported all that a daemon imports.

Those imports are most of what a daemon costs in a test. A fork runs what ``python -m malletrain
daemon`` runs. Tests about the start itself, and about a daemon's memory, start a new interpreter
instead.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping

from malletrain.protocol import env
from tests.forks import Forked, Server, serve

_PRELOADED = (
    *("malletrain.cli", "malletrain.daemon.main", "malletrain.cli.daemon"),
    *("alembic.command", "alembic.config", "sqlalchemy.dialects.sqlite"),
)
_READ_AT_IMPORT = (env.FAULTS, env.TIMEOUT)
"""Variables that modules of a daemon read when they are imported: the server's are those of all
forks.
"""
_servers: dict[tuple[str | None, ...], Server] = {}
"""That of this process, once a daemon was started, by the values of these variables."""


def _read_at_import(environment: Mapping[str, str]) -> tuple[str | None, ...]:
    return tuple(environment.get(name) for name in _READ_AT_IMPORT)


def start_daemon(
    arguments: list[str], output: int, environment: Mapping[str, str] | None = None
) -> Forked | subprocess.Popen[bytes]:
    """Start a daemon.

    Args:
        arguments: those of ``malletrain``, from ``daemon`` on.
        output: descriptor of the file for its standard output and error.
        environment: its environment; None: that of this process. Where the imports of a daemon
            depend on a variable, it is a new interpreter.
    """
    variables = dict(os.environ if environment is None else environment)
    if not _servers:
        _servers[_read_at_import(os.environ)] = Server(__name__)
    server = _servers.get(_read_at_import(variables))
    if server is None:
        argv = [sys.executable, "-m", "malletrain", *arguments]
        return subprocess.Popen(argv, stdout=output, stderr=output, env=variables)
    with open(os.devnull, "rb") as nothing:
        streams = (nothing.fileno(), output, output)
        return server.start(["malletrain", *arguments], streams, variables)


def _run(_: list[str]) -> None:
    from malletrain.__main__ import main

    main()


if __name__ == "__main__":
    serve(_PRELOADED, _run)
