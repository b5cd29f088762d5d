"""Decides whether a member of a batch should try to become its dispatcher. Pure.

Members may have different views for a while, so two may try at the same time. The link of an epoch
(:meth:`llmserve.batch_store.BatchFolder.claim`) decides between them.
"""

from __future__ import annotations

from collections.abc import Sequence

from malletrain.membership import Member

SILENCE_S = 60.0
"""Seconds after which a dispatcher that shows no progress is replaced."""


class DispatcherSilence:
    """Measures how long ago the dispatcher last made progress."""

    def __init__(self) -> None:
        self._sign: object = None
        self._changed_at = 0.0

    def silent_s(self, sign: object, now: float) -> float:
        """Return the seconds since the sign changed.

        Args:
            sign: a value that changes while the dispatcher works.
            now: seconds on the clock of this process.
        """
        if sign != self._sign:
            self._sign, self._changed_at = sign, now
        return now - self._changed_at


def should_dispatch(
    members: Sequence[Member], me: Member, owner: str, silent_s: float = 0.0
) -> bool:
    """Whether a member should begin the next epoch: the dispatcher of the newest epoch is gone, is
    leaving or makes no progress, and this member is the first of those that stay.

    Args:
        members: members in the newest view, in an order that is the same for all members.
        me: this member.
        owner: address of the dispatcher of the newest epoch; empty: there was none.
        silent_s: seconds since that dispatcher made progress.
    """
    if silent_s >= SILENCE_S:
        members = [member for member in members if member.address != owner]
    staying = [member for member in members if not member.leaving] or list(members)
    if any(member.address == owner for member in staying):
        return False
    return bool(staying) and staying[0] == me
