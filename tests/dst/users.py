"""Users on a login node: each submits jobs, asks again where no answer comes, cancels some, gives
some other limits. A site may serve another user besides the one who runs the daemon.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from malletrain.identity.keys import new_pair
from malletrain.protocol import messages, wire
from tests.dst.network import Connection, Network

PATIENCE_S = 3.0
"""After so long without an answer a request is made again, under the name of its submission."""


OTHER, OTHER_KEY = "bob", new_pair().public
"""A user besides the one who runs the daemon."""


def list_users(path: Path) -> Path:
    """Write the site's list of users."""
    path.write_text(f"{OTHER} {OTHER_KEY}\n", "utf-8")
    path.chmod(0o644)
    return path


class User:
    """One user of the site, with the daemon's own key or that of the list. ``failed`` is called
    with refusals.
    """

    def __init__(
        self,
        network: Network,
        rng: Random,
        key: Callable[[], bytes],
        failed: Callable[[str], None],
    ) -> None:
        self.place = "login"
        self._network, self._rng, self._key, self._failed = network, rng, key, failed
        self._connection: Connection | None = None
        self._dialling = False
        self._count = 0
        self._requests: dict[str, tuple[str, dict[str, Any], Callable[[Any], None]]] = {}
        self._refusable: set[str] = set()
        """Requests that the daemon may have reasons to refuse."""
        self.jobs: dict[str, str] = {}
        """Submission → job."""
        self.cancelled: set[str] = set()
        """Jobs that were to be cancelled."""

    @property
    def key(self) -> bytes:
        return self._key()

    @property
    def waits(self) -> bool:
        """Whether an answer is to come yet."""
        return bool(self._requests)

    def submit(self, spec: messages.JobSpec) -> None:
        """Submit until there is an answer."""

        def answered(data: Any) -> None:
            job = data["job"]["id"]
            first_job = self.jobs.setdefault(spec.key, job)
            if first_job != job:
                self._failed(f"submission {spec.key} is two jobs, {first_job} and {job}")

        self._ask("submit", {"spec": msgspec.to_builtins(spec)}, answered)

    def cancel(self, submission: str) -> None:
        """Cancel what was submitted, or will be, once an answer has come."""
        if job := self.jobs.get(submission):
            self.cancelled.add(job)
            self._ask("cancel", {"jobs": [job]}, lambda data: None)
        else:
            self._network.later(1.0, self.cancel, submission)

    def scale(self, submission: str, least: int, most: int) -> None:
        """Give what was submitted other limits, if its job is there and may have them."""
        if job := self.jobs.get(submission):
            params = {"job": job, "min_nodes": least, "max_nodes": most}
            self._refusable.add(self._ask("scale", params, lambda data: None))

    def meddle(self, job: str) -> None:
        """Try to cancel somebody else's job."""
        self._ask("cancel", {"jobs": [job]}, lambda data: None)

    def _ask(self, op: str, params: dict[str, Any], answered: Callable[[Any], None]) -> str:
        self._count += 1
        number = f"r{self._count}"
        self._requests[number] = op, params, answered
        self._send(number)
        return number

    def _send(self, number: str) -> None:
        if number not in self._requests:
            return
        if self._connection is not None:
            op, params, _ = self._requests[number]
            self._connection.up.put(wire.encode(wire.request(number, op, params)))
        elif not self._dialling:
            self._dialling = True
            self._network.dial(self)
        self._network.later(PATIENCE_S, self._send, number)

    # --- the network's side ---

    def connected(self, connection: Connection) -> None:
        self._connection, self._dialling = connection, False
        for number in list(self._requests):
            op, params, _ = self._requests[number]
            connection.up.put(wire.encode(wire.request(number, op, params)))

    def refused(self) -> None:
        self._network.later(0.5, self._network.dial, self)

    def broken(self, connection: Connection) -> None:
        if connection is self._connection:
            self._connection = None

    def arrived(self, connection: Connection, frames: list[bytes]) -> None:
        reply = wire.decode(frames)
        if not isinstance(reply, messages.Reply) or reply.id not in self._requests:
            return
        if not reply.ok and reply.code == "internal":
            self._failed(f"the daemon failed at a request: {reply.error}")
        elif not reply.ok and reply.id not in self._refusable:
            self._failed(f"a request was refused: {reply.error}")
        _, _, answered = self._requests.pop(reply.id)
        if reply.ok:
            answered(reply.data)
