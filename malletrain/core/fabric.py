"""Chooses which of its members' networks a round uses.

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
"""Name prefixes of interfaces that reach no other node."""
_INTERCONNECTS = ("ib", "hsn", "opa", "mlx", "bond-ib")
"""Name prefixes of interconnects. They decide between networks of equal speed."""

_Subnet = ipaddress.IPv4Network | ipaddress.IPv6Network


class NetworkNameError(ValueError):
    """A text does not name a network. The message says what does."""


@dataclass(frozen=True)
class Fabric:
    """The network of one round."""

    sentence: str
    """Network and reason, as a sentence for users."""
    places: Mapping[str, NodeNetwork] = field(default_factory=dict)
    """Member → its interface and address in the network; empty if every node uses its default one.
    """


def checked(name: str) -> str:
    """Return ``name`` if it is the name of an interface, a network, ``auto`` or empty.

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
    """Return the network of an interface."""
    return ipaddress.ip_interface(f"{network.address}/{network.bits}").network


def with_addresses(networks: Sequence[NodeNetwork]) -> tuple[NodeNetwork, ...]:
    """Return the ``networks`` with a valid address. Agents' reports are not trusted."""
    return tuple(network for network in networks if _has_address(network))


def _has_address(network: NodeNetwork) -> bool:
    try:
        ipaddress.ip_address(network.address)
        subnet(network)
    except ValueError:
        return False
    return True


def choose(name: str, members: Mapping[str, Sequence[NodeNetwork]]) -> Fabric | None:
    """Return the network for a round; None if ``name`` is empty.

    Args:
        name: an interface, a network in CIDR form, ``auto``, or empty.
        members: node → its networks.
    """
    if not name:
        return None
    if name == AUTO:
        return _fastest(members)
    places = {node: _named(name, networks) for node, networks in members.items()}
    missing = sorted(node for node, place in places.items() if place is None)
    if missing:
        return Fabric(
            f"{named(missing)} {'has' if len(missing) == 1 else 'have'} no {name}: the round uses "
            "the network on which the nodes reach the daemon."
        )
    chosen = {node: place for node, place in places.items() if place is not None}
    return Fabric(f"The round uses {name}, as configured.", chosen)


def _named(name: str, networks: Sequence[NodeNetwork]) -> NodeNetwork | None:
    if "/" not in name:
        return next((n for n in networks if n.interface == name), None)
    inside = ipaddress.ip_network(name)
    return next((n for n in networks if ipaddress.ip_address(n.address) in inside), None)


def _fastest(members: Mapping[str, Sequence[NodeNetwork]]) -> Fabric:
    shared = list(_shared(members))
    if not shared:
        return Fabric(
            f"No network is known that all {len(members)} members share: the round uses the one "
            "on which they reach the daemon."
        )

    def score(places: Mapping[str, NodeNetwork]) -> tuple[int, int]:
        slowest = min(n.mbit for n in places.values())
        is_interconnect = all(n.interface.startswith(_INTERCONNECTS) for n in places.values())
        return slowest, int(is_interconnect)

    best = max(shared, key=score)  # the first of equals, in the nodes' order
    first, (slowest, _) = next(iter(best.values())), score(best)
    speed = f", {slowest / 1000:g} Gbit/s" if slowest else ""
    count = f"all {len(members)} members share" if len(members) > 1 else "the member has"
    return Fabric(
        f"The round uses {first.interface} ({subnet(first)}{speed}), the fastest network that "
        f"{count}.",
        best,
    )


def _shared(members: Mapping[str, Sequence[NodeNetwork]]) -> Iterator[dict[str, NodeNetwork]]:
    """Yield the networks that all members share, with distinct addresses."""
    if not members:
        return
    networks = {
        node: {subnet(place): place for place in reversed(has) if _leads_out(place)}
        for node, has in members.items()
    }
    for network in reversed(next(iter(networks.values()))):
        places = {node: has[network] for node, has in networks.items() if network in has}
        # members with equal addresses are in different networks with the same prefix
        distinct = len({p.address for p in places.values()}) == len(members)
        if len(places) == len(members) and distinct:
            yield places


def _leads_out(network: NodeNetwork) -> bool:
    address = ipaddress.ip_address(network.address)
    return not address.is_loopback and not network.interface.startswith(_OF_THE_NODE_ALONE)
