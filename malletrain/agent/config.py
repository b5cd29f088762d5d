"""The agent's settings: options of the command line, each of which can also be given in the
environment (``MALLETRAIN_…``).

The secret key of the lease comes only from the environment, which other users cannot read. The
agent removes it from there, so that jobs on the node do not inherit it.
"""

from __future__ import annotations

import argparse
import socket
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import zmq

from malletrain.agent.networks import address_to
from malletrain.agent.sharing import SlotBounds
from malletrain.identity.keys import is_key
from malletrain.protocol import env
from malletrain.protocol.gpus import count_gpus
from malletrain.protocol.site_rules import HealthPlan, SharingRules, read


@dataclass(frozen=True)
class AgentConfig:
    """The settings of one agent."""

    endpoint: str
    """Address of the daemon."""
    lease: str
    """Id of the lease."""
    node: str
    """Name of the node."""
    host: str
    """Address at which other nodes reach this node."""
    run_dir: Path | None
    """Directory for sockets and logs; None for the default."""
    server_key: str
    """The daemon's public CURVE key (Z85)."""
    secret_key: str = field(repr=False)
    """The lease's secret CURVE key (Z85)."""
    grace_s: float = 30.0
    """Time between SIGTERM and SIGKILL when the lease is preempted, seconds."""
    node_class: str = "default"
    """Class of the node."""
    gpus: int = 0
    """Number of GPUs."""
    health: HealthPlan = field(default_factory=lambda: HealthPlan(gpus=False))
    """Health checks of the node; by default none."""
    slot: SlotBounds | None = None
    """What the lease has of a host that it shares with other jobs; None for a whole node."""


@dataclass(frozen=True)
class _Option:
    name: str
    variable: str
    help: str
    default: str | None = None


_OPTIONS = (
    _Option("endpoint", env.ENDPOINT, "address of the daemon, e.g. tcp://head:7443"),
    _Option("lease", env.LEASE, "id of the lease this agent serves"),
    _Option("node", env.NODE, "name of this node for the main scheduler"),
    _Option("server-key", env.SERVER_KEY, "the daemon's public CURVE key (Z85)"),
    _Option(
        "run-dir",
        env.RUN_DIR,
        "directory on this node for sockets and logs, which the agent removes when it ends "
        "(default: a private one in SLURM_TMPDIR, XDG_RUNTIME_DIR or TMPDIR)",
        "",
    ),
    _Option(
        "host",
        env.HOST,
        "address at which the other nodes reach this node (default: the one from which it reaches "
        "the daemon)",
        "",
    ),
    _Option(
        "grace-s",
        env.GRACE_S,
        "seconds between SIGTERM and SIGKILL when the lease is preempted",
        "30",
    ),
    _Option("node-class", env.NODE_CLASS, "class of this node", "default"),
    _Option("gpus", env.GPUS, "number of GPUs (default: counted)", ""),
    _Option("health", env.HEALTH, "health checks of the node, as JSON (default: none)", ""),
    _Option(
        "slot-cpus",
        env.SLOT_CPUS,
        "processors of the lease, if it shares its host with other jobs (default: all)",
        "",
    ),
    _Option("slot-memory-mb", env.SLOT_MEMORY_MB, "memory of such a lease, MiB", ""),
    _Option(
        "sharing",
        env.SHARING,
        "how such a lease behaves towards other jobs, as JSON (default: niceness 10, low I/O "
        "priority, own processors and memory only)",
        "",
    ),
)


def _joined(argv: Sequence[str]) -> list[str]:
    """Return ``argv`` with ``--name=value`` for ``--name value``, because a key can start with a
    minus sign, and argparse would parse it as an option.
    """
    names = {f"--{option.name}" for option in _OPTIONS}
    words = list(argv)
    joined = []
    while words:
        word = words.pop(0)
        joined.append(f"{word}={words.pop(0)}" if word in names and words else word)
    return joined


def parse_config(argv: Sequence[str], environment: MutableMapping[str, str]) -> AgentConfig:
    """Read options and environment. Removes the secret key from the environment. Raises ValueError
    with all options that are missing or wrong. Exits on ``--help``.
    """
    parser = argparse.ArgumentParser(
        prog="python -m malletrain.agent", description="MalleTrain's process on a leased node."
    )
    for option in _OPTIONS:
        parser.add_argument(f"--{option.name}", help=f"{option.help} [{option.variable}]")
    options = vars(parser.parse_args(_joined(argv)))
    values: dict[str, str] = {}
    problems = []
    for option in _OPTIONS:
        value = options[option.name.replace("-", "_")]
        value = environment.get(option.variable, option.default) if value is None else value
        if value is None or (not value and option.default is None):
            problems.append(
                f"--{option.name} is missing (or {option.variable} in the environment)."
            )
        values[option.name] = value or ""
    secret = environment.pop(env.LEASE_KEY, "")
    if not is_key(secret):
        problems.append(
            f"{env.LEASE_KEY} in the environment is "
            f"{'no CURVE key (40 characters of Z85)' if secret else 'missing'}."
        )
    if values["server-key"] and not is_key(values["server-key"]):
        problems.append("--server-key is not a CURVE key (40 characters of Z85).")
    grace_s, gpus = 0.0, 0
    try:
        grace_s = float(values["grace-s"])
    except ValueError:
        problems.append(f"--grace-s is '{values['grace-s']}'; it must be a number of seconds.")
    try:
        gpus = int(values["gpus"]) if values["gpus"] else count_gpus(environment)
    except ValueError:
        problems.append(f"--gpus is '{values['gpus']}'; it must be a whole number.")
    plan = HealthPlan(gpus=False)
    try:
        plan = read(values["health"], HealthPlan) if values["health"] else plan
    except ValueError as error:
        problems.append(f"--health cannot be read: {error}.")
    slot = None
    try:
        slot = _slot(values)
    except ValueError as error:
        problems.append(str(error))
    if problems:
        raise ValueError("The agent cannot start. " + " ".join(problems))
    return AgentConfig(
        endpoint=values["endpoint"],
        lease=values["lease"],
        node=values["node"],
        host=values["host"] or address_to(values["endpoint"]) or socket.getfqdn(),
        run_dir=Path(values["run-dir"]) if values["run-dir"] else None,
        server_key=values["server-key"],
        secret_key=secret,
        grace_s=grace_s,
        node_class=values["node-class"],
        gpus=gpus,
        health=plan,
        slot=slot,
    )


def _slot(values: Mapping[str, str]) -> SlotBounds | None:
    """Return what the lease has of its host; None for a whole node. Raises ValueError."""
    cpus, memory = values["slot-cpus"], values["slot-memory-mb"]
    if not cpus and not memory:
        return None
    if not (cpus.isdecimal() and memory.isdecimal() and int(cpus) and int(memory)):
        raise ValueError(
            f"--slot-cpus is '{cpus}' and --slot-memory-mb is '{memory}'; both must be positive "
            "whole numbers."
        )
    try:
        rules = read(values["sharing"], SharingRules) if values["sharing"] else SharingRules()
    except ValueError as error:
        raise ValueError(f"--sharing cannot be read: {error}.") from None
    return SlotBounds(int(cpus), int(memory) << 20, rules)


def public_key(secret_key: str) -> str:
    """Return the public key of a Z85 secret key."""
    return zmq.curve_public(secret_key.encode()).decode()
