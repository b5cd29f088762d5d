"""Submits leases at the site's rate, cancels them, and interprets the error messages of the
commands. For all batch schedulers.

Decides whether a failed submission may have created a job anyway. :mod:`scavenger.batch` decides
which leases are requested or cancelled. A :class:`Dialect` per scheduler holds the patterns of its
messages.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from scavenger.batch.calls import sign_in
from scavenger.batch.commands import CommandError, Commands, failure, refusal, side_by_side
from scavenger.batch.lease_script import Part, owner_prefix
from scavenger.batch.slots import SlotKind
from scavenger.interface import SchedulerError, host_of
from scavenger.token_bucket import TokenBucket


class UnsureError(SchedulerError):
    """The submission failed, and its job may or may not exist."""


class RefusedError(SchedulerError):
    """The main scheduler refuses this job."""


class LimitReachedError(RefusedError):
    """The main scheduler accepts no more jobs of this user for now."""


class NotYetError(SchedulerError):
    """The site's submission rate allows no submission now. No command was run."""


class BusyError(SchedulerError):
    """The main scheduler accepts no jobs for now, because it is overloaded."""


@dataclass(frozen=True)
class LeaseSpec:
    """One lease to be requested."""

    name: str
    """Name of its job."""
    node: str
    """Node or slot on which it runs."""
    argv: Sequence[str]
    """Command of the agent."""
    env: Mapping[str, str]
    """Environment variables to add."""
    limit_s: float
    """Time limit, seconds."""
    grace_s: float
    """Grace time, seconds."""
    output: Path | None
    """File for its output; None: it is discarded."""
    keep_at_home: bool = False
    """Whether its output is stored in the owner's home directory."""
    lease: str = ""
    """Its id."""
    owner: str | None = None
    """User to submit as, None: this process's user."""
    slot: SlotKind | None = None
    """Kind of its slot; None: it has the whole node."""

    @property
    def host(self) -> str:
        """The host on which it runs, as the main scheduler names it."""
        return host_of(self.node)

    @property
    def has_whole_host(self) -> bool:
        """Whether its job has the whole host and runs the leases of all slots of this kind."""
        return self.slot is not None and self.slot.whole_host

    @property
    def part(self) -> Part:
        """The command that it runs in a job that it shares with others."""
        return Part(self.node, self.argv, self.env, self.output, self.keep_at_home)


@dataclass(frozen=True)
class Dialect:
    """The commands and messages of one batch scheduler."""

    job_id: Callable[[str], str]
    """Returns the job id in the output of a submission."""
    limit_reached: re.Pattern[str]
    """Error messages: the job limit is reached."""
    unsure: re.Pattern[str]
    """Error messages after which the job may or may not exist."""
    ended: re.Pattern[str]
    """Error messages: the job has ended and need not be cancelled."""
    cancel: str
    """The command that ends jobs."""
    at_once: int
    """Maximum number of job ids in one such command."""
    kill: tuple[str, ...] = ()
    """The command that kills the processes of suspended jobs; empty if cancelling them is
    sufficient.
    """
    shrink: Callable[[Shrink], Sequence[str]] | None = None
    """Returns the command that removes nodes from a running job; None if it cannot be done."""


class Shrink(NamedTuple):
    """A request that a job releases some of its nodes."""

    job: str
    """The main scheduler's id of the job."""
    user: str
    """User of the job."""
    remaining: tuple[str, ...]
    """Nodes that the job keeps."""
    released: tuple[str, ...]
    """Nodes that the job releases."""


class Cancelled(NamedTuple):
    """The result of cancelling jobs."""

    accepted: frozenset[str]
    """Ids of the jobs whose cancel the scheduler accepted."""
    problem: CommandError | None
    """The error, None if there is none. Jobs that have already ended cause no error."""


class OwnedJob(Protocol):
    """The attributes of a job that are needed to cancel it."""

    @property
    def id(self) -> str: ...
    @property
    def user(self) -> str: ...


class Submitter:
    """Submits and cancels jobs. Safe to use from several threads.

    Args:
        dialect: interprets the output of the commands.
        submit_as: command prefix for another owner.
        user: this process's user.
        pace: limits the rate of submissions.
        commands: runs the commands.
        environment: environment of submissions.
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
        """Submit a job and return its id.

        Args:
            argv: the submission command.
            script: its input, the batch script.
            owner: user to submit as; None: this process's user.

        Raises:
            NotYetError: the submission rate allows none now; raised at once.
            RefusedError, LimitReachedError, BusyError, UnsureError: with the scheduler's message.
        """
        if not self.pace.take():
            raise NotYetError(f"submit_rate allows {self.pace.rate:g} submissions a second")
        try:
            result = self.commands.run(
                self._command_as(owner, argv), stdin=script, environment=self.environment
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
        """End jobs. One command ends as many jobs of an owner as it accepts; several commands run
        in parallel.

        Args:
            jobs: the jobs to end.
            options: options of the command. With some options the jobs only receive a signal.
        """
        return self._run_for([self.dialect.cancel, *options], jobs)

    def kill(self, jobs: Sequence[OwnedJob]) -> Cancelled:
        """Kill the processes of jobs that cannot receive a signal to end."""
        return self._run_for(self.dialect.kill, jobs if self.dialect.kill else ())

    def shrink(self, request: Shrink) -> CommandError | None:
        """Remove nodes from a running job. Return the error, None if there is none."""
        assert self.dialect.shrink is not None, "only for jobs of several nodes"
        try:
            result = self.commands.run(
                self._command_as(self._owner(request), self.dialect.shrink(request))
            )
        except CommandError as error:
            return error
        return failure(result) if result.status != 0 else None

    def _owner(self, job: OwnedJob | Shrink) -> str | None:
        return job.user if self.submit_as and job.user != self.user else None

    def _run_for(self, command: Sequence[str], jobs: Sequence[OwnedJob]) -> Cancelled:
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
        for job_ids, trouble in side_by_side(
            lambda pack: self._run_for_pack(command, *pack), packs
        ):
            accepted |= job_ids
            problem = trouble or problem
        return Cancelled(frozenset(accepted), problem)

    def _run_for_pack(
        self, command: Sequence[str], owner: str | None, ids: Sequence[str]
    ) -> tuple[set[str], CommandError | None]:
        """Run one command for jobs of one owner. Return the ids of the jobs for which it was
        accepted, and the error.
        """
        self.pace.spend(len(ids))
        try:
            result = self.commands.run(self._command_as(owner, [*command, *ids]))
        except CommandError as error:
            return set(), error
        # One line per job: a job that has already ended does not affect the others.
        lines = [line for line in result.stderr.splitlines() if line.strip()]
        named = {id: [line for line in lines if _names(line, id)] for id in ids}
        refused = [line for line in lines if not self.dialect.ended.search(line)]
        problem = failure(result) if result.status != 0 and (refused or not lines) else None
        clear = lines and all(any(_names(line, id) for id in ids) for line in lines)
        if result.status == 0 or clear:
            return {id for id, complaints in named.items() if not complaints}, problem
        return set(), problem

    def _command_as(self, owner: str | None, argv: Sequence[str]) -> list[str]:
        """Return the command to run as ``owner``, with its full path, because sudo uses its own
        PATH.
        """
        prefix = owner_prefix(self.submit_as, owner)
        path = shutil.which(argv[0], path=self.environment.get("PATH")) if prefix else None
        return [*prefix, path or argv[0], *argv[1:]]


def printed_id(printed: str, forms: Sequence[re.Pattern[str]], command: str) -> str:
    """Return the job id in the output of a submission. Hooks, filters and wrappers of a site can
    print lines before and after it.

    Args:
        printed: output of the command.
        forms: patterns of a whole line with the id as group 1. The first pattern that matches any
            line is used.
        command: name of the command, for the error message.

    Raises:
        SchedulerError: no line is an id, or several are.
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
    """Return whether an error message is about this job."""
    return re.search(rf"(?<![\w.]){re.escape(job_id)}(?!\w)", line) is not None
