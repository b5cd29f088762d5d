"""The rest of an epoch, dealt out: nothing twice, nothing forgotten, whatever was done before."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from malletrain.training.epoch_plan import StreamPosition, deal


@st.composite
def positions(draw):
    shards = draw(st.integers(1, 30))
    kinds = draw(st.lists(st.integers(0, 2), min_size=shards, max_size=shards))
    done = frozenset(place for place, kind in enumerate(kinds) if kind == 0)
    begun = {p: draw(st.integers(1, 9)) for p, kind in enumerate(kinds) if kind == 1}
    return StreamPosition(shards, done, begun)


@given(position=positions(), world=st.integers(1, 6), readers=st.integers(1, 3), data=st.data())
def test_what_is_dealt_out_is_what_is_left(position, world, readers, data):
    dealt = deal(position, world, readers)
    places = [place for part in dealt.lists for place, _ in part]
    assert sorted(places) == position.remaining()
    assert all(position.begun.get(p, 0) == done for part in dealt.lists for p, done in part)
    assert dealt.shared == (len(places) < world * readers)
    assert dealt.position({}) == position
    ends = {number: (len(part), 0) for number, part in enumerate(dealt.lists)}
    assert dealt.position(ends).remaining() == []
    reader = data.draw(st.integers(0, len(dealt.lists) - 1))
    part = dealt.lists[reader]
    if part:
        index = data.draw(st.integers(0, len(part) - 1))
        after = dealt.position({reader: (index, 11)})
        assert set(after.done) == set(position.done) | {place for place, _ in part[:index]}
        assert after.begun[part[index][0]] == 11


@given(position=positions())
def test_a_position_survives_being_written(position):
    state = json.loads(json.dumps(position.state()))
    assert StreamPosition.from_state(position.shards, state) == position


def test_a_position_of_another_dataset_is_refused():
    state = StreamPosition(9, frozenset({7}), {}).state()
    with pytest.raises(ValueError, match="beyond the 3 of this stream"):
        StreamPosition.from_state(3, state)
