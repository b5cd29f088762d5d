"""Whether a group is left, and which ranks stay, by the later rounds that its ranks know."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from malletrain.elastic.step_exchange import Invited, to_wait_for, who_stays


def test_who_has_no_place_or_only_that_of_an_older_round_is_a_leaver():
    """A round that comes while the group agrees to leave may not have the member that has not heard
    of it; its shards would be lost.
    """
    first, second = Invited(2, (0, 2)), Invited(2, (1, 2))
    assert who_stays([first, second, Invited()]) == {0: (0, 2), 1: (1, 2)}
    newer = [Invited(3, (0, 2)), Invited(2, (1, 3)), Invited(3, (1, 2))]
    assert who_stays(newer) == {0: (0, 2), 2: (1, 2)}
    assert who_stays([Invited(), Invited()]) is None


def test_a_round_that_came_to_nothing_is_not_waited_for():
    """A leaver was not told of its successor."""
    rows = [Invited(12, (0, 2)), Invited(11)]
    assert to_wait_for(rows) is None
    assert who_stays(rows) == {0: (0, 2)}


def test_the_group_stays_until_the_newest_round_is_complete():
    """What was agreed to go to may have been replaced since."""
    rows = [Invited(11, (0, 2)), Invited(12)]
    assert to_wait_for(rows) is None
    assert who_stays(rows) is None
    late = [Invited(12, (0, 2)), Invited(12)]
    assert to_wait_for(late) == 12
    assert who_stays([late[0], Invited(12, None, void=True)]) is None


@st.composite
def histories(draw):
    """(members of each round after that of the group, by its ranks; rounds that were complete; what
    each rank has seen of it).
    """
    size = draw(st.integers(1, 5))
    ranks = st.sets(st.integers(0, size - 1))
    rounds = draw(st.lists(ranks, max_size=4))
    complete = draw(st.sets(st.integers(1, max(1, len(rounds)))))
    saw = draw(st.lists(st.booleans(), min_size=size, max_size=size))
    return size, rounds, complete, saw


@given(histories())
def test_nobody_waits_for_what_cannot_come(history):
    """Ranks learn of the rounds that they are members of, and wait only for complete ones. They
    come to one end: all members of the newest stay if it was complete, or nobody leaves.
    """
    size, rounds, complete, saw = history

    def invitation(rank: int, awaited: int) -> Invited:
        mine = [g for g, members in enumerate(rounds, 1) if rank in members]
        if not mine:
            return Invited()
        newest = max(mine)
        if awaited == newest:
            assert newest in complete, "it would be waited for in vain"
        knows = newest in complete and (saw[rank] or awaited == newest)
        return Invited(newest, (rank, size) if knows else None)

    rows = [invitation(rank, 0) for rank in range(size)]
    waits = 0
    while (awaited := to_wait_for(rows)) is not None:
        rows = [invitation(rank, awaited) for rank in range(size)]
        waits += 1
    assert waits <= 1
    newest = max((g for g, members in enumerate(rounds, 1) if members), default=0)
    knows = any(saw[rank] for rank in rounds[newest - 1]) if newest else False
    expected = set(rounds[newest - 1]) if knows and newest in complete else None
    stayers = who_stays(rows)
    assert (None if stayers is None else set(stayers)) == expected
