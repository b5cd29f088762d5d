"""A site whose processes can be killed at any point of :mod:`malletrain.protocol.fault_points`, and
what must hold afterwards: the job runs on every node, once, and every lease has an owner.
"""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from malletrain.client import ClientError
from malletrain.protocol import env
from malletrain.protocol.fault_points import STRUCK, FaultPoint
from scavenger.interface import LeaseState
from tests.integration.embedded import Site, gone

CONFIG = 'release_after = "0 s"\nrejected_for = "2 s"\n[nodes]\nwarm_wait = "0 s"\n'
SERVICE = """
import os
from malletrain import membership

group = membership.join(str(os.getpid()))
for change in group.changes():
    if change.kind == "leaving" and change.member == group.me:
        group.report_drained()
"""


class FaultySite(Site):
    """``nodes`` virtual nodes; every process can be killed at a point that is armed."""

    limits = 'max_tries = 2\ndrain_timeout = "120 s"\n'
    """The product's own else: they are what helps where something was killed."""

    lease_wait = "20 s"
    """An agent that is killed before it reports is waited for so long."""

    def __init__(self, root: Path, nodes: int = 2, config: str = CONFIG, **more: Any) -> None:
        self.nodes = nodes
        self.faults = root / "faults"
        self.faults.mkdir(mode=0o700, parents=True)
        self.environment = {**os.environ, env.FAULTS: str(self.faults)}
        with mock.patch.dict(os.environ, self.environment):
            super().__init__(root, nodes, config=config, **more)
        text = self.config.read_text().replace("max_tries = 2", "max_tries = 10000")
        self.config.write_text(
            text.replace('lease_wait = "1 h"', f'lease_wait = "{self.lease_wait}"')
        )

    # --- a fault ---

    def arm(self, point: FaultPoint, order: str = "kill") -> None:
        """Have the first process that comes there killed."""
        new = self.faults / f"{point.name}.new"
        new.write_text(order)
        new.replace(self.faults / point.name)  # nobody may find it empty

    def came_to(self, point: FaultPoint) -> bool:
        """Whether one was."""
        return (self.faults / (point.name + STRUCK)).exists()

    def struck(self, point: FaultPoint) -> int:
        """Wait until one was; return its pid, and has a daemon that was it started again."""
        path = self.faults / (point.name + STRUCK)
        self.until(lambda: self.came_to(point), f"a process comes to {point.name}")
        pid = int(path.read_text())
        path.unlink()
        if self.daemon is not None and pid == self.daemon.pid:
            self.daemon.wait()
            self.start_daemon()
        return pid

    # --- what is done to a job ---

    def lose(self, node: str) -> None:
        """The node is taken without notice; it comes back, and is leased anew."""
        self.agents()[node].kill()

    def want(self, node: str) -> None:
        """The node is wanted back, with notice."""
        self.agents()[node].send_signal(signal.SIGTERM)

    def keep_submitting(self, submit: Callable[[], str]) -> Callable[[], str]:
        """Submit in a thread until there is an answer; return what waits for the id."""
        made: list[str] = []

        def insist() -> None:
            while not made:
                try:
                    made.append(submit())
                except ClientError:
                    continue

        thread = threading.Thread(target=insist)
        thread.start()

        def done() -> str:
            thread.join()
            return made[0]

        return done

    # --- what must be so ---

    def scheduler_leases(self) -> dict[str, str]:
        """Node → lease, of the leases that the main scheduler runs."""
        leases = self.cluster.scavenger().poll().leases
        running = [lease for lease in leases if lease.state is LeaseState.RUNNING]
        assert len({lease.node for lease in running}) == len(running), "two leases on a node"
        return {lease.node: lease.id for lease in running}

    def daemon_leases(self) -> dict[str, str]:
        """Node → lease, as the daemon has it."""
        with self.client() as client:
            return {node.node: node.lease for node in client.nodes() if node.lease}

    def members(self, job: str) -> dict[str, int]:
        """Node → pid of a service's process, as its members know each other."""
        with self.client() as client:
            return {m.node: int(m.address) for m in client.members(job).members}

    def pids(self, script: Path) -> list[int]:
        """The processes that run the script, all told."""
        return sorted(p.pid for p in self.workers(script) if not gone(p))

    def until_whole(self, job: str, script: Path) -> dict[str, int]:
        """Wait until the service runs on all nodes, by one process each, on leases that daemon and
        main scheduler agree on.
        """

        def whole() -> dict[str, int] | None:
            view = self.job(job)
            assert view.state in ("queued", "running", "suspended"), view.reason
            members = self.members(job)
            ours = sorted(members.values()) == self.pids(script)
            if (
                len(members) == self.nodes
                and ours
                and self.scheduler_leases() == self.daemon_leases()
            ):
                return members
            return None

        members = self.until(whole, f"{job} runs on all nodes again")
        assert isinstance(members, dict)
        return members

    def until_nothing_is_held(self) -> None:
        """Wait until every lease has been given back, for the daemon and for the main scheduler."""
        self.until(
            lambda: not self.scheduler_leases() and not self.daemon_leases(),
            "all leases are given back",
        )

    def words(self) -> str:
        """The daemon's log, for a failure."""
        return re.sub(r"\x1b\[[0-9;]*m", "", self.daemon_log(200))
