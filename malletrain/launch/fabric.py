"""The environment variables that tell gloo and NCCL which network a job uses.

:mod:`malletrain.core.fabric` decides which network. Variables that the job sets itself win.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

from msgspec.structs import replace

from malletrain.protocol.messages import Round

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
UNKNOWN = "/"
"""Interface of a network that is not known. gloo and NCCL then choose one themselves."""


def sets_network(environment: Mapping[str, str]) -> bool:
    """Return whether a job's own environment selects its network."""
    return GLOO in environment or NCCL in environment


def gloo_variables(interface: str) -> dict[str, str]:
    """Return the variables of a job for which no network was chosen. Only gloo needs one: it
    resolves the node's name, which may give the loopback. NCCL's own choice is good.
    """
    return {GLOO: interface} if interface else {}


def network_variables(interface: str) -> dict[str, str]:
    """Return the variables of the network that was chosen. A variable with an empty value must be
    removed. If ``interface`` is empty, no network was chosen, and earlier variables stay.
    """
    if interface == UNKNOWN:
        return {GLOO: "", NCCL: ""}
    return {GLOO: interface, NCCL: f"={interface}"} if interface else {}


def set_network(environment: MutableMapping[str, str], interface: str) -> None:
    """Change ``environment`` so that processes started with it use ``interface``."""
    for name, value in network_variables(interface).items():
        if value:
            environment[name] = value
        else:
            environment.pop(name, None)


def round_for_launcher(message: Round, own: Mapping[str, str]) -> Round:
    """Return the round that is sent to the launcher. A network that the job's own environment
    selects is kept; one that an earlier round selected is not.

    Args:
        message: the round from the daemon.
        own: the job's own environment.
    """
    if sets_network(own):
        return replace(message, interface="")
    if message.address and not message.interface:
        return replace(message, interface=UNKNOWN)
    return message
