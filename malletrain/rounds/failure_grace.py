"""Decides why workers failed: by themselves, because of the loss of a node that is not known yet,
or because the job's software is missing on their nodes.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from malletrain.protocol.failures import by_cause, describe, secondary, starts_again, unfit
from malletrain.protocol.messages import Assignment, Failure
from malletrain.protocol.phases import BROKEN, AssignmentPhase
from malletrain.rounds.interface import Action, Broke

LOST_PEER_GRACE_FACTOR = 3.0
"""Factor on the failure grace if the errors of all workers are of a lost peer that is not known
yet, or the launcher of that peer was killed.
"""


def _by_itself(assignment: Assignment) -> bool:
    """Return whether the script ended by itself there. On a node that is taken, its processes are
    killed.
    """
    codes = [f.exitcode for f in assignment.failures]
    return any(code > 0 for code in codes) and all(code > 0 or code == -15 for code in codes)


def _at_fault(assignments: Mapping[str, Assignment]) -> tuple[str, ...]:
    """Return the nodes on which workers of a round failed by themselves."""
    return tuple(
        node
        for node, assignment in assignments.items()
        if assignment.generation and not all(map(secondary, assignment.failures))
    )


def _may_die_with_its_node(broken: Mapping[str, Assignment], failures: Sequence[Failure]) -> bool:
    """Return whether the first cause is that a launcher was killed, and other members lost a peer.
    The agent of a node that is taken without notice can be the last of its processes to be killed.
    If the agent killed the launcher itself, there is no loss.

    Args:
        broken: The members that failed, with their reports.
        failures: Their failures, first causes first.
    """
    if not failures or failures[0].exitcode != -signal.SIGKILL or failures[0].by_agent:
        return False
    killed = {
        node
        for node, assignment in broken.items()
        if assignment.phase is AssignmentPhase.EXITED and failures[0] in assignment.failures
    }
    others = (f for node, a in broken.items() if node not in killed for f in a.failures)
    return bool(killed) and any(map(secondary, others))


@dataclass
class FailureGrace:
    """Holds a failure back until it is known whether it is the job's own."""

    due: float | None = None
    """Time of the next check; None if there is no failure."""
    first_at: float | None = None
    """Time of the first report of the failure."""
    told_of: int = 0
    """Generation whose failure has been reported, so that it is reported once."""
    answered: dict[str, Assignment] = field(default_factory=dict)
    """Failures from before the newest round, which restarts these workers."""
    hung: dict[str, int] = field(default_factory=dict)
    """Members whose workers hung → their generation, until they have ended."""
    node_lost_in: int = 0
    """Newest generation that may have lost a node, for which its workers may restart."""

    def clear(self) -> None:
        """Drop the failure, because there is none or it does not count."""
        self.due = self.first_at = None

    def give_up(self, members: Iterable[str], generation: int) -> None:
        """Note that hanging workers were reported as a failure, so their end is expected."""
        self.hung = dict.fromkeys(members, generation)

    def answer(self, assignments: Mapping[str, Assignment]) -> None:
        """Note the reports of the nodes of which a round was formed."""
        self.clear()
        self.answered = {
            node: assignment
            for node, assignment in assignments.items()
            if assignment.phase in BROKEN
        }
        self.hung = {n: number for n, number in self.hung.items() if n not in self.answered}

    def newly(self, broken: Mapping[str, Assignment]) -> dict[str, Assignment]:
        """Return the failures that are newer than the newest round."""
        return {node: a for node, a in broken.items() if self.answered.get(node) != a}

    def postpone(self, by_s: float) -> None:
        """Extend the time limits by a time in which no agent could be reached."""
        if self.first_at is not None:
            self.first_at += by_s
        if self.due is not None:
            self.due += by_s

    def _restarts_after_loss(self, assignment: Assignment) -> bool:
        """Return whether workers ended because a node of their round was lost."""
        again = bool(assignment.failures) and all(map(starts_again, assignment.failures))
        return assignment.generation <= self.node_lost_in and again

    def decide(
        self,
        broken: dict[str, Assignment],
        news_to_come: bool,
        now: float,
        grace_s: float,
        members: int,
    ) -> Broke | None:
        """Decide whether the failure is the job's own.

        Args:
            broken: The members that failed, with their reports.
            news_to_come: Whether a member cannot be reached and may be lost.
            now: Time in seconds.
            grace_s: Seconds to wait for the report of a loss.
            members: Number of members. If the script ended by itself on all of them, none was lost,
                so there is no wait.

        Returns:
            The failure to report, or None while it is too early; ``due`` is the time of the next
            check.
        """
        if self.first_at is None:
            self.first_at, self.due = now, now + grace_s
        failures = by_cause(f for assignment in broken.values() for f in assignment.failures)
        expected = all(
            assignment.generation <= self.hung.get(n, -1) or self._restarts_after_loss(assignment)
            for n, assignment in broken.items()
        )
        decided = len(broken) == members and all(map(_by_itself, broken.values()))
        if decided and not news_to_come and not secondary(failures[0]):
            return Broke(failures, describe(failures), expected, _at_fault(broken))
        if self.due is None or now < self.due:
            return None
        if news_to_come:
            self.due = now + grace_s
            return None
        limit = self.first_at + LOST_PEER_GRACE_FACTOR * grace_s
        lost_peer = bool(failures) and secondary(failures[0])
        if (lost_peer or _may_die_with_its_node(broken, failures)) and now < limit:
            self.due = limit
            return None
        exited = all(assignment.phase is AssignmentPhase.EXITED for assignment in broken.values())
        subject = "launcher ended" if exited else "workers failed"
        sentence = f"The {subject} on {', '.join(broken)}."
        sentence = describe(failures) if failures else sentence
        return Broke(failures, sentence, expected, _at_fault(broken))


def own_fault(node: str, assignment: Assignment) -> list[Action]:
    """Return the report of workers that failed while others continue. It is empty unless a script
    failed by itself, which uses up one of the job's tries each time.

    Args:
        node: The node of the workers.
        assignment: Its report.
    """
    failures = by_cause(
        f
        for f in assignment.failures
        if f.exitcode > 0 and not starts_again(f) and not secondary(f)
    )
    nodes = (node,) if assignment.generation else ()
    return [Broke(failures, describe(failures), nodes=nodes)] if failures else []


def launchers_ended(ended: dict[str, Assignment]) -> tuple[Broke, bool]:
    """Return the failure to report when launchers ended at once and none started.

    Args:
        ended: The nodes, with their reports.

    Returns:
        The failure, and whether the job's software was missing on all of them. Then the nodes are
        to blame, unless it is missing everywhere.
    """
    own = {node: assignment for node, assignment in ended.items() if not unfit(assignment)}
    to_blame = own or ended
    failures = by_cause(f for assignment in to_blame.values() for f in assignment.failures)
    sentence = f"The launcher ended at once on {', '.join(to_blame)}."
    sentence = describe(failures) if failures else sentence
    broke = Broke(failures, sentence, nodes=_at_fault(to_blame))
    return broke, not own
