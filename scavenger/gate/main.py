"""``malletrain-lease``, the gate itself: reads the rules, checks a command, runs it.

  malletrain-lease [--try] COMMAND ARGUMENT...

With ``--try`` nothing is run: it only reports whether the command would be accepted. Decides what
must be known about a job before it is ended: that its name is that of a lease, or that it is the
user's and a job_submit plugin of Slurm can have made its name of a lease's. No shell is involved.
The commands are run by their full paths with a newly built environment.
"""

from __future__ import annotations

import os
import pwd
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from scavenger.gate.rules import (
    KINDS,
    GateClosed,
    GatedCommand,
    GateRules,
    check_script,
    gated,
    read_rules,
)
from scavenger.interface import SchedulerError
from scavenger.pbs.job import PBS
from scavenger.pbs.parse import DSV_MARK, number_in, read_ended
from scavenger.slurm.job import SLURM

TRY = "--try"
RULES = Path("/etc/malletrain-lease.conf")
MAX_SCRIPT_BYTES = 4 * 1024 * 1024
EXIT_REFUSED = 77
"""Exit status if a command is not accepted (EX_NOPERM of sysexits.h)."""
QUERY_TIMEOUT_S = 15.0
"""Time limit of the scheduler's answer about job names, seconds."""


_LEASE_NAME = re.compile(
    r"(?<![A-Za-z0-9])malletrain-[A-Za-z0-9]+-[A-Za-z]+\d+(?:[-+]\d+)*(?![A-Za-z0-9+])"
)
"""The whole name of a lease within the one that a job_submit plugin has made of it."""
_NUMBER = re.compile(r"\s(\d+(?:\[\d*\])?)(?:\.|\s)")
"""The id of the job in an error message of PBS."""


def main(arguments: Sequence[str], path: Path = RULES, owner: int = 0) -> int:
    """Run a command, in place of this process. Return if the command is not accepted, is only
    tried, or is run for each of several jobs.

    Args:
        arguments: the command and its arguments.
        path: the rules.
        owner: uid that may write them, besides root.
    """
    words = list(arguments)
    trial = words[:1] == [TRY]
    try:
        rules = read_rules(path, owner)
        environment = environment_of(rules)
        command = gated(words[1:] if trial else words, rules)
        script = b""
        if command.submits:
            script = sys.stdin.buffer.read(MAX_SCRIPT_BYTES + 1)
            if len(script) > MAX_SCRIPT_BYTES:
                raise GateClosed(f"The batch script has more than {MAX_SCRIPT_BYTES:,} bytes.")
            check_script(script, rules)
        if trial:
            return 0
        if command.jobs:
            check_jobs(command, rules, environment)
        if rules.kind == "pbs" and len(command.jobs) > 1:
            return _run_each(command, environment)
        if command.submits and "LC_ALL" not in rules.environment:
            # The lease inherits it, and it would override the LANG of a job and of its node.
            del environment["LC_ALL"]
        _become(command, script, environment)
    except (GateClosed, SchedulerError) as error:
        print(f"malletrain-lease: {error}", file=sys.stderr)
    except OSError as error:
        print(f"malletrain-lease: The command cannot be run: {error}.", file=sys.stderr)
    return EXIT_REFUSED


def environment_of(rules: GateRules) -> dict[str, str]:
    """Return the environment of the commands, which contains nothing of this process's environment.
    Raises GateClosed for a user who may not have leases.
    """
    uid = os.getuid()
    if uid != os.geteuid():
        raise GateClosed("This program is for sudo, and must not be set-user-id.")
    if uid < rules.least_uid:
        raise GateClosed(f"User {uid} has no leases; least_uid of the rules is {rules.least_uid}.")
    try:
        account = pwd.getpwuid(uid)
    except KeyError:
        raise GateClosed(f"User {uid} has no account here.") from None
    return {
        "PATH": "/usr/bin:/bin",
        "HOME": account.pw_dir,
        "USER": account.pw_name,
        "LOGNAME": account.pw_name,
        "SHELL": "/bin/sh",
        "LC_ALL": "C",
        **rules.environment,
    }


def check_jobs(command: GatedCommand, rules: GateRules, environment: dict[str, str]) -> None:
    """Check that each of these jobs is a lease. A job that the scheduler does not know is accepted,
    because there is nothing to end. Raises GateClosed.

    Args:
        command: the command with the jobs.
        rules: the rules of the gate.
        environment: environment of the scheduler's command.
    """
    query = KINDS[rules.kind][-1]
    if query not in rules.commands:
        raise GateClosed(f"The rules name no {query}, which is asked for the names of jobs.")
    if rules.kind == "slurm":
        job_ids = sorted({job.partition(".")[0] for job in command.jobs})
        argv, ended = ["--noheader", "--format=%u|%j", f"--jobs={','.join(job_ids)}"], SLURM.ended
    else:
        # not JSON, which shows the first of several jobs only
        argv, ended = ["-f", "-F", "dsv", "-D", DSV_MARK, *command.jobs], PBS.ended
    try:
        result = subprocess.run(
            [rules.commands[query], *argv],
            env=environment,
            cwd="/",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=QUERY_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise GateClosed(f"{query} gave no answer within {QUERY_TIMEOUT_S:g} s.") from None
    stdout, stderr = (
        result.stdout.decode("utf-8", "replace"),
        result.stderr.decode("utf-8", "replace"),
    )
    lines = [line for line in stderr.splitlines() if line.strip()]
    unexpected = [line for line in lines if not ended.search(line)]
    if unexpected or (result.returncode and not lines):
        complaint = unexpected[0].strip()[:300] if unexpected else f"status {result.returncode}"
        raise GateClosed(f"{query} does not say what these jobs are: {complaint}")
    if rules.kind == "slurm":
        for line in stdout.splitlines():  # also the rest of a name that contains a line break
            user, _, name = line.partition("|")
            renamed = _LEASE_NAME.search(name)
            if not name.startswith(rules.prefix) and not (
                renamed and renamed[0].startswith(rules.prefix) and user == environment["LOGNAME"]
            ):
                raise _no_lease(name or line)
        return
    for name in _pbs_names(stdout, lines, command.jobs):
        if not name.startswith(rules.prefix):
            raise _no_lease(name)


def _no_lease(name: str) -> GateClosed:
    return GateClosed(f'"{name[:80]}" is the name of no lease: it is not ended.')


def _pbs_names(stdout: str, complaints: Sequence[str], jobs: Sequence[str]) -> list[str]:
    """Return the names of ``jobs`` that qstat shows. Raises GateClosed if it neither shows a job
    nor reports (``complaints``) that it does not exist.
    """
    records = read_ended(stdout, "").ours
    answered = {number_in(job.id) for job in records}
    answered |= {match[1] for line in complaints if (match := _NUMBER.search(line))}
    if silent := [job for job in jobs if number_in(job) not in answered]:
        raise GateClosed(f"qstat does not say what job {silent[0]} is.")
    return [job.name for job in records]


def _run_each(command: GatedCommand, environment: dict[str, str]) -> int:
    """Run the command for one job after another, because PBS's server crashes if one qdel names a
    job that has ended after one that has not. Return the first status that is not 0.
    """
    words = command.argv[: -len(command.jobs)]
    first_status = 0
    for job in command.jobs:
        result = subprocess.run(
            [*words, job], env=environment, cwd="/", stdin=subprocess.DEVNULL, umask=0o022
        )
        first_status = first_status or (
            result.returncode if result.returncode >= 0 else 128 - result.returncode
        )
    return first_status


def _become(command: GatedCommand, script: bytes, environment: dict[str, str]) -> None:
    """Run the command in this process. It reads exactly the script that was checked, because no
    other process has access to it.
    """
    source = os.memfd_create("script") if command.submits else os.open(os.devnull, os.O_RDONLY)
    if command.submits:
        with open(source, "wb", closefd=False) as file:
            file.write(script)
        os.lseek(source, 0, os.SEEK_SET)
    os.dup2(source, 0)
    os.umask(0o022)  # of the lease and its logs; a job has its owner's (malletrain.launch.entry)
    os.chdir("/")
    sys.stdout.flush()
    os.execve(command.argv[0], command.argv, environment)
