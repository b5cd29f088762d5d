"""What the gate accepts: the rules, a file of the machine's administrator that only root can write,
and by them the commands, their arguments and the batch scripts of leases.

:func:`read_rules` decides whether the file can be trusted, and parses it. The rest is pure.

:func:`gated` decides about a command by tables: for each command the options that every lease has,
as patterns. The site's own options (``options`` of the rules) must all be present, and no others.
It decides nothing about batch scripts and existing jobs.

:func:`check_script` decides that a batch script is that of leases and of nothing else, which
commands a lease may run and which variables it may set. The script is parsed, and the result is
assembled again by :mod:`scavenger.batch.lease_script` and :mod:`scavenger.slurm.job`. The script is
accepted only if both are equal, byte for byte. Therefore the parser can be simple.
"""

from __future__ import annotations

import os
import re
import shlex
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scavenger.batch.lease_script import PLACE, Part, lease_script, shared_script
from scavenger.interface import SchedulerError
from scavenger.slurm import job as slurm

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


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
    agent, script = _word_list(path, values, "agent"), Path(values.get("script", ""))
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
        _word_list(path, values, "options"),
        _commands(path, values, owner),
        {str(name): str(value) for name, value in values.get("environment", {}).items()},
        values.get("least_uid", 1000),
    )


def _word_list(path: Path, values: dict[str, Any], name: str) -> tuple[str, ...]:
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


VARIABLE = re.compile(r"MALLETRAIN_[A-Z0-9_]+")
OPTION = re.compile(r"--[a-z][a-z-]*")
_RETURN = "$(printf '\\015')"
"""The form of a carriage return in a script."""


def check_script(script: bytes, rules: GateRules) -> None:
    """Raise GateClosed if ``script`` is not that of leases."""
    try:
        text = script.decode("utf-8", "surrogateescape")
        parts, rebuilt = _parse(text, rules.template)
    except (SchedulerError, ValueError, IndexError):
        raise GateClosed("The batch script is not that of a lease.") from None
    if rebuilt != script:
        raise GateClosed("The batch script is not that of a lease, made of the rules' own script.")
    for part in parts:
        _check(part, rules)


def _check(part: Part, rules: GateRules) -> None:
    """Check the command and the variables of one lease. Raises GateClosed."""
    begins, rest = tuple(part.argv[: len(rules.agent)]), part.argv[len(rules.agent) :]
    if begins != rules.agent:
        raise GateClosed(
            f"A lease runs {shlex.join(rules.agent)}, and not {shlex.join(part.argv)[:200]}."
        )
    if len(rest) % 2 or not all(OPTION.fullmatch(word) for word in rest[::2]):
        raise GateClosed(f"An agent gets options with a value each, not {shlex.join(rest)[:200]}.")
    for name in part.env:
        if not VARIABLE.fullmatch(name):
            raise GateClosed(f"A lease sets no variable {name[:80]}.")


def _parse(text: str, template: str) -> tuple[list[Part], bytes]:
    """Return the commands of the leases in a script, and the script that would be generated for
    them.
    """
    middle = _between(text, *template.split(f"\n{PLACE}\n", 1))
    words = _words(middle)
    if "case" in words:
        parts = list(_choice(words))
        return parts, shared_script(template, slurm.NODE, parts)
    part, end = _part("", words, 0)
    if end != len(words):
        raise ValueError("something follows")
    if slurm.BLOCK_TEXT in part.env:
        text = part.env[slurm.BLOCK_TEXT]
        if text.startswith(slurm.host_pieces()[0]):
            return _host(text, template)
        chosen = _between(text, *slurm.BLOCK.split(slurm.CHOICE, 1))
        parts = list(_choice(_words(chosen)))
        return parts, slurm.block_script(template, parts)
    return [part], lease_script(template, part)


def _host(text: str, template: str) -> tuple[list[Part], bytes]:
    """Return what :func:`_parse` does, for the script of the slots of a whole host."""
    head, to_choice, to_amounts, tail = slurm.host_pieces()
    slots, mark, rest = _between(text, head, tail).partition(to_choice)
    chosen, second_mark, amounts = rest.rpartition(to_amounts)
    names, parts, options = _words(slots), list(_choice(_words(chosen))), _words(amounts)
    if not (mark and second_mark and all(map(SLOT.fullmatch, names))):
        raise ValueError("these are no slots")
    if not all(any(re.fullmatch(each, word) for each in SLOT_OPTIONS) for word in options):
        raise ValueError("these are no amounts of a slot")
    return parts, slurm.host_script(template, options, parts)


def _between(text: str, head: str, tail: str) -> str:
    if not (text.startswith(head) and text.endswith(tail)):
        raise ValueError("it is made of something else")
    return text[len(head) : len(text) - len(tail)]


def _words(text: str) -> list[str]:
    return [word.replace(_RETURN, "\r") for word in shlex.split(text)]


def _part(node: str, words: list[str], position: int) -> tuple[Part, int]:
    """Return the lease whose variables begin at ``position``, and the position after it."""
    env: dict[str, str] = {}
    while words[position] == "export":
        name, _, env[name] = words[position + 1].partition("=")
        position += 2
    keep_at_home = words[position] != "set"
    position = words.index("set", position) + 2
    end = words.index(";;", position) if ";;" in words[position:] else len(words)
    return Part(node, words[position:end], env, keep_at_home=keep_at_home), end


def _choice(words: list[str]) -> Iterator[Part]:
    """Yield the leases of a script that chooses among several by the node."""
    position, common = words.index("case"), {}
    for assignment in words[1:position:2]:
        name, _, common[name] = assignment.partition("=")
    position += 3
    while words[position] != "*)":
        part, end = _part(words[position].removesuffix(")"), words, position + 1)
        yield part._replace(env={**common, **part.env})
        position = end + 1


NODES = r"[A-Za-z0-9_.,\[\]-]{1,60000}"
SLURM_JOB = re.compile(r"[0-9]{1,12}(?:[_.][0-9]{1,9})?")
PBS_JOB = re.compile(r"[0-9]{1,12}(?:\[[0-9]*\])?(?:\.[A-Za-z0-9_.-]{1,200})?")
HOUR = r"[0-9]{2,5}:[0-9]{2}:[0-9]{2}"
VERSION = ("--version",)
"""Used by ``malletrain check``; always accepted."""

SLOT = re.compile(r"[A-Za-z0-9_.-]{1,255}/[A-Za-z][A-Za-z0-9_-]{0,31}\.[0-9]{1,4}")
SLOT_OPTIONS = (
    r"--cpus-per-task=[0-9]{1,5}",
    r"--mem=[0-9]{1,9}M",
    r"--gres=[A-Za-z0-9_.:-]{1,100}(?:,[A-Za-z0-9_.:-]{1,100})*",
)
"""The part of a host that is a slot."""
SBATCH = (
    r"--parsable",
    r"--job-name={name}",
    r"--clusters=[A-Za-z0-9_.-]{1,100}",
    rf"--nodelist={NODES}",
    rf"--exclude={NODES}",
    r"--nodes=1(?:-[0-9]{1,4})?",
    r"--ntasks=1",
    r"--ntasks-per-node=1",
    r"--no-kill",
    r"--array=0-[0-9]{1,4}",
    r"--no-requeue",
    r"--open-mode=append",
    r"--output=/dev/null",
    r"--input=/dev/null",
    r"--chdir=/",
    r"--time=[0-9]{1,6}",
    r"--time-min=[0-9]{1,6}",
    r"--deadline=now\+[0-9]{1,9}seconds",
    r"--signal=(?:B:)?TERM@[0-9]{1,5}",
    *SLOT_OPTIONS,
)
QSUB = (
    r"-f",
    r"-N {name}",
    r"-r [yn]",
    r"-m n",
    r"-j oe",
    r"-o /dev/null",
    r"-e /dev/null",
    r"-R oe",
    r"-l select=1:host=[A-Za-z0-9_.-]{1,255}(?::[A-Za-z0-9_.]+=[A-Za-z0-9_.+-]+)*",
    rf"-l (?:min_|max_)?walltime={HOUR}",
    r"-l place=free:shared",  # of a slot
)
REQUIRED_OPTIONS = {
    "sbatch": ("--parsable", "--job-name", "--output", "--time", "--chdir"),
    "qsub": ("-f", "-N", "-o", "-e", "-R"),
}
"""Required options of a submission. Without them it would do something else."""
ATTRIBUTE = re.compile(r"(?:^|,)\s*([^\s=,]+)\s*=")
"""The name of an attribute in the value of ``-W`` of qsub: ``umask=027,group_list=hpc``."""
FLAG_OPTIONS = frozenset({"-f", "-h", "-I", "-V", "-z"})
"""Options of qsub without a value."""


@dataclass(frozen=True)
class GatedCommand:
    """A checked command to be run. Its batch script and the names of its jobs are not checked
    yet.
    """

    argv: tuple[str, ...]
    """The command with its full path, and its arguments."""
    submits: bool = False
    """Whether the command reads a batch script."""
    jobs: tuple[str, ...] = ()
    """Jobs that it ends, signals or changes."""


def gated(words: Sequence[str], rules: GateRules) -> GatedCommand:
    """Return the checked command for ``words``. Only the last part of its own path is used. Raises
    GateClosed.
    """
    if not words:
        raise GateClosed("Say which command is to be run.")
    verb, rest = words[0].rpartition("/")[2], tuple(words[1:])
    if verb not in VERBS or verb not in rules.commands:
        allowed = ", ".join(sorted(VERBS.keys() & rules.commands.keys()))
        raise GateClosed(f"{verb[:80]} is not let through; what is: {allowed}.")
    argv = (rules.commands[verb], *rest)
    if any("\0" in word or "\n" in word for word in rest):
        raise GateClosed(f"A line break cannot stand in an argument of {verb}.")
    return GatedCommand(argv) if rest == VERSION else VERBS[verb](verb, argv, rules)


def _submit(verb: str, argv: tuple[str, ...], rules: GateRules) -> GatedCommand:
    table = SBATCH if verb == "sbatch" else QSUB
    name = re.escape(rules.prefix) + r"[A-Za-z0-9_.+-]{1,200}"
    patterns = [re.compile(text.replace("{name}", name)) for text in table]
    items = argv[1:] if verb == "sbatch" else _pairs(argv[1:])
    remaining = list(rules.options)
    for item in items:
        if item in remaining:
            remaining.remove(item)
        elif not any(pattern.fullmatch(item) for pattern in patterns):
            raise GateClosed(f'{verb} is not let through with "{item[:200]}".')
    if remaining:
        raise GateClosed(f'{verb} must have "{remaining[0]}" too, by the options of the rules.')
    options = [name for item in items for name in _names(verb, item)]
    if missing := [option for option in REQUIRED_OPTIONS[verb] if option not in options]:
        raise GateClosed(f"{verb} must have {missing[0]} too.")
    if twice := [option for option in options if options.count(option) > 1 and option != "-l"]:
        raise GateClosed(f"{verb} may have {twice[0]} once.")
    return GatedCommand(argv, submits=True)


def _names(verb: str, item: str) -> list[str]:
    """Return what an item sets, each once: its option or, of ``-W`` of qsub, the attributes.

    qsub may have several ``-W``, each with one attribute or more. Of an attribute that is set
    twice the last value counts (OpenPBS, process_opts in qsub.c), so that the order of two of the
    site's own options would choose between them. The server reads the names in any case.
    """
    option = re.split("[= ]", item)[0]
    if verb != "qsub" or option != "-W":
        return [option]
    return sorted({f"-W {name.lower()}" for name in ATTRIBUTE.findall(item.removeprefix("-W"))})


def _pairs(words: Sequence[str]) -> list[str]:
    """Return each option of qsub joined with its value."""
    items, rest = [], iter(words)
    for word in rest:
        items.append(word if word in FLAG_OPTIONS else f"{word} {next(rest, '')}")
    return items


def _end(verb: str, argv: tuple[str, ...], rules: GateRules) -> GatedCommand:
    pattern = SLURM_JOB if rules.kind == "slurm" else PBS_JOB
    for options in SIGNALS[verb]:
        jobs = argv[1 + len(options) :]
        actual = argv[1 : 1 + len(options)]
        if actual == options and jobs and all(pattern.fullmatch(job) for job in jobs):
            return GatedCommand(argv, jobs=jobs)
    raise GateClosed(f'{verb} is not let through with "{" ".join(argv[1:])[:200]}".')


def _shrink(verb: str, argv: tuple[str, ...], rules: GateRules) -> GatedCommand:
    job = re.compile(r"JobId=([0-9]{1,12})")
    match argv[1:]:
        case ("update", which, nodes) if (job_match := job.fullmatch(which)) and re.fullmatch(
            f"NodeList={NODES}", nodes
        ):
            return GatedCommand(argv, jobs=(job_match[1],))
    raise GateClosed(f'{verb} is not let through with "{" ".join(argv[1:])[:200]}".')


VERBS = {
    "sbatch": _submit,
    "qsub": _submit,
    "scancel": _end,
    "qdel": _end,
    "qsig": _end,
    "scontrol": _shrink,
}
SIGNALS: Mapping[str, Sequence[tuple[str, ...]]] = {
    "scancel": ((), ("--signal=TERM",), ("--signal=TERM", "--batch")),
    "qdel": ((),),
    "qsig": (("-s", "SIGKILL"),),
}
"""The options with which jobs are ended or signalled."""
