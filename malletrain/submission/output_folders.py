"""Finds the folders to which a job writes its results and checkpoints, as far as its command and
its script name them.

Reads the script and never runs it. Finds options such as ``--output_dir PATH`` and their defaults
in the script, positional arguments that look like such a folder, and folders that the script names
literally in calls that take one (``TrainingArguments("out")``). A folder that the script computes
is not found.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_FOLDER_WORDS = (
    "out|outputs?|outs|save|saves|saved|results?|checkpoints?|ckpts?|logs?|logging|runs?|exps?|"
    "experiments?|default[-_]root"
)
OPTION = re.compile(
    rf"--(?:(?:[a-z]+[-_])?(?:{_FOLDER_WORDS})[-_]?(?:dir|directory|folder)|out|output|save[-_]to)|-o",
    re.IGNORECASE,
)
"""Options that name an output folder."""
_NAME = re.compile(rf"(?:.*[-_.])?(?:{_FOLDER_WORDS})(?:[-_.\d].*)?", re.IGNORECASE)
"""Typical names of output folders."""
_MARKER_FILES = ("malletrain.json", "malletrain.ckpt", "newest")
"""Files that MalleTrain's callbacks leave in an output folder."""
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
    return read
