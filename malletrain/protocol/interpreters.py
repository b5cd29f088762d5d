"""Which Python a job's processes are forks of, before any job is chosen: so that a leased node can
have it warm. Pure.

Decides what two jobs must have in common to be forks of one fork server, and for which jobs none
can be warm beforehand: those whose setup is a script of their own, those in containers, those whose
workers are to be started afresh, and those whose Python or search path depends on their directory.
"""

from __future__ import annotations

import hashlib
import os
from typing import Annotated

import msgspec

from malletrain.protocol import env as names
from malletrain.protocol.bounds import Id
from malletrain.protocol.message import Message
from malletrain.protocol.payloads import JobSpec, SoftwareEnvironment

_OURS = "MALLETRAIN_"
"""Variables that begin so are read when they are needed; all but one."""


class Interpreter(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A Python with everything that has to be so before it starts."""

    python: str
    """Its program; of no account where the software brings one."""
    env: dict[str, str] = {}
    """The job's own variables: some are read once, when a library is loaded."""
    software: SoftwareEnvironment | None = None
    """What is entered before it starts."""

    @property
    def key(self) -> str:
        """The same for jobs that can be forks of one fork server."""
        plain = msgspec.to_builtins((self.python, sorted(self.env.items()), self.software))
        return hashlib.sha256(msgspec.json.encode(plain)).hexdigest()[:16]


class WarmUp(Message, frozen=True):
    """Have fork servers warm for these, the first one first, and end others that no job uses.

    One that no job has used for ``idle_s`` seconds ends too.
    """

    interpreters: tuple[Interpreter, ...]
    idle_s: float


class Warm(Message, frozen=True):
    """The interpreters (keys) that are warm here, or cannot be."""

    keys: Annotated[tuple[Id, ...], msgspec.Meta(max_length=64)] = ()


def interpreter_of(spec: JobSpec) -> Interpreter | None:
    """The Python that can be warm before this job is chosen for a node; None: there is none."""
    software = spec.software
    if spec.mode == "service" or spec.launcher != "builtin" or spec.setup:
        return None
    if software is not None and software.container:
        return None
    if spec.env.get(names.PRELOAD) == "0":
        return None
    if "/" in spec.python and not os.path.isabs(spec.python):
        return None
    if not all(os.path.isabs(p) for p in spec.env.get("PYTHONPATH", "").split(os.pathsep) if p):
        return None
    own = {k: v for k, v in spec.env.items() if k == names.PRELOAD or not k.startswith(_OURS)}
    return Interpreter(spec.python, own, software)
