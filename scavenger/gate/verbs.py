"""The commands that the gate accepts, their arguments, and the batch scripts of leases. Pure.

:func:`gated` decides about a command by tables: for each command the options that every lease has,
as patterns. The site's own options (``options`` of the rules) must all be present, and no others.
It decides nothing about batch scripts and existing jobs.

:func:`check_script` decides that a batch script is that of leases and of nothing else, which
commands a lease may run and which variables it may set. The script is parsed, and the result is
assembled again by :mod:`scavenger.batch.lease_script` and :mod:`scavenger.slurm.job`. The script is
accepted only if both are equal, byte for byte. Therefore the parser can be simple.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from scavenger.batch.lease_script import PLACE, Part, lease_script, shared_script
from scavenger.gate.rules import GateClosed, GateRules
from scavenger.interface import SchedulerError
from scavenger.slurm import job as slurm

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
    options = [re.split("[= ]", item)[0] for item in items]
    if missing := [option for option in REQUIRED_OPTIONS[verb] if option not in options]:
        raise GateClosed(f"{verb} must have {missing[0]} too.")
    if twice := [option for option in options if options.count(option) > 1 and option != "-l"]:
        raise GateClosed(f"{verb} may have {twice[0]} once.")
    return GatedCommand(argv, submits=True)


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
