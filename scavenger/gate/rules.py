"""The rules of the gate: a file of the machine's administrator that only root can write.

Decides whether the file can be trusted, and parses it. :mod:`scavenger.gate.verbs` decides which
commands are accepted.
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

from scavenger.batch.lease_script import PLACE

KINDS = {
    "slurm": ("sbatch", "scancel", "scontrol", "squeue"),
    "pbs": ("qsub", "qdel", "qsig", "qstat"),
}
"""Kind of scheduler → the commands that are run for it. The last one only queries the names of
jobs.
"""
MAX_BYTES = 256 * 1024


class GateClosed(Exception):
    """The command is not accepted. The message is a sentence that says why."""


@dataclass(frozen=True)
class GateRules:
    """The rules of what is accepted."""

    kind: str
    """``slurm`` or ``pbs``."""
    agent: tuple[str, ...]
    """The first words of a lease's command."""
    template: str
    """The batch script of the leases, before anything is inserted."""
    prefix: str
    """Beginning of the names of lease jobs."""
    options: tuple[str, ...]
    """Options that every submission has, in addition to those that every lease has."""
    commands: dict[str, str]
    """Name of each command → its path."""
    environment: dict[str, str]
    """Variables that the commands get, in addition to those of the owner's account."""
    least_uid: int
    """Minimum uid of a user whose commands are accepted."""


def read_rules(path: Path, owner: int = 0) -> GateRules:
    """Return the rules in ``path``. Only ``owner`` or root may be able to write this file and the
    files that it names. Raises GateClosed.
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
    template = _text(script, owner)
    if f"\n{PLACE}\n" not in template:
        raise GateClosed(f"{script} is no batch script of leases: it has no line {PLACE}.")
    if len(prefix := values.get("prefix", "malletrain-")) < 4:
        raise GateClosed(f"{path}: prefix must have four characters at least.")
    return GateRules(
        values["kind"],
        agent,
        template,
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
    """Return the path of each command that the file names. Raises GateClosed if a command does not
    belong to the kind, or if another user can write it.
    """
    commands = {}
    for name, command_path in values.get("commands", {}).items():
        if name not in KINDS[values["kind"]]:
            raise GateClosed(f"{path}: commands has {name}, which is none of {values['kind']}'s.")
        if not str(command_path).startswith("/"):
            raise GateClosed(f"{path}: the path of {name} must begin with /.")
        _trusted(Path(command_path), owner)
        commands[name] = str(command_path)
    return commands


def _text(path: Path, owner: int) -> str:
    """Return the text of a file that no other user can write."""
    if not path.is_absolute():
        raise GateClosed(f'"{path}" is no full path of a file.')
    _trusted(path, owner)
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise GateClosed(f"{path} has more than {MAX_BYTES:,} bytes.")
        return data.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise GateClosed(f"{path} cannot be read: {error}.") from None


def _trusted(path: Path, owner: int) -> None:
    """Check that no other user can write or replace a file. Raises GateClosed."""
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
