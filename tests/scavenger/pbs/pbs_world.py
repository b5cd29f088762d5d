"""A scavenger on an imitated PBS (fake_pbs.py), for tests without a PBS."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from scavenger.batch.commands import CommandPolicy, Commands
from scavenger.batch.gap_memory import GapMemory
from scavenger.batch.settings import BatchSettings
from scavenger.interface import LeaseRequest, LeaseState
from scavenger.pbs.job import PbsLeaseOptions
from scavenger.pbs.scavenger import PbsScavenger
from scavenger.pbs.source import asking_environment
from tests.scavenger.pbs.fake_pbs import FakePbs
from tests.waiting import PATIENCE_S

PREFIX = "malletrain-t-"
SHELL = str(Path(__file__).parents[3] / "jobscripts" / "pbs" / "shell.sh")
TEMPLATE = (Path(__file__).parents[3] / "jobscripts" / "pbs" / "lease.sh").read_text()


class World:
    """A scavenger on an imitated PBS, with a clock that can be put forward."""

    def __init__(self, root, **options):
        self.pbs = FakePbs(root, **options)
        self.tools = self.pbs.tools
        self.later = 0.0

    def scavenger(self, timeout_s=PATIENCE_S, **settings):
        settings.setdefault("lease", PbsLeaseOptions(queue="preemptable", shell=SHELL))
        settings.setdefault("idle_for_s", 0.0)
        settings.setdefault("hold_s", 0.3)
        made = BatchSettings(
            tag="t", template=TEMPLATE, user="pbsuser", submit_rate=1000.0, **settings
        )
        commands = Commands(
            CommandPolicy(timeout_s, 1, 0.0), asking_environment(self.pbs.environment)
        )
        clock = lambda: time.time() + self.later  # noqa: E731
        return PbsScavenger(
            made, commands, memory=GapMemory(), clock=clock, environment=self.pbs.environment
        )


@contextlib.contextmanager
def worlds(root):
    """A function that makes one; they are ended at the end."""
    made = []

    def make(**options):
        made.append(World(root, **options))
        return made[-1]

    yield make
    for one in made:
        one.pbs.stop()


def request(number, *argv, node=None, **options):
    return LeaseRequest(f"l{number}", node or f"n{number}", argv or ("sleep", "600"), **options)


def names(polled):
    return sorted(gap.node for gap in polled.gaps)


def why(polled, node):
    return {
        rule: sentence
        for e in polled.explanations
        if e.node == node
        for rule, passed, sentence in e.rules
        if not passed
    }


def states(one):
    return {lease.id: lease.state for lease in one.poll().leases}


def running(world, one, *ids):
    world.pbs.until(
        lambda: [states(one).get(i) for i in ids] == [LeaseState.RUNNING] * len(ids),
        "the leases run",
    )
