"""Submitting leases at the site's pace and cancelling them, and what the complaints of the commands
mean. For every batch scheduler.

Decides whether a submission that failed may have made a job all the same. Which leases are asked
for or cancelled is decided in :mod:`scavenger.batch`; what the commands say stands in a
:class:`Dialect` of each scheduler.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from scavenger.batch.calls import sign_in
from scavenger.batch.commands import CommandError, Commands, failure, refusal
from scavenger.batch.lease_script import Part, owner_prefix
from scavenger.batch.pace import TokenBucket
from scavenger.batch.side_by_side import side_by_side
from scavenger.interface import SchedulerError


class UnsureError(SchedulerError):
    """The submission failed, and its job may be there or not."""


class RefusedError(SchedulerError):
    """The main scheduler does not take this job."""


class LimitReachedError(RefusedError):
    """The main scheduler takes no more jobs of this user for now."""


class NotYetError(SchedulerError):
    """The site's pace allows no submission just now; nothing was asked."""


class BusyError(SchedulerError):
    """The main scheduler takes no job at all for now; it has too much to do."""


@dataclass(frozen=True)
class LeaseSpec:
    """One lease to be asked for. ``name``: of its job. ``output``: where what it prints is kept;
    None: nowhere. ``keep_at_home``: it is kept in the owner's home directory. ``lease``: its id;
    ``owner``: whom it is asked for as, None: this process's user.
    """

    name: str
    node: str
    argv: Sequence[str]
    env: Mapping[str, str]
    limit_s: float
    grace_s: float
    output: Path | None
    keep_at_home: bool = False
    lease: str = ""
    owner: str | None = None

    @property
    def part(self) -> Part:
        """What it runs in a job that it shares with others."""
        return Part(self.node, self.argv, self.env, self.output, self.keep_at_home)


@dataclass(frozen=True)
class Dialect:
    """The words of one batch scheduler. ``job_id`` reads what a submission printed. Complaints, as
    patterns: ``limit_reached`` of jobs, ``unsure`` after which the job may be there or not,
    ``ended`` about a job that need not be cancelled any more. ``cancel``: the command that ends
    jobs, ``at_once`` of them at most.
    """

    job_id: Callable[[str], str]
    limit_reached: re.Pattern[str]
    unsure: re.Pattern[str]
    ended: re.Pattern[str]
    cancel: str
    at_once: int
    kill: tuple[str, ...] = ()
    """The command that kills what runs of suspended jobs; empty: to cancel them is enough."""
    shrink: Callable[[Shrink], Sequence[str]] | None = None
    """The command that takes nodes from a running job."""


class Shrink(NamedTuple):
    """A job that is to give back some of its nodes."""

    job: str
    user: str
    remaining: tuple[str, ...]
    """Nodes that it keeps."""
    released: tuple[str, ...]
    """Nodes that it gives back."""


class Cancelled(NamedTuple):
    """What came of cancelling jobs."""

    accepted: frozenset[str]
    """Ids of the jobs that will end, as far as the scheduler says."""
    problem: CommandError | None
    """What went wrong; jobs that have ended are no error."""


class OwnedJob(Protocol):
    """What is needed of a job to cancel it."""

    @property
    def id(self) -> str: ...
    @property
    def user(self) -> str: ...


class Submitter:
    """Submits and cancels jobs. ``submit_as``: command put before for another owner; ``user``: this
    process's; ``environment``: that of submissions. Safe to use from threads.
    """

    def __init__(
        self,
        dialect: Dialect,
        submit_as: Sequence[str],
        user: str,
        pace: TokenBucket,
        commands: Commands,
        environment: Mapping[str, str],
    ) -> None:
        self.dialect = dialect
        self.submit_as = submit_as
        self.user = user
        self.commands = commands
        self.environment = environment
        self.pace = pace

    def submit(self, argv: Sequence[str], script: bytes, owner: str | None) -> str:
        """The id of the new job. Raises RefusedError, LimitReachedError, BusyError or UnsureError
        with the scheduler's words, NotYetError at once where the pace allows none now.
        """
        if not self.pace.take():
            raise NotYetError(f"submit_rate allows {self.pace.rate:g} submissions a second")
        try:
            result = self.commands.run(
                self._as(owner, argv), stdin=script, environment=self.environment
            )
            if result.status == 0:
                return self.dialect.job_id(result.stdout)
        except SchedulerError as error:
            raise UnsureError(str(error)) from None
        sentence = refusal(result)
        if sign_in(result.stderr):
            raise BusyError(sentence)
        if self.dialect.limit_reached.search(result.complaint):
            raise LimitReachedError(sentence)
        if self.dialect.unsure.search(result.complaint):
            raise UnsureError(sentence)
        raise RefusedError(sentence)

    def cancel(self, jobs: Sequence[OwnedJob], options: Sequence[str] = ()) -> Cancelled:
        """End jobs: as many of an owner at once as the command takes, and some commands at a time.

        Args:
            jobs: those to end.
            options: of the command; with some of them jobs are only sent a signal.
        """
        return self._on([self.dialect.cancel, *options], jobs)

    def kill(self, jobs: Sequence[OwnedJob]) -> Cancelled:
        """Kill what runs of jobs that cannot hear a signal to end."""
        return self._on(self.dialect.kill, jobs if self.dialect.kill else ())

    def shrink(self, request: Shrink) -> CommandError | None:
        """Take nodes from a running job. Returns what went wrong."""
        assert self.dialect.shrink is not None, "only where jobs of several nodes are asked for"
        try:
            result = self.commands.run(self._as(self._owner(request), self.dialect.shrink(request)))
        except CommandError as error:
            return error
        return failure(result) if result.status != 0 else None

    def _owner(self, job: OwnedJob | Shrink) -> str | None:
        return job.user if self.submit_as and job.user != self.user else None

    def _on(self, command: Sequence[str], jobs: Sequence[OwnedJob]) -> Cancelled:
        by_owner: dict[str | None, list[str]] = {}
        for job in jobs:
            ids_of_owner = by_owner.setdefault(self._owner(job), [])
            if job.id not in ids_of_owner:
                ids_of_owner.append(job.id)
        packs = [
            (owner, ids[begin : begin + self.dialect.at_once])
            for owner, ids in by_owner.items()
            for begin in range(0, len(ids), self.dialect.at_once)
        ]
        accepted: set[str] = set()
        problem = None
        for job_ids, trouble in side_by_side(lambda pack: self._one_pack(command, *pack), packs):
            accepted |= job_ids
            problem = trouble or problem
        return Cancelled(frozenset(accepted), problem)

    def _one_pack(
        self, command: Sequence[str], owner: str | None, ids: Sequence[str]
    ) -> tuple[set[str], CommandError | None]:
        """The jobs of one owner for whom one command was accepted, and what went wrong."""
        self.pace.spend(len(ids))
        try:
            result = self.commands.run(self._as(owner, [*command, *ids]))
        except CommandError as error:
            return set(), error
        # One line for each job: that one of them has ended says nothing of the others.
        lines = [line for line in result.stderr.splitlines() if line.strip()]
        named = {id: [line for line in lines if _names(line, id)] for id in ids}
        refused = [line for line in lines if not self.dialect.ended.search(line)]
        problem = failure(result) if result.status != 0 and (refused or not lines) else None
        clear = lines and all(any(_names(line, id) for id in ids) for line in lines)
        if result.status == 0 or clear:
            return {id for id, complaints in named.items() if not complaints}, problem
        return set(), problem

    def _as(self, owner: str | None, argv: Sequence[str]) -> list[str]:
        """The command as ``owner``, then by its full path: sudo looks for commands in a PATH of its
        own.
        """
        prefix = owner_prefix(self.submit_as, owner)
        path = shutil.which(argv[0], path=self.environment.get("PATH")) if prefix else None
        return [*prefix, path or argv[0], *argv[1:]]


def printed_id(printed: str, forms: Sequence[re.Pattern[str]], command: str) -> str:
    """The job id among the lines that a submission printed: hooks, filters and wrappers of a site
    print lines of their own before it and behind it.

    Args:
        printed: what the command printed.
        forms: of a whole line with the id as group 1; the first form that any line has counts.
        command: for the message.

    Raises:
        SchedulerError: no line is an id, or there are several.
    """
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    for form in forms:
        ids = {match[1] for line in lines if (match := form.fullmatch(line))}
        if len(ids) == 1:
            return ids.pop()
        if ids:
            raise SchedulerError(
                f"{command} answered with {len(ids)} lines that may be a job id "
                f"({', '.join(sorted(ids)[:3])}); a wrapper or hook of the site prints numbers of "
                "its own."
            )
    last = lines[-1] if lines else ""
    raise SchedulerError(f'{command} answered "{last[:80]}", which is no job id.')


def _names(line: str, job_id: str) -> bool:
    """Whether a complaint is about this job."""
    return re.search(rf"(?<![\w.]){re.escape(job_id)}(?!\w)", line) is not None
