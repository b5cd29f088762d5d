"""Why workers failed: by themselves, because of the loss of a node that is not known yet, or
because the job's software is missing on their nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from malletrain.protocol.failures import by_cause, describe, secondary, unfit
from malletrain.protocol.messages import Assignment
from malletrain.protocol.phases import BROKEN, AssignmentPhase
from malletrain.rounds.actions import Action, Broke

PATIENCE_WITH_PEERS = 3.0
"""Times the grace that a failure waits when every last word speaks of a lost peer and nobody has
said yet which.
"""


LAST_RESORT_CODE = 75
"""A worker that ends with it was lost with its peers (malletrain.elastic.membership)."""


def _by_itself(assignment: Assignment) -> bool:
    """Whether the script ended by itself there. A node that is being taken kills its processes."""
    codes = [f.exitcode for f in assignment.failures]
    return any(code > 0 for code in codes) and all(code > 0 or code == -15 for code in codes)


@dataclass
class FailureGrace:
    """The wait between a failure and its being told."""

    due: float | None = None
    """When to look again."""
    first_at: float | None = None
    """When the failure was heard of."""
    told_of: int = 0
    """The generation whose failure was told: once is enough."""
    answered: dict[str, Assignment] = field(default_factory=dict)
    """What had failed before the newest round was formed, which starts it again."""
    hung: dict[str, int] = field(default_factory=dict)
    """Members whose workers hung, and in which generation: until they have ended of it."""
    node_lost_in: int = 0
    """The newest generation that may have lost a node: its workers may start again for that."""

    def clear(self) -> None:
        """There is no failure, or it does not count."""
        self.due = self.first_at = None

    def give_up(self, members: Iterable[str], generation: int) -> None:
        """Workers that hang were told of as a failure, and are to end."""
        self.hung = dict.fromkeys(members, generation)

    def answer(self, assignments: Mapping[str, Assignment]) -> None:
        """A round was formed of nodes that have said this."""
        self.clear()
        self.answered = {node: one for node, one in assignments.items() if one.phase in BROKEN}
        self.hung = {n: number for n, number in self.hung.items() if n not in self.answered}

    def newly(self, broken: Mapping[str, Assignment]) -> dict[str, Assignment]:
        """Those of the failures that no round has answered."""
        return {node: a for node, a in broken.items() if self.answered.get(node) != a}

    def postpone(self, by_s: float) -> None:
        """Nobody could be heard for so long."""
        if self.first_at is not None:
            self.first_at += by_s
        if self.due is not None:
            self.due += by_s

    def _starts_again(self, assignment: Assignment) -> bool:
        """Whether workers ended because a node of their round was lost."""
        codes = {failure.exitcode for failure in assignment.failures}
        return assignment.generation <= self.node_lost_in and codes == {LAST_RESORT_CODE}

    def look(
        self,
        broken: dict[str, Assignment],
        news_to_come: bool,
        now: float,
        grace_s: float,
        members: int,
    ) -> Broke | None:
        """Whether the failure is the job's own.

        Args:
            broken: The members that failed, and what they said.
            news_to_come: A member cannot be reached: it may be lost.
            now: Seconds.
            grace_s: Seconds for the news of a loss to come.
            members: How many members there are. Where all of them say that their script ended by
                itself, none was lost, and there is nothing to wait for.

        Returns:
            What to tell, or None while it is too early; ``due`` says when to ask again.
        """
        if self.first_at is None:
            self.first_at, self.due = now, now + grace_s
        failures = by_cause(f for assignment in broken.values() for f in assignment.failures)
        expected = all(
            assignment.generation <= self.hung.get(n, -1) or self._starts_again(assignment)
            for n, assignment in broken.items()
        )
        clear = len(broken) == members and all(map(_by_itself, broken.values()))
        if clear and not news_to_come and not secondary(failures[0]):
            return Broke(failures, describe(failures), expected)
        if self.due is None or now < self.due:
            return None
        if news_to_come:
            self.due = now + grace_s
            return None
        patience = self.first_at + PATIENCE_WITH_PEERS * grace_s
        if failures and secondary(failures[0]) and now < patience:
            self.due = patience
            return None
        exited = all(assignment.phase is AssignmentPhase.EXITED for assignment in broken.values())
        what = "launcher ended" if exited else "workers failed"
        sentence = f"The {what} on {', '.join(broken)}."
        return Broke(failures, describe(failures) if failures else sentence, expected)


def own_fault(assignment: Assignment) -> list[Action]:
    """What is told of workers that failed while others go on: nothing, unless a script failed by
    itself, which uses up one of the job's tries each time.
    """
    failures = by_cause(
        f
        for f in assignment.failures
        if f.exitcode > 0 and f.exitcode != LAST_RESORT_CODE and not secondary(f)
    )
    return [Broke(failures, describe(failures))] if failures else []


def launchers_ended(ended: dict[str, Assignment]) -> tuple[Broke, bool]:
    """What it means that launchers ended at once and none came up.

    Args:
        ended: The nodes, and what they said.

    Returns:
        What to tell, and whether it was for want of the job's software on all of them, which is
        the nodes' fault unless it is so everywhere.
    """
    failures = by_cause(f for assignment in ended.values() for f in assignment.failures)
    sentence = f"The launcher ended at once on {', '.join(ended)}."
    broke = Broke(failures, describe(failures) if failures else sentence)
    return broke, all(unfit(assignment) for assignment in ended.values())
