"""One lease as a PBS job: what it asks for, and the words of ``qsub`` and ``qdel``.

A lease is one host with everything the host has, pinned by name. What it runs stands in its script
(:mod:`scavenger.batch.lease_script`), which qsub reads from its standard input; nothing of it
passes through an option or a variable of qsub. Decides how a lease is asked for, not when or where.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from scavenger.batch.settings import BatchSettings
from scavenger.batch.submission import Dialect, printed_id
from scavenger.interface import SchedulerError
from scavenger.pbs.json_text import number_of
from scavenger.pbs.state import Host

MAX_NAME = 230
"""Longest name of a job in the oldest PBS supported (pbs_ifl.h, PBS_MAXJOBNAME)."""
PLAIN_SHELL = "/bin/sh"
_SIZE = re.compile(r"(\d+)([kmgtp]?)([bw]?)", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}
_JOB_ID = (re.compile(r"(\d+(?:\[\d*\])?\.\S+)"), re.compile(r"(\d+(?:\[\d*\])?)"))
_WORD = re.compile(r"[^\s:+,=()\"']+")


@dataclass(frozen=True)
class PbsLeaseOptions:
    """How the site wants its lease jobs.

    Accounts and the like that are empty are left to PBS.
    """

    queue: str = ""
    account: str = ""
    project: str = ""
    resources: tuple[str, ...] = ("ncpus", "ngpus", "mem")
    """What of its node a lease asks for in full."""
    select: str = ""
    """Further resources of its chunk, such as ``system=polaris``."""
    place: str = "pack:exclhost"
    """How the node is shared."""
    options: tuple[str, ...] = ()
    """Further words of qsub."""
    rerunnable: Literal["auto", "yes", "no"] = "auto"
    """auto: what the scheduler's way of preempting needs."""
    shell: str = ""
    """Program that becomes the lease's script, under this path on the nodes; empty: /bin/sh, which
    stays above it.
    """


def select_of(options: PbsLeaseOptions, host: str, vnodes: Host) -> str:
    """The chunk of a lease: the host by name, and all it has of ``options.resources``. Raises
    SchedulerError for a name that PBS could not tell from the rest of the chunk.
    """
    if not _WORD.fullmatch(host):
        raise SchedulerError(f"The name of host {host!r} cannot stand in a request to PBS")
    words = ["1", f"host={host}"]
    for name in options.resources:
        total = sum_of(name, [node.resources_available for _, node in vnodes])
        if total:
            words.append(f"{name}={total}")
    if options.select:
        words.append(options.select)
    return ":".join(words)


def sum_of(name: str, parts: Sequence[Mapping[str, Any]]) -> str:
    """The sum of a number or a size (in kb) over vnodes; empty when there is nothing of it. Of a
    vnode's memory whole megabytes count: PBS's scheduler gives out no more, and a job that asks for
    the rest too never starts (OpenPBS 23.06, node_info.cpp).
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
) -> list[str]:
    """The command that submits one lease; its script comes through standard input.

    ``-f``: qsub leaves no process behind. ``-R``: PBS copies nothing back, and so does not keep the
    node until scp has failed three times, which took 90 s (OpenPBS 23.06 on several hosts, to
    ``/dev/null`` as well); what is to be kept the script writes. ``-o``, ``-e``: should a hook take
    that away, it is thrown away. ``-m n``: no mail to anybody about leases that come and go.
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
        f"place={options.place}",
    ]
    if settings.time_min_s is not None and settings.time_min_s < limit_s:
        # A job whose walltime PBS chooses, so that it ends before the next one starts
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
    """``HH:MM:SS``."""
    whole = int(seconds)
    return f"{whole // 3600:02d}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def job_id(printed: str) -> str:
    """The job id that qsub printed (``123.server``). Raises SchedulerError."""
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
    # The server dies when qdel names a job that has ended behind one that has not (OpenPBS 23.06
    # and the newest source, pull request 2716), and every lease may end at any moment.
    at_once=1,
    # qdel sends SIGTERM, which a suspended job hears when it is resumed, and no SIGKILL after it.
    # Tried on OpenPBS 23.06: after qsig and qdel it was gone in 0.7 s, after qdel alone when the
    # job had ended for which it was suspended.
    kill=("qsig", "-s", "SIGKILL"),
)
"""What ``qsub``, ``qdel`` and ``qsig`` say."""
