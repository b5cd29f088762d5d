"""Whether a group is left, and which ranks stay, by the later rounds that its ranks know; which
numbers the ranks of a group exchange after an upgrade.
"""

from __future__ import annotations

import dataclasses
from datetime import timedelta

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from malletrain.elastic import step_exchange
from malletrain.elastic.checkin import CheckIn
from malletrain.elastic.link import Place
from malletrain.elastic.step_exchange import (
    EXCHANGES,
    Invited,
    StepWishes,
    common_exchange,
    to_wait_for,
    who_stays,
)
from malletrain.elastic.training import Standing
from tests.waiting import PATIENCE_S


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


def test_the_first_exchange_stays_as_it_is():
    """Workers of the versions that say nothing about it send these numbers in this order."""
    assert EXCHANGES[0] == (
        ("go", "stop", "save", "hash", "step", "script"),
        ("rate", "batch_size", "changed"),
        ("has_state", "updates", "steps", "whole", "epoch_closed", "epoch_run"),
        False,
    )


def test_the_newest_exchange_sends_everything():
    """A field that is not named there would have its default on all ranks, without a word."""
    assert EXCHANGES[-1].wishes == StepWishes._fields
    assert EXCHANGES[-1].standing == tuple(f.name for f in dataclasses.fields(Standing))


@pytest.mark.parametrize(
    ("counts", "size", "expected"),
    [
        ([], 3, 0),
        ([3], 3, 1),
        ([2], 3, 0),  # one is older
        ([0], 3, 0),
        ([3, 2], 3, 1),
        ([3, 3], 3, 2),
        ([1, 1], 1, 2),
    ],
)
def test_ranks_exchange_what_all_of_them_know(counts, size, expected):
    assert common_exchange(counts, size) == expected


class _Nothing:
    """A member that has no state."""

    def for_joiners(self) -> str:
        return "[]"

    def make_room(self, data: str) -> None:
        pass


@pytest.mark.parametrize(("older", "expected"), [(False, 1), (True, 0)])
def test_members_that_check_in_agree_on_an_exchange(monkeypatch, older, expected):
    """``older``: rank 0 has the code before the versions, which counts itself in no version."""
    newer = EXCHANGES[0]._replace(compared=(*EXCHANGES[0].compared, "another"))
    monkeypatch.setattr(step_exchange, "EXCHANGES", (EXCHANGES[0], newer))
    limit = timedelta(seconds=PATIENCE_S)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=limit)
    failed: list[int] = []
    members = [
        CheckIn(Place(1, rank, 2, store.port), "", _Nothing(), lambda: failed.append(1))
        for rank in ([1] if older else [0, 1])
    ]
    if older:
        for key in ("rooms", "signature"):
            store.set(key, "")
        store.add("here/0", 1)
        if store.add("here", 1) == 2:
            store.set("all", "")
    for member in members:
        member.store(lambda: bool(failed))
    assert [member.exchange for member in members] == [expected] * len(members)
