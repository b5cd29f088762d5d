"""The Python interpreters that a leased node warms up before a job is chosen for it. Pure.

A job's processes are forks of a warm interpreter. Decides what two jobs must have in common to use
one fork server, and which jobs cannot use one that is warm beforehand: jobs with a setup script,
jobs in containers, jobs that do not want forked workers, and jobs whose Python or search path
depends on their directory.
"""

from __future__ import annotations

import hashlib
import os
from typing import Annotated

import msgspec

from malletrain.protocol import env as names
from malletrain.protocol.bounds import Id, Message
from malletrain.protocol.payloads import JobSpec, SoftwareEnvironment

_OURS = "MALLETRAIN_"
"""Prefix of variables that are read when they are needed, and so need not be set before the
interpreter starts; except ``MALLETRAIN_PRELOAD``."""


class Interpreter(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A Python interpreter with everything that must be set before it starts."""

    python: str
    """Its program; ignored if the software environment has its own."""
    env: dict[str, str] = {}
    """The job's own variables, because some are read only once, when a library is loaded."""
    software: SoftwareEnvironment | None = None
    """The software environment that is entered before it starts."""

    @property
    def key(self) -> str:
        """Key that is the same for jobs that can be forks of one fork server."""
        plain = msgspec.to_builtins((self.python, sorted(self.env.items()), self.software))
        return hashlib.sha256(msgspec.json.encode(plain)).hexdigest()[:16]


class WarmUp(Message, frozen=True):
    """Start fork servers for these interpreters, in this order, and end others that no job uses. A
    fork server that no job has used for ``idle_s`` seconds ends too.
    """

    interpreters: tuple[Interpreter, ...]
    idle_s: float


class Warm(Message, frozen=True):
    """Keys of the interpreters that are warm on this node, or that cannot be warmed up."""

    keys: Annotated[tuple[Id, ...], msgspec.Meta(max_length=64)] = ()


def interpreter_of(spec: JobSpec) -> Interpreter | None:
    """Return the interpreter that can be warm before this job is chosen for a node; None if there
    is none."""
    software = spec.software
    if not spec.trains or spec.launcher != "builtin" or spec.setup:
        return None
    if software is not None and software.container:
        return None
    if spec.env.get(names.PRELOAD) == "0":
        return None
    if "/" in spec.python and not os.path.isabs(spec.python):
        return None
    if not all(os.path.isabs(p) for p in spec.env.get("PYTHONPATH", "").split(os.pathsep) if p):
        return None
    variables = {k: v for k, v in spec.env.items() if k == names.PRELOAD or not k.startswith(_OURS)}
    return Interpreter(spec.python, variables, software)
