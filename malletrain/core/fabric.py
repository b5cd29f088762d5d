"""Which of its members' networks a round uses.

Pure: names, addresses and speeds in, an address for each member out.
:mod:`malletrain.agent.networks` finds a member's networks; the launcher uses the answer.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from malletrain.protocol.payloads import NodeNetwork
from scavenger.hostlist import named

AUTO = "auto"
_OF_THE_NODE_ALONE = (
    *("lo", "docker", "podman", "br-", "virbr", "veth", "cni", "flannel", "cali", "lxc", "tun"),
)
"""Beginnings of names of interfaces that lead to nobody else."""
_INTERCONNECTS = ("ib", "hsn", "opa", "mlx", "bond-ib")
"""Of those that are meant for this, where speeds say nothing."""

_Subnet = ipaddress.IPv4Network | ipaddress.IPv6Network


class NetworkNameError(ValueError):
    """What is to name a network names none; the message says what does."""


@dataclass(frozen=True)
class Fabric:
    """The network of one round."""

    sentence: str
    """Which it is and why, for people."""
    places: Mapping[str, NodeNetwork] = field(default_factory=dict)
    """Member → its interface and address there; empty: every node's usual one is taken."""


def checked(name: str) -> str:
    """``name``, if it is the name of an interface, a network, ``auto`` or nothing.

    Raises:
        NetworkNameError: It is not.
    """
    if "/" in name:
        try:
            ipaddress.ip_network(name)
        except ValueError as error:
            raise NetworkNameError(
                f'"{name}" is no network such as "10.1.0.0/16": {error}'
            ) from None
    elif name and (len(name) > 15 or not name.isprintable() or " " in name):
        raise NetworkNameError(
            f'"{name}" is neither the name of an interface ("ib0"), nor a network '
            '("10.1.0.0/16"), nor "auto"'
        )
    return name


def subnet(network: NodeNetwork) -> _Subnet:
    """The network that an interface is in."""
    return ipaddress.ip_interface(f"{network.address}/{network.bits}").network


def with_addresses(networks: Sequence[NodeNetwork]) -> tuple[NodeNetwork, ...]:
    """Those of ``networks`` whose address is one: agents say what they like."""
    return tuple(network for network in networks if _has_address(network))


def _has_address(network: NodeNetwork) -> bool:
    try:
        ipaddress.ip_address(network.address)
        subnet(network)
    except ValueError:
        return False
    return True


def choose(name: str, members: Mapping[str, Sequence[NodeNetwork]]) -> Fabric | None:
    """The network for a round; None where none is wanted.

    Args:
        name: an interface, a network in CIDR form, ``auto``, or empty.
        members: node → its networks.
    """
    if not name:
        return None
    if name == AUTO:
        return _fastest(members)
    places = {node: _named(name, has) for node, has in members.items()}
    lacks = sorted(node for node, place in places.items() if place is None)
    if lacks:
        return Fabric(
            f"{named(lacks)} {'has' if len(lacks) == 1 else 'have'} no {name}: the round goes by "
            "the network on which the nodes reach the daemon."
        )
    chosen = {node: place for node, place in places.items() if place is not None}
    return Fabric(f"The round goes by {name}, as configured.", chosen)


def _named(name: str, has: Sequence[NodeNetwork]) -> NodeNetwork | None:
    if "/" not in name:
        return next((n for n in has if n.interface == name), None)
    inside = ipaddress.ip_network(name)
    return next((n for n in has if ipaddress.ip_address(n.address) in inside), None)


def _fastest(members: Mapping[str, Sequence[NodeNetwork]]) -> Fabric:
    shared = list(_shared(members))
    if not shared:
        return Fabric(
            f"No network is known that all {len(members)} members share: the round goes by the one "
            "on which they reach the daemon."
        )

    def worth(places: Mapping[str, NodeNetwork]) -> tuple[int, int]:
        slowest = min(n.mbit for n in places.values())
        meant = all(n.interface.startswith(_INTERCONNECTS) for n in places.values())
        return slowest, int(meant)

    best = max(shared, key=worth)  # of equals the first: as the nodes list them
    first, (slowest, _) = next(iter(best.values())), worth(best)
    speed = f", {slowest / 1000:g} Gbit/s" if slowest else ""
    count = f"all {len(members)} members share" if len(members) > 1 else "the member has"
    return Fabric(
        f"The round goes by {first.interface} ({subnet(first)}{speed}), the fastest network that "
        f"{count}.",
        best,
    )


def _shared(members: Mapping[str, Sequence[NodeNetwork]]) -> Iterator[dict[str, NodeNetwork]]:
    """The networks that every member is in, each under an address of its own."""
    if not members:
        return
    networks = {
        node: {subnet(place): place for place in reversed(has) if _leads_out(place)}
        for node, has in members.items()
    }
    for where in reversed(next(iter(networks.values()))):
        places = {node: has[where] for node, has in networks.items() if where in has}
        # who has the same address as another is in a network of that name, not in the same one
        distinct = len({p.address for p in places.values()}) == len(members)
        if len(places) == len(members) and distinct:
            yield places


def _leads_out(network: NodeNetwork) -> bool:
    address = ipaddress.ip_address(network.address)
    return not address.is_loopback and not network.interface.startswith(_OF_THE_NODE_ALONE)
