"""One lease as a PBS job: the requested resources, and the arguments of ``qsub`` and ``qdel``.

A lease requests one host by name with all its resources. Its command is in its script
(:mod:`scavenger.batch.lease_script`), which qsub reads from its standard input. No part of it
passes through an option or a variable of qsub. Decides how a lease is requested, not when or where.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from scavenger.batch.settings import BatchSettings
from scavenger.batch.submission import Dialect, printed_id
from scavenger.interface import SchedulerError
from scavenger.pbs.parse import number_of
from scavenger.pbs.state import HostVnodes

MAX_NAME = 230
"""Maximum length of a job name in the oldest supported PBS (pbs_ifl.h, PBS_MAXJOBNAME)."""
PLAIN_SHELL = "/bin/sh"
SHARED_PLACE = "free:shared"
"""Placement of a slot: beside other jobs, also where vnodes are exclusive by default."""
_SIZE = re.compile(r"(\d+)([kmgtp]?)([bw]?)", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}
_JOB_ID = (re.compile(r"(\d+(?:\[\d*\])?\.\S+)"), re.compile(r"(\d+(?:\[\d*\])?)"))
_WORD = re.compile(r"[^\s:+,=()\"']+")


@dataclass(frozen=True)
class PbsLeaseOptions:
    """The site's settings for lease jobs.

    Settings that are empty, such as the account, are left to PBS.
    """

    queue: str = ""
    """Queue of the leases; empty: the default queue."""
    account: str = ""
    """``-A`` of qsub."""
    project: str = ""
    """``-P`` of qsub."""
    resources: tuple[str, ...] = ("ncpus", "ngpus", "mem")
    """Resources of its node that a lease requests in full."""
    select: str = ""
    """Further resources of its chunk, such as ``system=polaris``."""
    place: str = "pack:exclhost"
    """How the node is shared (``place`` of qsub)."""
    options: tuple[str, ...] = ()
    """Further arguments of qsub."""
    rerunnable: Literal["auto", "yes", "no"] = "auto"
    """auto: as the scheduler's preemption method requires."""
    shell: str = ""
    """Program that runs the lease's script, with this path on the nodes, and is replaced by it;
    empty: /bin/sh, which remains its parent process.
    """


def select_of(options: PbsLeaseOptions, host: str, vnodes: HostVnodes) -> str:
    """Return the chunk of a lease: the host by name, with all its ``options.resources``. Raises
    SchedulerError for a name that PBS could not distinguish from the rest of the chunk.

    Args:
        options: the site's options of lease jobs.
        host: name of the host.
        vnodes: its vnodes.
    """
    totals = [
        (name, sum_of(name, [node.resources_available for _, node in vnodes]))
        for name in options.resources
    ]
    return chunk_of(options, host, [f"{name}={total}" for name, total in totals if total])


def chunk_of(options: PbsLeaseOptions, host: str, resources: Sequence[str]) -> str:
    """Return the chunk of a lease on a host with these resources. Raises SchedulerError for a name
    that PBS could not distinguish from the rest of the chunk.

    Args:
        options: the site's options of lease jobs.
        host: name of the host.
        resources: ``name=value`` of each resource.
    """
    if not _WORD.fullmatch(host):
        raise SchedulerError(f"The name of host {host!r} cannot stand in a request to PBS")
    words = ["1", f"host={host}", *resources]
    return ":".join([*words, options.select] if options.select else words)


def sum_of(name: str, parts: Sequence[Mapping[str, Any]]) -> str:
    """Return the sum of a number or a size (in kb) over vnodes; empty if they have none. Only whole
    megabytes of a vnode's memory count: PBS's scheduler assigns no more, so a job that requests the
    remainder would never start (OpenPBS 23.06, node_info.cpp).
    """
    numbers, kilobytes = 0.0, 0
    for has in parts:
        value = has.get(name)
        if isinstance(value, str) and (match := _SIZE.fullmatch(value)) and (match[2] or match[3]):
            words = 8 if match[3].lower() == "w" else 1
            size = int(match[1]) * words * 1024 ** _POWERS[match[2].lower()] // 1024
            kilobytes += size - size % 1024 if name == "mem" else size
        elif value is not None:
            numbers += number_of(value)
    if kilobytes:
        return f"{kilobytes}kb"
    return f"{numbers:.0f}" if numbers >= 1 else ""


def qsub(
    settings: BatchSettings[PbsLeaseOptions],
    *,
    name: str,
    select: str,
    limit_s: float,
    rerunnable: bool,
    place: str = "",
) -> list[str]:
    """Return the command that submits one lease. Its script is read from standard input.

    ``-f``: qsub leaves no process behind. ``-R``: PBS copies no output back. Otherwise it keeps the
    node until scp has failed three times, which took 90 s (OpenPBS 23.06 on several hosts, to
    ``/dev/null`` as well). The script itself writes the output that is to be kept. ``-o``, ``-e``:
    discard the output if a hook removes ``-R``. ``-m n``: no mail about leases.

    Args:
        settings: settings of the site.
        name: name of the job.
        select: its ``select`` statement.
        limit_s: time limit, seconds.
        rerunnable: whether PBS may run it again.
        place: placement of the job; empty: that of the site's options.
    """
    options = settings.lease
    words = [
        "qsub",
        "-f",
        "-N",
        name[:MAX_NAME],
        "-r",
        "y" if rerunnable else "n",
        "-m",
        "n",
        "-j",
        "oe",
        "-o",
        "/dev/null",
        "-e",
        "/dev/null",
        "-R",
        "oe",
        "-S",
        options.shell or PLAIN_SHELL,
        "-l",
        f"select={select}",
        "-l",
        f"place={place or options.place}",
    ]
    if settings.time_min_s is not None and settings.time_min_s < limit_s:
        # PBS chooses the walltime, so that the job ends before the next one starts
        # ("shrink-to-fit", PBS 11.3 and later).
        words += [
            "-l",
            f"min_walltime={walltime(settings.time_min_s)}",
            "-l",
            f"max_walltime={walltime(limit_s)}",
        ]
    else:
        words += ["-l", f"walltime={walltime(limit_s)}"]
    for option, value in (("-q", options.queue), ("-A", options.account), ("-P", options.project)):
        if value:
            words += [option, value]
    return words + list(options.options)


def walltime(seconds: float) -> str:
    """Return ``HH:MM:SS``."""
    whole = int(seconds)
    return f"{whole // 3600:02d}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def job_id(printed: str) -> str:
    """Return the job id in the output of qsub (``123.server``). Raises SchedulerError."""
    return printed_id(printed, _JOB_ID, "qsub")


PBS = Dialect(
    job_id=job_id,
    limit_reached=re.compile(
        r"(?i)would exceed|maximum number of jobs|limit on "
        r"(?:number|jobs)|max_(?:queued|run)|too many jobs"
    ),
    unsure=re.compile(
        r"(?i)timed? ?out|end of file|communication|connection "
        r"(?:reset|closed|broken)|protocol|no reply|premature"
    ),
    ended=re.compile(
        r"(?i)unknown job|has finished|job is (?:already )?exiting|invalid for (?:finished|state)"
    ),
    cancel="qdel",
    # The server crashes if qdel names a job that has ended after one that has not (OpenPBS 23.06
    # and the newest source, pull request 2716), and any lease can end at any time.
    at_once=1,
    # qdel sends SIGTERM, which a suspended job receives only when it is resumed, and no SIGKILL
    # after it. Tried on OpenPBS 23.06: after qsig and qdel the job ended in 0.7 s, after qdel alone
    # only when the job ended for which it was suspended.
    kill=("qsig", "-s", "SIGKILL"),
)
"""The commands and messages of PBS."""
