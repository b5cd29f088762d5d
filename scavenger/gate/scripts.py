"""Checks that a batch script is that of leases and of nothing else.

The script is parsed, and the result is assembled again by :mod:`scavenger.batch.lease_script` and
:mod:`scavenger.slurm.job`. The script is accepted only if both are equal, byte for byte. Therefore
the parser can be simple. Also decides which commands a lease may run and which variables it may
set. Pure.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

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
        parts = list(_choice(words, slurm.NODE))
        return parts, shared_script(template, slurm.NODE, parts)
    part, end = _part("", words, 0)
    if end != len(words):
        raise ValueError("something follows")
    if slurm.BLOCK_TEXT in part.env:
        chosen = _between(part.env[slurm.BLOCK_TEXT], *slurm.BLOCK.split(slurm.CHOICE, 1))
        parts = list(_choice(_words(chosen), slurm.BLOCK_NODE))
        return parts, slurm.block_script(template, parts)
    return [part], lease_script(template, part)


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


def _choice(words: list[str], node: str) -> Iterator[Part]:
    """Yield the leases of a script that chooses among several by ``node``."""
    position, common = words.index("case"), {}
    for assignment in words[1:position:2]:
        name, _, common[name] = assignment.partition("=")
    position += 3
    while words[position] != "*)":
        part, end = _part(words[position].removesuffix(")"), words, position + 1)
        yield part._replace(env={**common, **part.env})
        position = end + 1
