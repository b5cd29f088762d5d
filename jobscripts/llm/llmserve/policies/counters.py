"""The users' queues and counters of received service, which VTC and FairServe share. Pure.

They follow the virtual token counter of Sheng et al., OSDI 2024, algorithm 2: when a user without
queued requests sends one, the user's counter is raised to the least counter of the users who wait,
so that time without requests gives no credit.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping

from llmserve.generation import GenerationRequest


class UserQueues:
    """Requests that wait, a queue for each user."""

    def __init__(self) -> None:
        self._queues: dict[str, OrderedDict[str, tuple[int, GenerationRequest]]] = {}
        """User with requests → name → (number of its arrival, request), oldest first."""
        self._arrivals = 0

    def __contains__(self, user: str) -> bool:
        return user in self._queues

    def __bool__(self) -> bool:
        return bool(self._queues)

    def users(self) -> Iterable[str]:
        """Return the users who have requests."""
        return self._queues.keys()

    def heads(self) -> dict[str, tuple[int, GenerationRequest]]:
        """Return the oldest request of each user, with the number of its arrival."""
        return {user: next(iter(queue.values())) for user, queue in self._queues.items()}

    def add(self, request: GenerationRequest) -> None:
        """Queue a request."""
        self._arrivals += 1
        queue = self._queues.setdefault(request.user, OrderedDict())
        queue[request.name] = (self._arrivals, request)

    def discard(self, request: GenerationRequest) -> bool:
        """Take a request from its queue; return whether it was there."""
        queue = self._queues.get(request.user)
        if queue is None or queue.pop(request.name, None) is None:
            return False
        if not queue:
            del self._queues[request.user]
        return True


class ServiceCounters:
    """Requests by user, and service by user.

    Args:
        shares: user → share of the service, relative to others; users without an entry have 1.
    """

    def __init__(self, shares: Mapping[str, float] | None = None) -> None:
        self._shares = dict(shares or {})
        for user, share in self._shares.items():
            if not share > 0:
                raise ValueError(f"The share of {user} is {share:g}; it must be above 0.")
        self._queues = UserQueues()
        self._service: dict[str, float] = {}
        self._newest_level = 0.0
        """Counter of the user who emptied the queues last."""

    def service(self, user: str) -> float:
        """Return the counter of a user: service divided by share."""
        return self._service.get(user, 0.0)

    def least_service(self) -> float:
        """Return the least counter of the users who wait; if none waits, that of the last one."""
        if not self._queues:
            return self._newest_level
        return min(self._service[user] for user in self._queues.users())

    def add(self, request: GenerationRequest) -> None:
        """Queue a request."""
        user = request.user
        if user not in self._queues:
            self._service[user] = max(self.service(user), self.least_service())
        self._queues.add(request)

    def remove(self, request: GenerationRequest) -> bool:
        """Take a request from its queue. Return whether it was there."""
        if not self._queues.discard(request):
            return False
        if not self._queues:
            self._newest_level = self._service[request.user]
        return True

    def head(self) -> GenerationRequest | None:
        """Return the oldest request of the user with the least counter. If several users have it,
        the oldest of their requests.
        """
        return min(
            self._queues.heads().items(),
            key=lambda item: (self._service[item[0]], item[1][0]),
            default=(None, (0, None)),
        )[1][1]

    def charge(self, user: str, service: float) -> None:
        """Add to the service of a user; a negative ``service`` takes a charge back."""
        self._service[user] = self.service(user) + service / self._shares.get(user, 1.0)
