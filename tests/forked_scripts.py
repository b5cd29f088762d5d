"""Scripts of tests that import torch, as forks of a process that has imported it, and hydra."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from tests.forks import Server, serve

_PRELOADED = ("torch", "hydra")
_servers: list[Server] = []
"""That of this process, once a script was run."""


def run_script(
    folder: Path, script: str, *arguments: str, environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run ``python SCRIPT ARGUMENTS``. Fails if the script does.

    Args:
        folder: the working folder.
        script: name of the script.
        arguments: its arguments.
        environment: its environment.
    """
    if not _servers:
        _servers.append(Server(__name__))
    argv = [script, *arguments]
    with (
        open(os.devnull, "rb") as nothing,
        tempfile.TemporaryFile("w+") as output,
        tempfile.TemporaryFile("w+") as errors,
    ):
        streams = (nothing.fileno(), output.fileno(), errors.fileno())
        code = _servers[0].start(argv, streams, dict(environment), str(folder)).wait()
        texts = []
        for file in (output, errors):
            file.seek(0)
            texts.append(file.read())
    assert not code, f"{argv} ended with {code}:\n{texts[1]}"
    return subprocess.CompletedProcess(argv, code, *texts)


def _run(argv: list[str]) -> None:
    sys.path.insert(0, os.path.dirname(os.path.abspath(argv[0])))
    runpy.run_path(argv[0], run_name="__main__")


if __name__ == "__main__":
    serve([name for name in _PRELOADED if find_spec(name)], _run)
