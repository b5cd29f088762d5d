"""Commands of the command line, as forks of a process that has imported it. Those imports are most
of what a command costs. Tests about the start of a command, its terminal or a pipe to it start a
new interpreter instead.
"""

from __future__ import annotations

import os
import pkgutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import malletrain.cli
from tests.forks import Server, serve
from tests.waiting import PATIENCE_S

_servers: list[Server] = []
"""That of this process, once a command was run."""


def run_command(
    words: Sequence[str], folder: Path, environment: Mapping[str, str], input: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run ``malletrain WORDS`` to its end.

    Args:
        words: the command and its arguments.
        folder: its working folder.
        environment: variables that it has beside those of this process.
        input: what it reads from a file that is its standard input.
    """
    if not _servers or _servers[0].closed:
        _servers[:] = [Server(__name__)]
    argv, variables = ["malletrain", *words], {**os.environ, **environment}
    with (
        tempfile.TemporaryFile("w+") as source,
        tempfile.TemporaryFile("w+") as output,
        tempfile.TemporaryFile("w+") as errors,
    ):
        source.write(input)
        source.seek(0)
        streams = (source.fileno(), output.fileno(), errors.fileno())
        process = _servers[0].start(argv, streams, variables, str(folder))
        try:
            code = process.wait(PATIENCE_S)
        except BaseException:
            process.kill()
            raise
        texts = []
        for file in (output, errors):
            file.seek(0)
            texts.append(file.read())
    return subprocess.CompletedProcess(argv, code, *texts)


def _run(_: list[str]) -> None:
    from malletrain.__main__ import main

    main()


if __name__ == "__main__":
    modules = pkgutil.iter_modules(malletrain.cli.__path__, "malletrain.cli.")
    serve(["malletrain.client", *(module.name for module in modules)], _run)
