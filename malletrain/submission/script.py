"""The script of a job, read at its submission and never run.

:func:`script_of` requires a Python file that the job's Python can read as a program: it decides
what is refused before it would fail on a node.

:func:`options_of_type_bool` finds options that read ``false`` as true.

:func:`output_folders` finds the folders to which a job writes its results and checkpoints, as far
as its command and its script name them: options such as ``--output_dir PATH`` and their defaults in
the script, positional arguments that look like such a folder, and folders that the script names
literally in calls that take one (``TrainingArguments("out")``). A folder that the script computes
is not found.
"""

from __future__ import annotations

import ast
import os
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from pathlib import Path

from malletrain.submission.error import SpecError

SHELL = frozenset((".sh", ".bash", ".zsh", ".csh", ".ksh", ".slurm", ".sbatch", ".pbs", ".job"))
"""Suffixes of batch and shell scripts."""
LARGEST_BYTES = 16 * 1024 * 1024
_FOLDER_WORDS = (
    "out|outputs?|outs|save|saves|saved|results?|checkpoints?|ckpts?|logs?|logging|runs?|exps?|"
    "experiments?|default[-_]root"
)
_MARKER_FILES = ("malletrain.json", "malletrain.ckpt", "newest")
"""Files that MalleTrain's callbacks leave in an output folder."""


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


OPTION = re.compile(
    rf"--(?:(?:[a-z]+[-_])?(?:{_FOLDER_WORDS})[-_]?(?:dir|directory|folder)|out|output|save[-_]to)|-o",
    re.IGNORECASE,
)
"""Options that name an output folder."""
_NAME = re.compile(rf"(?:.*[-_.])?(?:{_FOLDER_WORDS})(?:[-_.\d].*)?", re.IGNORECASE)
"""Typical names of output folders."""
_FOLDER_ARGUMENTS = {
    "MalleTrainCallback": (0, "folder"),
    "Guard": (1, "folder"),
    "ModelCheckpoint": (0, "dirpath"),
    "SummaryWriter": (0, "log_dir"),
    "ProjectConfiguration": (0, "project_dir"),
}
"""Calls that take an output folder → the position and the name of that argument."""


def output_folders(script: str, args: Sequence[str], workdir: str) -> set[str]:
    """Return the absolute paths of the output folders that a job names.

    Args:
        script: its script.
        args: the script's arguments.
        workdir: the folder it runs in.
    """
    read = _read(script)
    folders = {*_in_arguments(args, read, workdir), *read.folders}
    options_used = {arg.partition("=")[0] for arg in args}
    folders |= {path for options, path in read.defaults if not options_used.intersection(options)}
    return {_absolute(path, workdir) for path in folders if path}


_JSONARGPARSE = re.compile(r"jsonargparse\b|(?:lightning\.pytorch|pytorch_lightning)\.cli\b")
"""Modules whose parsers read ``false`` as false."""


def options_of_type_bool(script: str) -> set[str]:
    """Return the options of a script that argparse reads with ``type=bool``: any value but an empty
    one, also ``false`` or ``0``, is true. Empty if ``bool`` can mean something else in the script.
    """
    return _read(script).of_type_bool


def _absolute(path: str, workdir: str) -> str:
    return os.path.normpath(os.path.join(workdir, os.path.expanduser(path)))


@dataclass
class _Script:
    """Output folders and options found in a script."""

    folders: set[str] = field(default_factory=set)
    """Output folders that the script names literally."""
    defaults: list[tuple[set[str], str]] = field(default_factory=list)
    """(names of an option, its default folder)."""
    flags: set[str] = field(default_factory=set)
    """Options that take no value."""
    of_type_bool: set[str] = field(default_factory=set)
    """Options that argparse reads with ``type=bool``."""


def _in_arguments(args: Sequence[str], read: _Script, workdir: str) -> Iterator[str]:
    last_option = ""
    for arg in args:
        option, equals, value = arg.partition("=")
        if arg.startswith("-"):
            if equals and OPTION.fullmatch(option):
                yield value
            last_option = "" if equals or option in read.flags else option
            continue
        if OPTION.fullmatch(last_option) or (
            not last_option and _is_output_folder(_absolute(arg, workdir))
        ):
            yield arg
        last_option = ""


def _is_output_folder(path: str) -> bool:
    if _NAME.fullmatch(os.path.basename(path)) and not os.path.isfile(path):
        return "." not in os.path.basename(path)
    return any(os.path.exists(os.path.join(path, name)) for name in _MARKER_FILES)


def _read(script: str) -> _Script:
    read = _Script()
    try:
        tree = ast.parse(Path(script).read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return read  # not readable as Python: no folders are found
    constants = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }

    def text(value: ast.expr | None) -> str:
        constant = constants.get(value.id) if isinstance(value, ast.Name) else None
        constant = value.value if isinstance(value, ast.Constant) else constant
        return constant if isinstance(constant, str) else ""

    for call in ast.walk(tree):
        if not isinstance(call, ast.Call):
            continue
        name = getattr(call.func, "attr", getattr(call.func, "id", ""))
        named = {word.arg: word.value for word in call.keywords}
        if name == "add_argument":
            options = {text(arg) for arg in call.args}
            if getattr(named.get("type"), "id", "") == "bool":
                read.of_type_bool |= options
            if text(named.get("action")).startswith(("store_true", "store_false")):
                read.flags |= options
            elif any(map(OPTION.fullmatch, options)):
                read.defaults.append((options, text(named.get("default"))))
        else:
            position, word = _FOLDER_ARGUMENTS.get(
                name, (0 if name.endswith("TrainingArguments") else -1, "")
            )
            word = word or "output_dir"
            value = call.args[position] if 0 <= position < len(call.args) else named.get(word)
            read.folders.add(text(value))
    if read.of_type_bool and any(map(_can_replace_bool, ast.walk(tree))):
        read.of_type_bool.clear()
    return read


def _can_replace_bool(node: ast.AST) -> bool:
    """Return whether ``type=bool`` can mean something else because of this statement or expression:
    it binds the name, registers a type, or imports jsonargparse.
    """
    if isinstance(node, ast.Import | ast.ImportFrom):
        module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
        return any(
            (alias.asname or alias.name) == "bool" or _JSONARGPARSE.match(module + alias.name)
            for alias in node.names
        )
    if isinstance(node, ast.Name):
        return node.id == "bool" and isinstance(node.ctx, ast.Store)
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Attribute) and node.func.attr == "register"
    return isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == "bool"
