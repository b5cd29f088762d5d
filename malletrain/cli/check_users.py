"""The part of ``malletrain check`` for a daemon of several users and for ``malletrain-lease``.

:func:`users` tests whether the users are known, can run MalleTrain, and can be submitted as.
:func:`gate` tests whether ``malletrain-lease`` restricts the daemon's account to leases, and
whether it accepts the leases of this site.
"""

from __future__ import annotations

import pwd
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from malletrain.protocol.counting import counted

if TYPE_CHECKING:
    from malletrain.config.model import Config
    from scavenger.batch.slots import SlotKind
    from scavenger.batch.submission import LeaseSpec

GATE = "malletrain-lease"
TRY_S = 20.0


def gate(config: Config, name: str | None) -> Iterator[tuple[bool | None, str]]:
    """Check that ``malletrain-lease`` is in submit_as, and accepts a lease of the user ``name``."""
    from scavenger.interface import SchedulerError

    at = [n for n, word in enumerate(config.submit_as) if Path(word).name == GATE]
    if not at:
        yield (
            None,
            "The daemon's account can submit any job as the users, and end all of their jobs. With "
            f"{GATE} in submit_as it can do so with leases only (docs/several-users.md).",
        )
        return
    if at != [len(config.submit_as) - 1]:
        yield False, f"{GATE} must be the last word of submit_as, because the command follows it."
        return
    if name is None:
        yield (
            None,
            f"Whether leases get through {GATE} was not tried, because no user is listed; name one "
            "with --user.",
        )
        return
    prefix = [word.replace("{owner}", name) for word in config.submit_as]
    try:
        tried = list(submissions(config, name))
    except SchedulerError as error:
        yield None, f"Whether leases of {name} get through {GATE} was not tried: {error}"
        return
    refusals = []
    for what, argv, script in tried:
        try:
            process = subprocess.run(
                [*prefix, "--try", *argv], input=script, capture_output=True, timeout=TRY_S
            )
            stderr = " ".join(process.stderr.decode("utf-8", "replace").split())
            why = (stderr or f"status {process.returncode}") if process.returncode else ""
        except (OSError, subprocess.TimeoutExpired) as error:
            why = str(error)
        if why:
            refusals.append(f"A lease of {what} of {name} does not get through: {why}")
    for refusal in refusals:
        yield False, f"{refusal} Change {GATE}.conf."
    if not refusals:
        yield True, f"As others the daemon's account can submit and end leases only ({GATE})."


Submission = tuple[str, list[str], bytes]
"""What a lease has, as words of a sentence; its command; its batch script."""


def submissions(config: Config, owner: str) -> Iterator[Submission]:
    """Yield the submission of a lease of ``owner`` as the scavenger makes it: one for each kind of
    slots, or that of a node. Raises SchedulerError if the site's batch script cannot be read, or
    the main scheduler does not say how much memory a lease of a node may request.
    """
    if config.scheduler.kind == "slurm":
        return _to_slurm(config, owner)
    return _to_pbs(config, owner)


def _to_slurm(config: Config, owner: str) -> Iterator[Submission]:
    from malletrain.daemon.site.backends import slurm_lease_memory_mb, slurm_settings
    from scavenger.interface import slot_name
    from scavenger.slurm.job import batch_script, host_script, sbatch, sbatch_host, step_options

    settings = slurm_settings(config)
    whole = any(slot.whole_host for slot in settings.slots) or not settings.slots
    memory_mb = slurm_lease_memory_mb(config) if whole else 0
    for slot in settings.slots or (None,):
        spec = _lease(settings.prefix, owner, slot)
        if slot is not None and slot.whole_host:
            part = spec.part._replace(node=slot_name(spec.host, slot.name, 0))
            script = host_script(settings.template, step_options(slot.amounts), [part])
            yield _words(slot), sbatch_host(settings, [spec], memory_mb), script
            continue
        script = batch_script(settings.template, spec.argv, spec.env, False, True)
        yield _words(slot), sbatch(settings, spec, False, memory_mb), script


def _to_pbs(config: Config, owner: str) -> Iterator[Submission]:
    from malletrain.daemon.site.backends import pbs_settings
    from scavenger.batch.lease_script import lease_script
    from scavenger.pbs.hosts import slot_chunk
    from scavenger.pbs.job import SHARED_PLACE, chunk_of, qsub

    settings = pbs_settings(config)
    for slot in settings.slots or (None,):
        spec = _lease(settings.prefix, owner, slot)
        words = qsub(
            settings,
            name=spec.name,
            select=chunk_of(
                settings.lease, spec.host, slot_chunk(slot.amounts) if slot else ["ncpus=1"]
            ),
            limit_s=spec.limit_s,
            rerunnable=settings.lease.rerunnable != "no",
            place=SHARED_PLACE if slot else "",
        )
        yield _words(slot), words, lease_script(settings.template, spec.part)


def _lease(prefix: str, owner: str, slot: SlotKind | None) -> LeaseSpec:
    """Return a lease of a node or of a slot."""
    from malletrain.daemon.site.backends import agent_program
    from malletrain.protocol import env
    from scavenger.batch.submission import LeaseSpec

    agent = (*agent_program(), "--endpoint", "tcp://head:1", "--server-key", "x", "--lease", "l1")
    environment = {env.LEASE_KEY: "x", env.LEASE: "l1"}
    return LeaseSpec(
        f"{prefix}l1", "n1", agent, environment, 3600.0, 30.0, None, True, "l1", owner, slot
    )


def _words(slot: SlotKind | None) -> str:
    return f"a slot of kind {slot.name}" if slot else "a node"


SUBMIT = {"slurm": "sbatch", "pbs": "qsub"}


def users(config: Config, name: str | None = None) -> Iterator[tuple[bool | None, str]]:
    """Check everything that [daemon] users, munge, announce and submit_as need.

    Args:
        config: configuration of the site.
        name: user whose submissions are tried; None: the first in the list.
    """
    if not config.daemon.several_users:
        yield True, "The daemon serves the user who runs it, and nobody else."
        return
    listed: list[str] = []
    yield from _list(config, listed)
    yield from _munge(config)
    yield from _announce(config)
    yield from _python()
    if name is None:
        yield from _submitting(config, listed[0] if listed else None)
    elif _is_unknown(name):
        yield False, f"Submissions cannot be tried as {name} (--user), who is no user of this host."
    else:
        yield from _submitting(config, name)


def _is_unknown(name: str) -> bool:
    try:
        pwd.getpwnam(name)
    except KeyError:
        return True
    return False


def _list(config: Config, listed: list[str]) -> Iterator[tuple[bool | None, str]]:
    from malletrain.identity.users import UsersError, read_users

    if config.daemon.users is None:
        return
    try:
        users_list = read_users(config.daemon.users)
        listed += sorted(set(users_list.users.values()))
    except UsersError as error:
        yield False, str(error)
    else:
        for problem in users_list.problems:
            yield False, problem
        for name in filter(_is_unknown, listed):
            yield None, f"{config.daemon.users} lists {name}, whom this host does not know."
        yield (
            True,
            f"{config.daemon.users} lists {counted(len(listed), 'user')}.",
        )


def _munge(config: Config) -> Iterator[tuple[bool | None, str]]:
    from malletrain.identity.keys import user_name
    from malletrain.identity.users import Munge, UsersError

    if not config.daemon.munge:
        return
    munge = Munge(config.daemon.munge_socket)
    try:
        name = munge.user(munge.credential("check"), "check")
    except UsersError as error:
        yield False, f"MUNGE does not work here: {error}"
    else:
        yield name == user_name(), f"MUNGE says that you are {name}."


def _announce(config: Config) -> Iterator[tuple[bool | None, str]]:
    from malletrain.daemon.site.startup import announcement

    path = config.daemon.announce
    if path is None:
        yield (
            None,
            "Clients of other users cannot find the daemon; set announce in [daemon], such as "
            "/etc/malletrain/daemon.json.",
        )
    elif problems := list(announcement(config)):
        yield from problems
    elif closed := _closed(path.parent):
        yield False, f"Other users cannot read {path}: they may not enter {closed}."
    else:
        yield True, f"{path} will tell other users how to reach the daemon."


def _python() -> Iterator[tuple[bool | None, str]]:
    for folder in dict.fromkeys(
        Path(name).resolve() for name in (sys.prefix, sys.base_prefix, __file__)
    ):
        if closed := _closed(folder):
            yield (
                False,
                (
                    f"Other users may not enter {closed}, where this MalleTrain or its Python "
                    f"lies ({folder}). Agents run as the owners of "
                    "the jobs; install it where everybody may read it, such as /opt/malletrain."
                ),
            )
            return
    yield True, f"Other users can run {sys.executable}."


def _submitting(config: Config, name: str | None) -> Iterator[tuple[bool | None, str]]:
    first = config.submit_as[0]
    if shutil.which(first) is None:
        yield False, f"{first}, the first word of submit_as, is not a command here."
        return
    program = SUBMIT[config.scheduler.kind]
    yield from _as_others(config, name, program, "submit")
    slurm = config.scheduler.slurm
    if config.scheduler.kind == "slurm" and slurm.lease_shape == "block":
        yield from _as_others(config, name, "scontrol", "give back single nodes of a block")
    yield from gate(config, name)


def _as_others(
    config: Config, name: str | None, program: str, what: str
) -> Iterator[tuple[bool | None, str]]:
    """Check whether submit_as (such as sudo) allows this program to run as ``name``."""
    command = shutil.which(program, path=_path(config))
    if name is None or command is None:
        trial = f"{' '.join(config.submit_as)} {command or program} --version"
        yield (
            None,
            f"Whether the daemon may {what} as others was not tried, as "
            + ("no user is listed; name one with --user" if command else f"{program} is not here")
            + f", or try: {trial}",
        )
        return
    argv = [*(word.replace("{owner}", name) for word in config.submit_as), command, "--version"]
    try:
        process = subprocess.run(
            argv, capture_output=True, text=True, timeout=TRY_S, stdin=subprocess.DEVNULL
        )
        why = " ".join((process.stderr or process.stdout).split()) if process.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        why = str(error)
    if why:
        hint = "Allow it (for sudo: a line in sudoers), or change submit_as."
        yield False, f"The daemon's user may not {what} as {name}: {why.rstrip('.')}. {hint}"
    else:
        yield True, f"The daemon's user may {what} as {name}."


def _path(config: Config) -> str | None:
    """Return the search path of the main scheduler's commands; None: ``PATH``."""
    if config.scheduler.kind != "pbs":
        return None
    from scavenger.pbs.source import asking_environment

    return asking_environment()["PATH"]


def _closed(path: Path) -> Path | None:
    """Return the first directory on the path ``path`` that not every user may enter."""
    return next(
        (p for p in reversed([path, *path.parents]) if p.is_dir() and not p.stat().st_mode & 0o001),
        None,
    )
