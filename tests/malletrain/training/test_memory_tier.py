"""Which snapshot in the nodes' memory is the newest of which everything is there, and who gets it
from whom.
"""

import base64
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from malletrain.training.memory_tier import (
    CompleteSnapshot,
    NodeOffer,
    NodeSnapshot,
    SnapshotTime,
    Survey,
    age_of,
    newest,
    relays,
    superseded,
)
from tests.pickle_names import names_in

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


OFFER = (
    "gASV6wAAAAAAAACMH21hbGxldHJhaW4udHJhaW5pbmcubWVtb3J5X3RpZXKUjAlOb2RlT2ZmZXKUk5QpgZR9lCiMB2"
    "FkZHJlc3OUjAd0Y3A6Ly9hlIwJc25hcHNob3RzlGgAjAxOb2RlU25hcHNob3SUk5QpgZR9lCiMBm1vbWVudJRoAIwM"
    "U25hcHNob3RUaW1llJOUKEsDSyhLAUsAdJSBlIwFZmlsZXOUKIwBYZSRlIwGbmVlZGVklChoEpGUjARzaXpllEsFjA"
    "VzaXplc5R9lGgSSwRzdWKFlIwHb25fZGlza5RLA0sohpSMAmlklIaUdWIu"
)
SURVEY = (
    "gASV7QAAAAAAAACMH21hbGxldHJhaW4udHJhaW5pbmcubWVtb3J5X3RpZXKUjAZTdXJ2ZXmUk5QpgZR9lCiMBm5ld2"
    "VzdJRoAIwQQ29tcGxldGVTbmFwc2hvdJSTlCmBlH2UKIwGbW9tZW50lGgAjAxTbmFwc2hvdFRpbWWUk5QoSwNLKEsB"
    "SwB0lIGUjAdob2xkZXJzlIwHdGNwOi8vYZSFlIwFZmlsZXOUfZSMAWGUaBBzjARzaXpllEsFjAVzaXplc5R9lGgUSw"
    "RzdWKMCWFkZHJlc3Nlc5RoEYwEZGlza5RLA0sohpSMB2Rpc2tfYXSUaBB1Yi4="
)
"""Pickles of the version before."""
MOMENT = SnapshotTime(3, 40, 1, 0)
FILES = frozenset({"a"})
SENT = {
    "NodeOffer": (
        NodeOffer("tcp://a", (NodeSnapshot(MOMENT, FILES, FILES, 5, {"a": 4}),), ((3, 40), "id")),
        OFFER,
    ),
    "Survey": (
        Survey(
            CompleteSnapshot(MOMENT, ("tcp://a",), {"a": "tcp://a"}, 5, {"a": 4}),
            *(("tcp://a",), (3, 40), "tcp://a"),
        ),
        SURVEY,
    ),
}


@pytest.mark.parametrize("kind", SENT)
def test_a_restore_exchanges_what_the_versions_before_do(kind):
    """After an upgrade, workers of two versions restore together, and do not know that they are:
    a class that moves leaves its name where it is.
    """
    value, recorded = SENT[kind][0], base64.b64decode(SENT[kind][1])
    assert pickle.loads(recorded) == value
    assert names_in(pickle.dumps(value)) == names_in(recorded)
