"""The first program that a job's Python runs on a node, by its path. It checks that the environment
has the packages that a launcher needs, reports in one sentence which are missing, and becomes the
launcher.

    python entry.py restart|service|farm|torchrun|warm DESCRIPTION LIBRARY --launch FILE

LIBRARY is used in a container: the directory of the agent's own malletrain, which replaces that of
the image. Next to it is the directory of the packages that the agent's malletrain needs, named
after the agent's Python version, for images without them. Outside of a container LIBRARY is empty,
and malletrain is the environment's own.

Every Python from 3.8 on must be able to run this file. Standard library only.
"""

from __future__ import annotations

import gc
import importlib
import os
import re
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

UNFIT = 78  # as in malletrain.protocol.failures, which the environment may lack
UMASK = "MALLETRAIN_UMASK"  # as in malletrain.protocol.env
MIN_PYTHON = (3, 10)
KINDS = {
    "restart": "malletrain.launch.fork_server",
    "service": "malletrain.launch.service",
    "farm": "malletrain.launch.farm",
    "torchrun": "malletrain.launch.torchrun",
    "warm": "malletrain.launch.warm_server",
}
WITHOUT_TORCH = ("service", "farm")
WITH_TIME_LIMITS = ("restart", "warm")  # these import malletrain.waits, also for live mode


def library_name(version: Any) -> str:
    """Return the name of the directory of the agent's packages for a version of Python."""
    return f"lib-{version[0]}{version[1]}"


def needed_packages(version: Any, kind: str = "restart") -> dict[str, str]:
    """Return name of a module → name of its distribution, of what a launcher needs on a node,
    beside torch.

    Args:
        version: version of the node's Python.
        kind: kind of launcher, a key of KINDS; the default needs all that any needs.
    """
    needed = {"msgspec": "msgspec", "zmq": "pyzmq"}
    if kind in WITH_TIME_LIMITS and tuple(version[:2]) < (3, 11):
        needed["async_timeout"] = "async-timeout"
    return needed


def lacking(kind: str, where: str, library: str) -> str:
    """Return a sentence about the packages that the environment lacks; empty if it has all.

    Args:
        kind: kind of launcher, a key of KINDS.
        where: description of the environment, the subject of the sentence.
        library: directory of the agent's malletrain in a container, else empty.
    """
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < MIN_PYTHON:
        oldest = f"{MIN_PYTHON[0]}.{MIN_PYTHON[1]}"
        return f"{where} has Python {version}; malletrain needs {oldest} or newer."
    if find_spec("malletrain") is None:
        return (
            f"{where} has no malletrain; install it there: {sys.executable} -m pip install "
            "--find-links WHEELS malletrain (or submit with the Python that has it)."
        )
    needed = needed_packages(sys.version_info, kind)
    absent = [name for name in needed if find_spec(name) is None]
    if absent and library:
        beside = os.path.join(os.path.dirname(library), library_name(sys.version_info))
        if os.path.isdir(beside):
            _add(beside, last=True)
            absent = [name for name in absent if find_spec(name) is None]
    if absent:
        shown = " and ".join(needed[name] for name in absent)
        reason = f" (the agent's are for another Python than {version})" if library else ""
        install = " ".join(needed.values())
        return f"{where} has no {shown}{reason}; install it there: pip install {install}."
    if kind not in WITHOUT_TORCH and find_spec("torch") is None:
        return (
            f"{where} has no torch (Python {version}, {sys.executable}); install it there: pip "
            "install torch."
        )
    return ""


def another_version() -> str:
    """Return a sentence if the version of the environment's malletrain differs from that of the
    agent, to whose package this file belongs; empty if they are equal.
    """
    module = find_spec("malletrain")
    installed = _version(os.path.dirname(module.origin)) if module and module.origin else ""
    agents = _version(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    if installed == agents:
        return ""
    return (
        f"this environment has malletrain {installed}, the agent {agents}; if the job fails to "
        f"start, install the same version: pip install --find-links WHEELS malletrain=={agents}"
    )


def _version(package: str) -> str:
    with open(os.path.join(package, "__init__.py"), encoding="utf-8") as file:
        match = re.search(r'^__version__ = "([^"]*)"', file.read(), re.MULTILINE)
    return match[1] if match else "of unknown version"


def _add(directory: str, last: bool = False) -> None:
    """Add ``directory`` to the import path of this process and of the processes that it starts."""
    sys.path[len(sys.path) if last else 0 : 0] = [directory]
    parts = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    os.environ["PYTHONPATH"] = os.pathsep.join([*parts, directory] if last else [directory, *parts])


def umask_of(environment: Mapping[str, str]) -> int:
    """Return the file mode creation mask of a job's processes; -1 if its environment names none.
    The owner's own access is never masked.
    """
    try:
        return int(environment[UMASK], 8) & 0o077
    except (KeyError, ValueError):
        return -1


def set_umask() -> None:
    """Have this process and those that it starts create files with the modes that the job's owner
    expects. Private files of MalleTrain name their modes themselves.
    """
    mask = umask_of(os.environ)
    if mask >= 0:
        os.umask(mask)


def main(argv: list[str]) -> int:
    """Run the program; see the module's docstring."""
    set_umask()
    kind, where, library, rest = argv[0], argv[1], argv[2], argv[3:]
    # Remove the directory of this file and the job's working directory: a file there must not
    # shadow a module of malletrain or torch that has the same name.
    package_dir = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [p for p in sys.path if p and os.path.abspath(p) != package_dir]
    if library:
        _add(library)
    sentence = lacking(kind, where, library)
    if sentence:
        return _unfit(sentence)
    note = another_version()
    if note:
        print(f"malletrain launcher: {note}.", file=sys.stderr, flush=True)
    sys.argv = [sys.argv[0], *rest]
    # Imported objects stay, and garbage collection in between would take a sixth of the time.
    gc.disable()
    try:
        module = importlib.import_module(KINDS[kind])
        importlib.import_module("malletrain.launch.loop")
        if kind not in WITHOUT_TORCH:
            importlib.import_module("torch")
    except (ImportError, OSError) as error:  # OSError: a shared library that cannot be loaded
        return _unfit(f"{where} cannot start a launcher: {str(error).rstrip('.')}.")
    finally:
        gc.enable()
    if library:
        # The container runtime is between this process and the supervisor, and the user namespace
        # of the container has reset the setting that the supervisor made.
        from malletrain.launch.supervisor import die_with_parent

        die_with_parent(os.getppid())
    return int((module.main(note) if kind == "warm" else module.main()) or 0)


def _unfit(sentence: str) -> int:
    print(f"malletrain: {sentence}", file=sys.stderr, flush=True)
    return UNFIT


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
