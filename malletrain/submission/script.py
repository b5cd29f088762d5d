"""The script of a job: a Python file that the job's Python can read as a program.

Decides what is refused before it would fail on a node. Does not examine what the script does.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path

from malletrain.submission.error import SpecError

SHELL = frozenset((".sh", ".bash", ".zsh", ".csh", ".ksh", ".slurm", ".sbatch", ".pbs", ".job"))
"""Suffixes of batch and shell scripts."""
LARGEST_BYTES = 16 * 1024 * 1024


def script_of(text: str, own_python: bool = True) -> Path:
    """Return the absolute path of the script. Symlinks are not resolved, so that a link can be
    moved to a new version between starts.

    If the submitting Python also runs the script (``own_python``), the script is compiled here.
    Raises SpecError if it is not a Python program.
    """
    path = Path(os.path.abspath(os.path.expanduser(text)))
    if not path.exists():
        raise SpecError(f"There is no script {path}; give the path of a Python file.")
    if not path.is_file():
        raise SpecError(f"{path} is not a file; give the path of a Python file.")
    if not os.access(path, os.R_OK):
        raise SpecError(f"The script {path} cannot be read by you; make it readable.")
    with path.open("rb") as file:
        source = file.read(LARGEST_BYTES)
    first = source[:200].splitlines()[0] if source.strip() else b""
    shebang = first.startswith(b"#!")
    if path.suffix.lower() in SHELL or (shebang and b"python" not in first):
        raise SpecError(
            f"{path} is a shell script, but a job is a Python script that runs on every node; "
            "submit the Python script itself, with what has to run before it in --setup. For many "
            "runs of any other program there is malletrain map."
        )
    if path.suffix.lower() == ".ipynb":
        raise SpecError(
            f"{path} is a notebook, but a job is a Python script; write one from it with: jupyter "
            f"nbconvert --to script {path.name}"
        )
    if own_python and len(source) < LARGEST_BYTES:
        _compile(source, path)
    return path


def module_of(name: str, workdir: str | None, own_python: bool = True) -> Path:
    """Return the file that ``python -m NAME`` runs in ``workdir`` (None: the current directory).
    Imports nothing.

    Args:
        name: dotted name of the module or package.
        workdir: directory in which the job runs, first on its module path.
        own_python: whether the submitting Python runs the job, so that its packages are searched
            too.

    Raises:
        SpecError: there is no such module, or it cannot be run.
    """
    directory = os.path.abspath(os.path.expanduser(workdir or os.getcwd()))
    if not all(part.isidentifier() for part in name.split(".")):
        hint = f"; for the file leave -m out: {name}" if os.path.exists(name) else ""
        raise SpecError(f"{name} is no name of a module, such as package.train{hint}.")
    where: Sequence[str] | None = [directory, *(sys.path if own_python else ())]
    parts = name.split(".")
    for number, part in enumerate((*parts, "__main__")):
        module = PathFinder.find_spec(part, where) if where is not None else None
        where = module.submodule_search_locations if module is not None else None
        if number < len(parts) - 1 and where is not None:
            continue
        if module is None:
            break
        if where is None:
            if module.origin and module.origin.endswith(".py"):
                return Path(module.origin)
            break
    python = f" or in {sys.executable}" if own_python else ""
    raise SpecError(
        f"There is no module {name} that can be run in {directory}{python}; name a module or a "
        "package with a __main__, and its directory with --workdir."
    )


def _compile(source: bytes, path: Path) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the node's log will show them
            compile(source, str(path), "exec", dont_inherit=True)
    except SyntaxError as error:
        where = f" in line {error.lineno}" if error.lineno else ""
        line = (error.text or "").strip()
        raise SpecError(
            f"The script {path} has a syntax error{where}: {error.msg}"
            + (f" ({line[:80]})" if line else "")
            + "; mend it and submit it again."
        ) from None
    except ValueError as error:  # a NUL in it
        raise SpecError(f"The script {path} is not Python source: {error}.") from None
    except (RecursionError, MemoryError):
        pass  # nested too deeply for this process; the node will report it
