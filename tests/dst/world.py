"""One day of a site, from one seed: its parts put together, its end, and what must hold."""

from __future__ import annotations

import gc
import hashlib
import math
import shutil
import sys
import tempfile
import traceback
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from malletrain.core.events import JobState
from malletrain.protocol import messages
from malletrain.protocol.event_kinds import LeaseStatus
from tests.dst import faults
from tests.dst.head import Head
from tests.dst.invariants import Invariants
from tests.dst.loop import Stuck, VirtualLoop
from tests.dst.machine import Machine
from tests.dst.network import Network
from tests.dst.site import Site
from tests.dst.training import Trainings
from tests.dst.truth import BATCH
from tests.dst.users import OTHER_KEY, User, list_users

MODES = ("restart", "restart", "live", "live", "live", "service")
SEVERAL = 0.3
"""How likely it is that the site serves a second user."""
PROFILED = 0.2
"""How likely it is that it profiles its jobs, of which each can use all nodes."""
LENGTHS = {False: (8, 30), True: (40, 120)}
"""Whether jobs are profiled → minimum and maximum number of their batches."""
SERVES_S = 30.0
"""Maximum time for which a service without an end continues after the last fault, seconds."""
MOMENT_S = 2.0
"""An agent whose connection broke is back after so long at the latest."""
QUIET_S = 200.0
"""Maximum time after the last fault until every job has ended and every lease is returned,
seconds.
"""


@dataclass(frozen=True)
class Outcome:
    """Result of a seed."""

    seed: int
    broken: tuple[str, ...]
    """Invariants that did not hold, the first one first."""
    trace: str
    """The hash of everything that happened."""
    lasted_s: float
    """Seconds of virtual time."""
    happened: dict[str, int] = field(default_factory=dict)
    """Kind of fault → how often."""
    jobs: dict[str, str] = field(default_factory=dict)
    """Job → its last state."""


class World:
    """A site. ``kinds``: of faults that may happen, None: all. ``shown`` takes the lines of the
    trace; ``modes``: of the jobs, None: any; ``profiles``: whether they are profiled, None: as
    drawn; ``layouts``: whether jobs in restart mode look for the best layout of their nodes.
    """

    def __init__(
        self,
        seed: int,
        kinds: Collection[str] | None = None,
        shown: Any = None,
        modes: Collection[str] | None = None,
        profiles: bool | None = None,
        layouts: bool = False,
    ) -> None:
        self.seed, self.kinds, self._shown, self.modes = seed, kinds, shown, modes
        self._layouts = layouts
        self.rng = rng = Random(seed)
        self.apart = Random(f"{seed} apart")
        """Generator whose draws do not change other draws."""
        self.broken: list[str] = []
        self.happened: dict[str, int] = {}
        self._trace = hashlib.sha256()
        self.folder = Path(
            tempfile.mkdtemp(
                prefix="dst-",
            )
        )
        (self.folder / "train.py").write_text("")
        self.loop = VirtualLoop(rng, self.fail)
        self.usual_thread_s = self.loop.thread_s
        self.network = Network(self.loop, rng, self.say)
        self.site = Site(self.loop, rng, self.network, self.folder, self.say, self.fail)
        self.machine = self.site.machine = Machine(
            self.loop, rng, self.network, rng.choice((2, 3, 3, 4)), self.site.start_agent, self.say
        )
        self.trainings = self.site.trainings = Trainings(
            self.loop, rng, self.network.later, self.say, self.fail, self._excused
        )
        several, drawn = rng.random() < SEVERAL, rng.random() < PROFILED
        self.profiles = drawn if profiles is None else profiles
        self.head = Head(
            *(self.loop, rng, self.network, self.machine, self.folder, self.say, self.fail),
            profiles=self.profiles,
            users=list_users(self.folder / "users") if several else None,
        )
        self.users = [
            User(self.network, rng, key, self.fail)
            for key in (
                lambda: self.head.daemon.keys.client.public.encode(),
                *((OTHER_KEY.encode,) if several else ()),
            )
        ]
        self.profiles_begun = self.donated = 0
        """Profiles, and how often a job gave nodes to one."""
        self.invariants = Invariants(self)
        self._endless: list[str] = []
        """Submissions of services that go on until they are cancelled."""
        self.submitter: dict[str, User] = {}
        """Submission → whose."""
        jobs = rng.choice((2, 3) if self.profiles else (1, 1, 2, 3))
        self.specs = [self._spec(number) for number in range(jobs)]
        self._over = self.loop.create_future()
        self.quiet_since: float | None = None
        """Time of the last fault, seconds; None: more faults follow."""
        self._until_s = 0.0

    def _spec(self, number: int) -> messages.JobSpec:
        rng, name = self.rng, f"job{number}"
        nodes = len(self.machine.nodes)
        least = 1 if self.profiles else rng.choice((1, 1, 1, 2))
        most = nodes if self.profiles else rng.randint(least, nodes)
        mode = rng.choice(MODES) if self.modes is None else rng.choice(sorted(self.modes))
        endless = mode == "service" and rng.random() < 0.5
        length = BATCH * rng.randint(*LENGTHS[self.profiles])
        self.trainings.lengths[name] = math.inf if endless else length
        self.trainings.least[name] = least
        self.submitter[f"submission-{number}"] = rng.choice(self.users)
        if endless:
            self._endless.append(f"submission-{number}")
        return messages.JobSpec(
            name,
            "",
            str(self.folder / "train.py"),
            str(self.folder),
            sys.executable,
            min_nodes=least,
            max_nodes=most,
            curve={str(n): 40.0 * n for n in range(1, nodes + 1)} if mode == "service" else None,
            mode=mode,
            profile=self.profiles,
            profile_key=name,
            key=f"submission-{number}",
            tuned=("loader-workers",) if self._layouts and mode == "restart" else (),
        )

    # --- what happened ---

    def say(self, who: str, what: str) -> None:
        """A line of the trace."""
        line = f"{self.loop.time() - 1000.0:10.6f} {who}: {what}"
        self._trace.update(line.encode())
        if self._shown is not None:
            self._shown(line)

    def fail(self, sentence: str) -> None:
        """An invariant does not hold."""
        if not self.loop.ending:
            self.say("BROKEN", sentence)
            self.broken.append(f"at {self.loop.time() - 1000.0:.3f} s: {sentence}")

    def _excused(self, launcher: Any, *, now: bool = False) -> bool:
        """Whether the daemon cannot know that the workers of this launcher train on: its node is
        cut off from it, or was a while ago. ``now``: or its connection broke a moment ago.
        """
        node = launcher.node.name
        broke = self.network.parted.get(node, -1e9)
        return self.invariants.out_of_touch(node) or (now and self.loop.time() - broke < MOMENT_S)

    def mend(self, place: str) -> None:
        """A way that was cut is whole again."""
        if self.machine.nodes.get(place) is None or self.machine.nodes[place].up:
            self.network.mend(place)

    # --- the day ---

    def run(self) -> Outcome:
        """Live through it."""
        gc_was = gc.isenabled()
        gc.disable()
        try:
            with self.site.in_place():
                self.head.start()
                for spec in self.specs:
                    at = self.rng.choice((0.1, 0.1, self.rng.uniform(0.0, 6.0)))
                    self.network.later(at, self.submitter[spec.key].submit, spec)
                self._until_s = faults.plan(self)
                self.network.later(self._until_s, self._all_well)
                self.network.later(0.0, self._look)
                try:
                    self.loop.run_until_complete(self._over)
                except Stuck as error:
                    self.fail(str(error))
                lasted_s = self.loop.time() - 1000.0
                jobs = {row.id: row.state for row in self.head.store.list_jobs()}
                self.loop.finish()
        finally:
            if gc_was:
                gc.enable()
            shutil.rmtree(self.folder, ignore_errors=True)
        return Outcome(
            self.seed,
            tuple(self.broken),
            self._trace.hexdigest(),
            lasted_s,
            self.happened,
            jobs,
        )

    def _all_well(self) -> None:
        """End all faults."""
        self.quiet_since = self.loop.time()
        for key in self._endless:
            in_s = self.rng.uniform(0.0, SERVES_S)
            self.network.later(in_s, self.submitter[key].cancel, key)
        self.say("world", "nothing goes wrong any more")
        self.machine.trouble = ""
        self.loop.thread_s = self.usual_thread_s
        self.network.slow.clear()
        self.head.sends_left = self.head.turns_left = None
        for place in [*self.machine.nodes, "login"]:
            self.mend(place)

    def _look(self) -> None:
        """Once in a while: what must hold at any time, and whether the day is over."""
        if not self.head.alive and self.rng.random() < 0.4:
            self.head.start()
        try:
            self.invariants.look()
        except Exception as error:  # a mistake of the world's own
            self.fail("the world itself fails:\n" + "".join(traceback.format_exception(error)))
        at = self.loop.time() - 1000.0
        if self.broken:
            self._over.set_result(None)
        elif self.quiet_since is not None and self._settled():
            self.invariants.at_the_end()
            self._over.set_result(None)
        elif at > self._until_s + QUIET_S:
            self.fail("the world does not come to rest: " + self._leftovers())
            self._over.set_result(None)
        else:
            self.network.later(1.0, self._look)

    def _settled(self) -> bool:
        if (
            self.machine.active_leases
            or any(user.waits for user in self.users)
            or not self.head.alive
        ):
            return False
        rows = self.head.store.list_jobs()
        ended = len(rows) >= len(self.specs) and all(JobState(row.state).ended for row in rows)
        return ended and not self.head.store.active_leases()

    def _leftovers(self) -> str:
        rows = self.head.store.list_jobs()
        jobs = [f"{r.id} is {r.state} ({r.reason})" for r in rows if not JobState(r.state).ended]
        leases = [f"lease {lease} is held" for lease in self.machine.active_leases]
        for row in self.head.store.active_leases():
            leases.append(f"lease {row.id} of {row.node} is {LeaseStatus(row.state).value}")
        return "; ".join([*jobs, *leases])


def live(
    seed: int,
    kinds: Collection[str] | None = None,
    shown: Any = None,
    modes: Collection[str] | None = None,
    profiles: bool | None = None,
    layouts: bool = False,
) -> Outcome:
    """The day of this seed."""
    return World(seed, kinds, shown, modes, profiles, layouts).run()
