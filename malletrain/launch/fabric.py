"""The environment variables that tell gloo and NCCL which network a job uses.

:mod:`malletrain.core.fabric` decides which network. Variables that the job sets itself win.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

from msgspec.structs import replace

from malletrain.protocol.messages import Round

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
UNKNOWN = "/"
"""Names no interface: nobody knows which it is, and gloo and NCCL find one themselves."""


def says_itself(environment: Mapping[str, str]) -> bool:
    """Whether a job's own environment names its network."""
    return GLOO in environment or NCCL in environment


def for_gloo(interface: str) -> dict[str, str]:
    """The network of a job where nobody chose one: gloo's own guess is what the node's name means
    there, which may be its loopback; NCCL's is good.
    """
    return {GLOO: interface} if interface else {}


def for_all(interface: str) -> dict[str, str]:
    """The network that was chosen; empty: none was, and what was said before holds. A variable
    without a value is to be removed.
    """
    if interface == UNKNOWN:
        return {GLOO: "", NCCL: ""}
    return {GLOO: interface, NCCL: f"={interface}"} if interface else {}


def put(environment: MutableMapping[str, str], interface: str) -> None:
    """Have who is started with ``environment`` go by ``interface``."""
    for name, value in for_all(interface).items():
        if value:
            environment[name] = value
        else:
            environment.pop(name, None)


def round_for_launcher(message: Round, own: Mapping[str, str]) -> Round:
    """A round as the launcher is told of it: a network that the job's own environment names stays
    its network, and one that an earlier round named does not.
    """
    if says_itself(own):
        return replace(message, interface="")
    if message.address and not message.interface:
        return replace(message, interface=UNKNOWN)
    return message
