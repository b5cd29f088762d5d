"""Finds the reason why the daemon does not answer, as far as this node can determine it.

Resolves the daemon's name and connects to its port, as the agent does, and returns the result as a
sentence for the lease's output. Decides nothing.
"""

from __future__ import annotations

import errno
import ipaddress
import socket

TRY_S = 5.0

_SENTENCES = {
    errno.ECONNREFUSED: "nothing listens on port {port} of {host} ({address}){loopback}. Is the "
    "daemon up, and is this its address?",
    errno.EHOSTUNREACH: "there is no way from this node to {host} ({address}): a firewall or "
    "missing route. Set advertise in [daemon] to an address that nodes can reach.",
    errno.ENETUNREACH: "there is no route from this node to {host} ({address}). Set advertise in "
    "[daemon] to an address that nodes can reach.",
}


def why_no_answer(endpoint: str, try_s: float = TRY_S) -> str:
    """Returns the reason why this node cannot communicate with the daemon, as sentences.

    Args:
        endpoint: ``tcp://HOST:PORT``.
        try_s: timeout for the connection, seconds.
    """
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    host = host.strip("[]")
    try:
        family, kind, proto, _, socket_address = socket.getaddrinfo(
            host, int(port), type=socket.SOCK_STREAM
        )[0]
    except (OSError, ValueError) as error:
        return (
            f"this node cannot look up {host} ({error}). Set advertise in [daemon] to an address, "
            "or to a name that the nodes know."
        )
    address = str(socket_address[0])
    try:
        with socket.socket(family, kind, proto) as probe:
            probe.settimeout(try_s)
            probe.connect(socket_address)
    except TimeoutError:
        return (
            f"{host} ({address}) does not answer on port {port}: a firewall between here and "
            "there, or the machine is down. Nodes must be able to connect to that port."
        )
    except OSError as error:
        loopback = ", which is this node itself" if _is_loopback(address) else ""
        template = _SENTENCES.get(
            error.errno or 0, "{host} ({address}) cannot be connected to: " + str(error)
        )
        return template.format(host=host, address=address, port=port, loopback=loopback)
    return (
        f"port {port} of {host} ({address}) takes connections and says nothing that is meant for "
        "this lease. Is that the daemon, and are its key and this lease's valid?"
    )


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
