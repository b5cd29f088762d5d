"""Which snapshot in the nodes' memory is the newest of which everything is there, and who gets it
from whom.
"""

from hypothesis import given
from hypothesis import strategies as st

from malletrain.training.memory_tier import (
    NodeOffer,
    NodeSnapshot,
    SnapshotTime,
    age_of,
    newest,
    relays,
    superseded,
)

OLD, NEW = SnapshotTime(1, 4, 1000, 0), SnapshotTime(1, 6, 900, 0)


def snapshot(moment, files="", needed=""):
    return NodeSnapshot(moment, frozenset(files), frozenset(needed), 10)


def test_the_newest_that_is_complete_wins():
    parts = [
        NodeOffer("a", (snapshot(OLD, "12", "123"), snapshot(NEW, "1", "123"))),
        NodeOffer("b", (snapshot(OLD, "23", "123"), snapshot(NEW, "2", "123"))),
    ]
    choice = newest(parts)
    assert (choice.moment, choice.holders) == (OLD, ("a", "b"))
    assert choice.files == {"1": "a", "2": "a", "3": "b"}
    parts.append(NodeOffer("c", (snapshot(NEW, "3", "123"),)))
    assert newest(parts).moment == NEW
    assert newest([]) is None
    assert newest([NodeOffer("")]) is None


def test_a_later_round_comes_before_more_steps_of_an_earlier_one():
    away, since = SnapshotTime(3, 40, 1, 0), SnapshotTime(4, 30, 2, 0)
    assert (
        newest([NodeOffer("a", (snapshot(away),)), NodeOffer("b", (snapshot(since),))]).moment
        == since
    )


def test_of_what_ranks_saved_at_one_step_the_first_ranks_is_taken():
    first, second = SnapshotTime(3, 40, 5, 0), SnapshotTime(3, 40, 9, 1)
    offers = [NodeOffer("b", (snapshot(second),)), NodeOffer("a", (snapshot(first),))]
    assert newest(offers).moment == first
    assert superseded([first, second, OLD], first) == [second, OLD]


def test_a_moment_has_a_name():
    assert SnapshotTime.parse(str(NEW)) == NEW
    assert [SnapshotTime.parse(text) for text in ("", "1-2-3", "1-2-3-x", "a-b-c-d")] == [None] * 4
    assert age_of({"generation": 3, "steps": 5}) == (3, 5)
    assert age_of({}) == (0, 0)


@given(st.sets(st.integers(0, 40), min_size=1), st.sets(st.integers(0, 40)))
def test_everybody_gets_it_in_as_few_turns_as_can_be(holders, wanting):
    have = set(map(str, holders))
    turns = relays(map(str, sorted(holders)), map(str, sorted(wanting)))
    begun = len(have)
    for turn in turns:
        assert set(turn.values()) <= have
        assert len(set(turn.values())) == len(turn)
        assert not set(turn) & have
        have |= set(turn)
    assert have == set(map(str, holders | wanting))
    fewest = 0
    while begun < len(have):
        begun, fewest = 2 * begun, fewest + 1
    assert len(turns) == fewest
