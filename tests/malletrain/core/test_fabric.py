"""Which network a round uses: tables of nodes and what is chosen for them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from malletrain.core.fabric import NetworkNameError, checked, choose, subnet, with_addresses
from malletrain.protocol.payloads import NodeNetwork


def eth(n, mbit=1000):
    return NodeNetwork("eth0", f"10.77.0.{n}", 16, mbit)


def ib(n, mbit=100_000):
    return NodeNetwork("ib0", f"10.1.0.{n}", 24, mbit)


def docker(n):
    return NodeNetwork("docker0", "172.17.0.1", 16, 10_000)


LO = NodeNetwork("lo", "127.0.0.1", 8)
BOTH = {"n1": (eth(1), ib(1), docker(1), LO), "n2": (eth(2), ib(2), docker(2), LO)}
MIXED = {**BOTH, "n3": (eth(3), docker(3), LO)}


def chosen(fabric):
    return {node: place.interface for node, place in fabric.places.items()}


@pytest.mark.parametrize(
    ("name", "members", "interface", "words"),
    [
        ("auto", BOTH, "ib0", "ib0 (10.1.0.0/24, 100 Gbit/s), the fastest network that all 2"),
        ("auto", MIXED, "eth0", "eth0 (10.77.0.0/16, 1 Gbit/s), the fastest network that all 3"),
        ("ib0", BOTH, "ib0", "uses ib0, as configured"),
        ("ib0", MIXED, None, "n3 has no ib0"),
        ("10.77.0.0/16", MIXED, "eth0", "uses 10.77.0.0/16"),
        ("10.9.0.0/16", BOTH, None, "n[1-2] have no 10.9.0.0/16"),
        ("auto", {"n1": (LO,), "n2": (LO,)}, None, "No network is known that all 2"),
        ("auto", {"n1": (eth(1),), "n2": ()}, None, "No network is known"),
        # one machine: what all have is the same place
        ("auto", {"n1": (eth(1), LO), "n2": (eth(1), LO)}, None, "No network is known"),
        # speeds that nobody knows: what is meant for it
        ("auto", {"n1": (eth(1, 0), ib(1, 0)), "n2": (ib(2, 0), eth(2, 0))}, "ib0", "ib0 (10.1"),
        # the slowest member counts
        ("auto", {"n1": (eth(1), ib(1)), "n2": (eth(2), ib(2, 100))}, "eth0", "eth0"),
        ("auto", {"n1": (ib(1),)}, "ib0", "that the member has"),
    ],
)  # fmt: skip
def test_the_network_and_why(name, members, interface, words):
    fabric = choose(name, members)
    assert words in fabric.sentence
    assert chosen(fabric) == (dict.fromkeys(members, interface) if interface else {})


def test_where_none_is_wanted_nothing_is_said():
    assert choose("", BOTH) is None


NETWORKS = st.sampled_from(["eth0", "ib0", "hsn0", "docker0", "lo"]).flatmap(
    lambda name: st.builds(
        NodeNetwork,
        st.just(name),
        st.sampled_from(["10.1.0.1", "10.1.0.2", "10.2.0.1", "10.2.0.9", "fd00::1", "fd00::2"]),
        st.sampled_from([8, 24]),
        st.sampled_from([0, 1000, 100_000]),
    )
)


@given(
    st.sampled_from(["auto", "ib0", "10.1.0.0/16"]),
    st.dictionaries(st.sampled_from("abc"), st.lists(NETWORKS, max_size=4), min_size=1),
)
def test_all_members_get_a_place_of_their_own_or_none_does(name, members):
    fabric = choose(name, members)
    assert set(fabric.places) in (set(), set(members))
    for node, place in fabric.places.items():
        assert place in members[node]
    if name == "auto":
        assert len({subnet(place) for place in fabric.places.values()}) <= 1
        addresses = [place.address for place in fabric.places.values()]
        assert len(set(addresses)) == len(addresses)


@given(
    st.sampled_from(["auto", "ib0", "10.1.0.0/16"]),
    st.lists(
        st.builds(
            NodeNetwork,
            st.just("ib0"),
            st.sampled_from(["10.1.0.1", "fd00::1", "fe80::1%ib0", "10.1.0.1/8", "", "x", "127.1"])
            | st.text(max_size=9),
            st.integers(0, 200),
        )
    ),
)
def test_what_is_no_address_is_left_out(name, networks):
    valid_networks = with_addresses(networks)
    assert set(choose(name, {"a": valid_networks}).places) <= {"a"}
    assert [n for n in networks if n.address == "10.1.0.1" and n.bits <= 32] == [
        n for n in valid_networks if n.address == "10.1.0.1"
    ]


@pytest.mark.parametrize("name", ["ib0", "10.1.0.0/16", "fd00::/8", "auto", ""])
def test_what_may_be_written(name):
    assert checked(name) == name


@pytest.mark.parametrize("name", ["10.1.0.1/16", "10.1/x", "the fast one", "x" * 16])
def test_what_may_not(name):
    with pytest.raises(NetworkNameError, match="network"):
        checked(name)
