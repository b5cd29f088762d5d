"""Which member of a batch dispatches. Pure.

Members may have different views for a while, and two may want to at the same time. The link of an
epoch decides between them; here is only said who tries.
"""

from __future__ import annotations

from collections.abc import Sequence

from malletrain.membership import Member


def should_dispatch(members: Sequence[Member], me: Member, owner: str) -> bool:
    """Whether a member should begin the next epoch: the dispatcher of the newest one is gone or
    leaves, and this member is the first of those that stay.

    Args:
        members: of the newest view, in the order that all see.
        me: this one.
        owner: address of the dispatcher of the newest epoch; empty: there was none.
    """
    staying = [member for member in members if not member.leaving] or list(members)
    if any(member.address == owner for member in staying):
        return False
    return bool(staying) and staying[0] == me
