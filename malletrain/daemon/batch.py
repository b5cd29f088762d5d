"""What the configuration says to the scavenger of any batch scheduler."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

from malletrain.config import Config
from malletrain.keys import SERVER, KeyFileError, read_key
from scavenger.hostlist import expand
from scavenger.hours import parse_hours
from scavenger.interface import SchedulerError
from scavenger.rules import GapRules

LOOPBACK = ("127.", "localhost", "[::1]")


def reachable(config: Config) -> Iterator[tuple[bool, str]]:
    """Whether agents on other nodes can reach the daemon where it listens."""
    host = config.daemon.listen.removeprefix("tcp://")
    if host.startswith(LOOPBACK) and not config.daemon.advertise:
        sentence = (
            f"Agents on other nodes cannot reach the daemon at {host}; in [daemon] set listen to an address that they can reach, such as "
            '"tcp://0.0.0.0:7443" (and advertise = "127.0.0.1" where all nodes are this machine).'
        )
        yield False, sentence


def gap_rules(config: Config) -> GapRules:
    """Section [gaps]."""
    gaps = config.gaps
    return GapRules(
        partitions=frozenset(gaps.partitions),
        features=frozenset(gaps.features),
        nodes=frozenset(name for text in gaps.nodes for name in expand(text)),
        exclude=frozenset(name for text in gaps.exclude for name in expand(text)),
        reserve=gaps.reserve,
        hours=parse_hours(gaps.hours),
        use_planned=gaps.use_planned,
        max_at_once=gaps.max_at_once,
    )


def output_dir(config: Config) -> Path:
    """Where what leases print is kept."""
    return config.state_dir.absolute() / "leases"


def template(script: Path | None, kind: str) -> str:
    """The batch script of the leases: the site's own, else the one for this ``kind``. Raises SchedulerError."""
    if script is None:
        return (files("jobscripts") / kind / "lease.sh").read_text("utf-8")
    try:
        return script.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SchedulerError(f"The batch script {script} of the leases cannot be read: {error}.") from None


def lease_tag(config: Config) -> str:
    """What tells the leases of this daemon from those of others: of its key, or of its place as long as it has none."""
    try:
        text = read_key(config.state_dir / "keys" / SERVER).public
    except KeyFileError:
        text = str(config.state_dir.absolute())
    return hashlib.sha256(text.encode()).hexdigest()[:8]
