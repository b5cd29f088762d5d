"""Chooses the address at which agents and clients reach the daemon.

That is ``advertise`` if it is set, else the address in ``listen``. If ``listen`` means every
interface, it is the address from which this host reaches its nodes. Names are resolved first. A
name that resolves to loopback on this host is refused, because an agent on another node that
connects to ``localhost`` would reach only itself. Only the resolver and the routing table are
queried; nothing is sent to the nodes.
"""

from __future__ import annotations

import ipaddress
import socket
from collections import Counter
from collections.abc import Iterable

EVERYWHERE = ("0.0.0.0", "*", "::")
_UNUSED_ADDRESSES = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))
"""Addresses reserved for documentation (RFC 5737, RFC 3849): the route to them is the default
route.
"""
_MAX_LOOKUPS = 64
"""Maximum number of nodes to look up. They show by which interface the others are reached."""


class AddressError(RuntimeError):
    """No address leads from the nodes to the daemon. The message says why and what to do."""


def host_of(listen: str) -> str:
    """Return the host in ``tcp://HOST:PORT``, without the brackets of an IPv6 address."""
    return listen.removeprefix("tcp://").rpartition(":")[0].strip("[]")


def bracketed(host: str) -> str:
    """Return ``host`` as it is written in an endpoint."""
    return f"[{host}]" if ":" in host else host


def advertised(listen: str, advertise: str, nodes: Iterable[str], *, all_here: bool) -> str:
    """Return the host of the endpoint that agents connect to, in brackets if it is an IPv6 address.

    Args:
        listen: ``tcp://HOST:PORT``, where the daemon listens.
        advertise: value in the configuration; empty if not set.
        nodes: addresses or names of nodes in the main scheduler; may be empty.
        all_here: whether every node is this machine.

    Raises:
        AddressError: the nodes could not reach the daemon there.
    """
    host = host_of(listen)
    if advertise:
        return _checked(advertise, "advertise", nodes)
    if host not in EVERYWHERE:
        return bracketed(host) if all_here else _checked(host, "listen", nodes)
    if all_here:
        return "127.0.0.1"  # a socket on [::] takes connections of IPv4 too
    return _by_route(nodes, v6=host == "::")


def _checked(host: str, key: str, nodes: Iterable[str]) -> str:
    """Return ``host`` if it means this machine on the nodes, too. Raises AddressError."""
    plain = host.strip("[]")
    if is_loopback(plain) and (key == "advertise" or _all_loopback(nodes)):
        return bracketed(plain)  # deliberate: all nodes are this machine
    try:
        resolved = _addresses(plain)
    except OSError as error:
        raise AddressError(
            f"{key} = {host} names no address that this machine can look up "
            f"({error.strerror or error}); in [daemon] set advertise to this host's address on the "
            "network of the nodes."
        ) from None
    if not all(is_loopback(address) for address in resolved):
        return bracketed(plain)
    if key == "listen":
        raise AddressError(
            f"Agents on other nodes cannot reach the daemon at {host}; in [daemon] set listen to "
            'an address that they can reach, such as "tcp://0.0.0.0:7443" (and advertise = '
            '"127.0.0.1" where all nodes are this machine).'
        )
    try:
        suggestion = f'advertise = "{_by_route(nodes, v6=False)}"'
    except AddressError:
        suggestion = "advertise to this host's address on the network of the nodes"
    raise AddressError(
        f"advertise = {host} means {resolved[0]} here, and a node that looks it up in the same way "
        f"calls itself; in [daemon] set {suggestion}, or correct /etc/hosts."
    )


def _by_route(nodes: Iterable[str], *, v6: bool) -> str:
    """Return the address from which most of the ``nodes`` are reached; without nodes, that of the
    default route.
    """
    sources: Counter[str] = Counter()
    for node in list(nodes)[:_MAX_LOOKUPS]:
        try:
            sources.update({_source_to(node, v6=v6): 1})
        except OSError:
            continue  # its name may exist only in the main scheduler
    outside = Counter({a: count for a, count in sources.items() if not is_loopback(a)})
    if sources and not outside:
        return bracketed(next(iter(sources)))  # every node is this machine
    if outside:
        return bracketed(outside.most_common(1)[0][0])
    for family, address in _UNUSED_ADDRESSES[: 2 if v6 else 1]:
        try:
            return bracketed(_source(family, address))
        except OSError:
            continue
    raise AddressError(
        "None of this machine's addresses is known to lead to the nodes: there is no default "
        "route, and the main scheduler's nodes cannot be looked up; in [daemon] set advertise to "
        "this host's address on their network."
    )


def _source_to(node: str, *, v6: bool) -> str:
    infos = socket.getaddrinfo(node, 9, type=socket.SOCK_DGRAM)
    families = [socket.AF_INET, *([socket.AF_INET6] if v6 else [])]
    for family in families:
        for each, _, _, _, where in infos:
            if each == family:
                return _source(family, str(where[0]))
    raise OSError(f"{node} has no address of the family that the daemon listens on")


def _source(family: socket.AddressFamily, to: str) -> str:
    """Return the address from which this host would send to ``to``. Raises OSError without a
    route.
    """
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((to, 9))
        return str(probe.getsockname()[0])


def _addresses(host: str) -> list[str]:
    return [str(where[0]) for *_, where in socket.getaddrinfo(host, 9, type=socket.SOCK_STREAM)]


def _all_loopback(nodes: Iterable[str]) -> bool:
    """Whether every node that can be looked up is this machine."""
    addresses: list[str] = []
    for node in list(nodes)[:_MAX_LOOKUPS]:
        try:
            addresses += _addresses(node)
        except OSError:
            continue
    return bool(addresses) and all(is_loopback(address) for address in addresses)


def is_loopback(host: str) -> bool:
    """Whether ``host`` is an address of the loopback interface; a name is none."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
