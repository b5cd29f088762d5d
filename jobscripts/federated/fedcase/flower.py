"""Finds Flower's programs and packages, and makes the environment variables of the programs."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_MISSING = 3
"""Exit code of the search for a package that is not there."""
_SEARCH = f"""
import importlib.util, sys
sys.exit(0 if importlib.util.find_spec(sys.argv[1]) else {_MISSING})
"""


class FlowerMissingError(RuntimeError):
    """Flower is not installed; the message says how to install it."""


def program(name: str, folder: str = "") -> str:
    """Return the path of one of Flower's programs.

    Args:
        name: such as ``flower-supernode``.
        folder: folder of the programs; empty: beside this Python, else in PATH.

    Raises:
        FlowerMissingError: it is not there.
    """
    places = [folder] if folder else [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    for place in places:
        if path := shutil.which(name, path=place):
            return path
    raise FlowerMissingError(
        f"{name} is not in {places[0]}. Install Flower into an environment of its own "
        "(pip install -e 'jobscripts/federated[flower]') and name it: --flower ENVIRONMENT/bin"
    )


def environment_without(package: str, program_path: str) -> str:
    """Return the folder of the Python environment of one of Flower's programs if ``package`` is
    missing there; empty if it is there, or if the program's Python is not known.

    Args:
        package: name of a package, as it is imported.
        program_path: path of the program.
    """
    python = Path(program_path).parent / "python"
    if not python.exists():
        return ""
    done = subprocess.run([str(python), "-c", _SEARCH, package], capture_output=True, check=False)
    return str(python.parent.parent) if done.returncode == _MISSING else ""


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the arguments before ``--`` and those after it, which are Flower's."""
    own = list(arguments)
    if "--" not in own:
        return own, []
    place = own.index("--")
    return own[:place], own[place + 1 :]


def environment(home: Path, binaries: str) -> dict[str, str]:
    """Return the environment of Flower's programs, which start each other by name.

    Args:
        home: folder for Flower's own files.
        binaries: folder of the programs.
    """
    quiet: Mapping[str, str] = {
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
    }
    path = binaries + os.pathsep + os.environ.get("PATH", "")
    return {**os.environ, "PATH": path, **quiet}


def free_port() -> int:
    """Return a port of the loopback address that is free now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
