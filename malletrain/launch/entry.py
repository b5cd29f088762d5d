"""The first program that a job's Python runs on a node, by its path: checks that the environment
has what a launcher needs, reports in one sentence what it lacks, and becomes the launcher.

    python entry.py restart|service|torchrun|warm DESCRIPTION LIBRARY --launch FILE

LIBRARY is used in a container: the directory of the agent's own malletrain, which replaces that of
the image. Beside it is the directory of the agent's compiled packages, named after its Python, for
images without them. Elsewhere LIBRARY is empty and malletrain is the environment's own.

Any Python from 3.8 on must be able to read this file. Standard library only.
"""

from __future__ import annotations

import gc
import importlib
import os
import re
import sys
from importlib.util import find_spec
from typing import Any

UNFIT = 78  # as malletrain.protocol.failures, which may not be there
LEAST = (3, 10)
KINDS = {
    "restart": "malletrain.launch.fork_server",
    "service": "malletrain.launch.service",
    "torchrun": "malletrain.launch.torchrun",
    "warm": "malletrain.launch.warm_server",
}


def library_name(version: Any) -> str:
    """The directory of packages compiled for this version of Python."""
    return f"lib-{version[0]}{version[1]}"


def lacking(kind: str, where: str, library: str) -> str:
    """What the environment lacks, as a sentence; empty when it has everything. ``where``: its
    description, which begins the sentence.
    """
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < LEAST:
        return f"{where} has Python {version}; malletrain needs {LEAST[0]}.{LEAST[1]} or newer."
    if find_spec("malletrain") is None:
        return (
            f"{where} has no malletrain; install it there: {sys.executable} -m pip install "
            "malletrain (or submit with the Python that has it)."
        )
    compiled = [name for name in ("msgspec", "zmq") if find_spec(name) is None]
    if compiled and library:
        beside = os.path.join(os.path.dirname(library), library_name(sys.version_info))
        if os.path.isdir(beside):
            _add(beside, last=True)
            compiled = [name for name in compiled if find_spec(name) is None]
    if compiled:
        shown = " and ".join("pyzmq" if name == "zmq" else name for name in compiled)
        borrow = f" (the agent's are for another Python than {version})" if library else ""
        return f"{where} has no {shown}{borrow}; install it there: pip install msgspec pyzmq."
    if kind != "service" and find_spec("torch") is None:
        return (
            f"{where} has no torch (Python {version}, {sys.executable}); install it there: pip "
            "install torch."
        )
    return ""


def another_version() -> str:
    """That the environment's malletrain is of another version than the agent's, to whose package
    this file belongs, as a sentence; empty when they are one.
    """
    module = find_spec("malletrain")
    theirs = _version(os.path.dirname(module.origin)) if module and module.origin else ""
    own = _version(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    if theirs == own:
        return ""
    return (
        f"this environment has malletrain {theirs}, the agent {own}; where they do not understand "
        f"each other, install the same: pip install malletrain=={own}"
    )


def _version(package: str) -> str:
    with open(os.path.join(package, "__init__.py"), encoding="utf-8") as file:
        match = re.search(r'^__version__ = "([^"]*)"', file.read(), re.MULTILINE)
    return match[1] if match else "of no version"


def _add(directory: str, last: bool = False) -> None:
    """Let this process and those that it starts import from ``directory``."""
    sys.path[len(sys.path) if last else 0 : 0] = [directory]
    parts = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    os.environ["PYTHONPATH"] = os.pathsep.join([*parts, directory] if last else [directory, *parts])


def main(argv: list[str]) -> int:
    """See the module's text."""
    kind, where, library, rest = argv[0], argv[1], argv[2], argv[3:]
    # Not the folder of this file, nor the job's own: what is named there like a module of ours or
    # of torch's must not take its place.
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [p for p in sys.path if p and os.path.abspath(p) != here]
    if library:
        _add(library)
    sentence = lacking(kind, where, library)
    if sentence:
        return _unfit(sentence)
    note = another_version()
    if note:
        print(f"malletrain launcher: {note}.", file=sys.stderr, flush=True)
    sys.argv = [sys.argv[0], *rest]
    # What is imported stays: looking for garbage in between is a sixth of the time.
    gc.disable()
    try:
        module = importlib.import_module(KINDS[kind])
        importlib.import_module("malletrain.launch.loop")
        if kind != "service":
            importlib.import_module("torch")
    except (ImportError, OSError) as error:  # OSError: a shared library that cannot be loaded
        return _unfit(f"{where} cannot start a launcher: {str(error).rstrip('.')}.")
    finally:
        gc.enable()
    if library:
        # The runtime stands between this process and the supervisor, and a container's user
        # namespace has taken back what the supervisor had set.
        from malletrain.launch.supervisor import die_with_parent

        die_with_parent(os.getppid())
    return int((module.main(note) if kind == "warm" else module.main()) or 0)


def _unfit(sentence: str) -> int:
    print(f"malletrain: {sentence}", file=sys.stderr, flush=True)
    return UNFIT


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
