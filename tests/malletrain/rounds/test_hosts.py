"""Slots of one host in one job: their ranks are neighbours, also after the job has grown."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from malletrain.rounds.interface import RoundSettings, SaveRound, SendRound
from malletrain.rounds.live import LiveRounds
from scavenger.interface import host_of
from tests.malletrain.rounds.live_world import Live, of
from tests.malletrain.rounds.rounds_tables import SETTINGS, STORE, running, says

SLOTS = RoundSettings(host_of=host_of)


def test_in_restart_mode_a_slot_that_joins_is_ranked_beside_those_of_its_host():
    r = running("c1/g.0", "c2/g.0")
    r.settings = replace(SETTINGS, host_of=host_of)
    r.move(("c1/g.0", "c2/g.0", "c1/g.1", "c2/g.1"), 110.0)
    says(r, 111.0, "ready", "c1/g.1", "c2/g.1")
    members = ("c1/g.0", "c1/g.1", "c2/g.0", "c2/g.1")
    actions = r.drained("c1/g.0", 1, 112.0)
    assert SaveRound(2, members) in actions
    invited = [a for a in r.store_up("c1/g.0", 2, *STORE) if isinstance(a, SendRound)]
    assert [(a.node, a.rank) for a in invited] == list(zip(members[1:], (1, 2, 3), strict=True))


def test_without_slots_nodes_keep_their_ranks():
    r = running("a", "b")
    r.move(("a", "b", "c"), 110.0)
    says(r, 111.0, "ready", "c")
    r.drained("a", 1, 112.0)
    assert r.members == ("a", "b", "c")


def test_in_live_mode_survivors_keep_their_ranks_and_joiners_stand_by_host_behind_them():
    live = Live("c1/g.0", "c2/g.0")
    live.rounds.settings = SLOTS
    names = ("c1/g.0", "c2/g.0", "c3/g.0", "c1/g.1", "c3/g.1")
    live.rounds.move(names, live.now)
    actions = [action for name in names[2:] for action in live.says(name, "ready", 0)]
    [saved] = of(SaveRound, actions)
    assert saved.members == ("c1/g.0", "c2/g.0", "c3/g.0", "c3/g.1", "c1/g.1")


def test_in_live_mode_a_first_round_is_by_host():
    rounds = LiveRounds(settings=SLOTS)
    names = ("c1/g.0", "c2/g.0", "c1/g.1")
    rounds.move(names, 1.0)
    says(rounds, 2.0, "ready", *names)
    assert rounds.members == ("c1/g.0", "c1/g.1", "c2/g.0")


NAMES = st.lists(
    st.builds("c{}/g.{}".format, st.integers(1, 4), st.integers(0, 3)), unique=True, min_size=1
)


@given(NAMES)
def test_the_order_by_host(names):
    ordered = SLOTS.by_host(names)
    assert sorted(ordered) == sorted(names)
    assert ordered[0] == names[0], "rank 0 stays where it is"
    hosts = [host_of(name) for name in ordered]
    changes = sum(a != b for a, b in pairwise(hosts))
    assert changes == len(set(hosts)) - 1
    for host in set(hosts):
        of_host = [name for name in names if host_of(name) == host]
        assert [name for name in ordered if host_of(name) == host] == of_host
    assert RoundSettings().by_host(names) == tuple(names)
