"""What the machine's administrator lets through the gate: a file that only root can write.

Decides whether the file can be trusted and what it says. What a command has to look like is decided
in :mod:`scavenger.gate.verbs` and :mod:`scavenger.gate.scripts`.
"""

from __future__ import annotations

import os
import stat
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

KINDS = {
    "slurm": ("sbatch", "scancel", "scontrol", "squeue"),
    "pbs": ("qsub", "qdel", "qsig", "qstat"),
}
"""Kind of scheduler → the commands that are run for it; the last one only asks, for the names of
jobs.
"""
MOST_BYTES = 256 * 1024


class GateClosed(Exception):
    """This does not get through; the message is a sentence that says why."""


@dataclass(frozen=True)
class GateRules:
    """What is let through."""

    kind: str
    """``slurm`` or ``pbs``."""
    agent: tuple[str, ...]
    """The words with which what a lease runs begins."""
    template: str
    """The batch script of the leases, before anything is put in."""
    prefix: str
    """With which the names of lease jobs begin."""
    options: tuple[str, ...]
    """Options that every submission has, besides those that every lease has."""
    commands: dict[str, str]
    """Name of each command → its path."""
    environment: dict[str, str]
    """Variables that the commands get, besides those of the owner's account."""
    least_uid: int
    """Nobody with a smaller number gets through."""


def read_rules(path: Path, owner: int = 0) -> GateRules:
    """The rules in ``path``, which, as the files that it names, only ``owner`` or root may be able
    to write. Raises GateClosed.
    """
    try:
        values = tomllib.loads(_text(path, owner))
    except tomllib.TOMLDecodeError as error:
        raise GateClosed(f"{path} is no TOML: {error}.") from None
    types: dict[str, type] = {
        "kind": str,
        "agent": list,
        "script": str,
        "prefix": str,
        "options": list,
        "commands": dict,
        "environment": dict,
        "least_uid": int,
    }
    for name, value in values.items():
        if name not in types:
            raise GateClosed(f"{path} has a key {name}; there are {', '.join(types)}.")
        if not isinstance(value, types[name]) or isinstance(value, bool):
            raise GateClosed(f"{path}: {name} is a {type(value).__name__}, which it cannot be.")
    if values.get("kind") not in KINDS:
        raise GateClosed(f"{path}: kind must be one of {', '.join(KINDS)}.")
    agent, script = _words(path, values, "agent"), Path(values.get("script", ""))
    if not agent or not agent[0].startswith("/"):
        raise GateClosed(f"{path}: agent must begin with the full path of a program.")
    if len(prefix := values.get("prefix", "malletrain-")) < 4:
        raise GateClosed(f"{path}: prefix must have four characters at least.")
    return GateRules(
        values["kind"],
        agent,
        _text(script, owner),
        prefix,
        _words(path, values, "options"),
        _commands(path, values, owner),
        {str(name): str(value) for name, value in values.get("environment", {}).items()},
        values.get("least_uid", 1000),
    )


def _words(path: Path, values: dict[str, Any], name: str) -> tuple[str, ...]:
    words = values.get(name, [])
    if not all(isinstance(word, str) for word in words):
        raise GateClosed(f"{path}: {name} must be a list of texts.")
    return tuple(words)


def _commands(path: Path, values: dict[str, Any], owner: int) -> dict[str, str]:
    """Each command of the kind that the file names, and that is somebody's who may name it."""
    commands = {}
    for name, where in values.get("commands", {}).items():
        if name not in KINDS[values["kind"]]:
            raise GateClosed(f"{path}: commands has {name}, which is none of {values['kind']}'s.")
        if not str(where).startswith("/"):
            raise GateClosed(f"{path}: the path of {name} must begin with /.")
        _trusted(Path(where), owner)
        commands[name] = str(where)
    return commands


def _text(path: Path, owner: int) -> str:
    """What a file says that nobody else can write."""
    if not path.is_absolute():
        raise GateClosed(f'"{path}" is no full path of a file.')
    _trusted(path, owner)
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise GateClosed(f"{path} has more than {MOST_BYTES:,} bytes.")
        return data.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise GateClosed(f"{path} cannot be read: {error}.") from None


def _trusted(path: Path, owner: int) -> None:
    """Whether nobody else can write a file, or put another into its place."""
    for one in (path, path.resolve(), path.resolve().parent):
        try:
            status = os.stat(one)
        except OSError as error:
            raise GateClosed(f"{one} cannot be read: {error.strerror}.") from None
        if status.st_uid not in (0, owner):
            raise GateClosed(f"{one} belongs to user {status.st_uid}; it must be root's.")
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            mode = stat.S_IMODE(status.st_mode)
            raise GateClosed(f"Others than root can write {one} (mode {mode:04o}).")
