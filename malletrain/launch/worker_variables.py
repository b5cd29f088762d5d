"""The environment variables of the workers of a round: those that follow from the layout of the
node, and those that tell gloo and NCCL which network the job uses.

Decides which variables a launcher sets. :mod:`malletrain.launch.cores` decides how many threads a
worker has if the layout names no number, :mod:`malletrain.core.fabric` which network. Variables of
the network that the job sets itself win.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping

from msgspec.structs import replace

from malletrain.launch.cores import THREADS_VARIABLE, allowed_cores, threads_per_worker
from malletrain.protocol import env
from malletrain.protocol.messages import Round
from malletrain.protocol.payloads import RoundLayout


class WorkerVariables:
    """The variables of the workers of one job on this node.

    Args:
        environment: environment that the workers inherit. It is changed.
        tunes_threads: whether a number of threads in a layout is one that MalleTrain has measured
            (``--threads auto``), not one that the job's owner has chosen.
    """

    def __init__(
        self, environment: MutableMapping[str, str] = os.environ, *, tunes_threads: bool = False
    ) -> None:
        self._environment = environment
        self._tunes_threads = tunes_threads
        self._of_user = {THREADS_VARIABLE: environment.get(THREADS_VARIABLE, "")}

    def set(self, layout: RoundLayout) -> None:
        """Set the number of threads and of loader workers for the workers that start next. A number
        of threads that the user has chosen stays, unless the layout names one.
        """
        environment = self._environment
        cores = allowed_cores(environment)
        threads = layout.threads or threads_per_worker(cores, layout.processes, self._of_user)
        environment.pop(env.THREADS, None)
        if threads:
            environment[THREADS_VARIABLE] = str(threads)
            if self._tunes_threads or not layout.threads:
                environment[env.THREADS] = str(threads)
        if layout.loader_workers:
            environment[env.LOADER_WORKERS] = str(layout.loader_workers)
        else:
            environment.pop(env.LOADER_WORKERS, None)


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
