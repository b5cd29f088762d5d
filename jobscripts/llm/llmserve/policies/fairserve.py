"""FairServe (Khan et al., Ensuring Fair LLM Serving Amid Diverse Applications, 2024), changed so
that no user can gain service at the expense of others. Pure.

* Service is counted relative to that of a typical request of the application, so that users of an
  application with long prompts or answers get as many answers as others. The prompt is charged when
  its request leaves the queue and the answer token by token, as in VTC. (If requests were charged
  at their end, one user could fill the first batch.)
* The typical request of an application is an average in which the operator and each user have one
  vote, so that no user has more than half of the votes. The operator sets a floor and a ceiling.
* Applications are those that the operator declares. Other requests count as in VTC.
* Further calls of an interaction go before first calls, while their user is at most
  ``interaction_bound`` ahead of those who wait. A user who marks every request as part of an
  interaction gains that once and no more.
* Users are throttled only under overload, and never within an interaction. An interaction has at
  most ``max_calls`` calls: further calls count as first ones.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

from llmserve.generation import GenerationRequest, RequestRefusal
from llmserve.policies.counters import ServiceCounters, UserQueues
from llmserve.policies.interface import INPUT_WEIGHT, OUTPUT_WEIGHT, Load
from llmserve.policies.throttle import Throttle, ThrottleLimits

REFERENCE_SERVICE = INPUT_WEIGHT * 256 + OUTPUT_WEIGHT * 256
"""Service of a request of weight 1: 256 tokens in, 256 out."""
USER_AVERAGE_STEP = 0.1
"""Weight of the newest request in a user's average, after the first ten requests."""


@dataclass(frozen=True)
class Application:
    """An application that the operator declares."""

    input_tokens: float
    """Number of tokens of a typical prompt."""
    output_tokens: float
    """Number of tokens of a typical answer."""
    floor: float = 0.5
    """Smallest factor by which measurements change the declared service."""
    ceiling: float = 2.0
    """Largest factor by which measurements change the declared service."""
    users: frozenset[str] | None = None
    """Users who may use it; None: everyone. Requests of other users have no application."""

    def __post_init__(self) -> None:
        if self.service <= 0:
            raise ValueError("An application needs tokens in its typical prompt or answer.")
        if not 0 < self.floor <= 1 <= self.ceiling:
            raise ValueError(
                f"The floor is {self.floor:g} and the ceiling {self.ceiling:g}; the floor must be "
                "above 0 and at most 1, and the ceiling at least 1."
            )

    @property
    def service(self) -> float:
        """Service of a typical request."""
        return INPUT_WEIGHT * self.input_tokens + OUTPUT_WEIGHT * self.output_tokens


class ApplicationWeight:
    """Measures the service of a typical request of an application.

    Args:
        application: the application as the operator declares it.
    """

    def __init__(self, application: Application) -> None:
        self.application = application
        self._averages: dict[str, tuple[int, float]] = {}
        """User → (number of requests, average service)."""

    def observe(self, user: str, service: float) -> None:
        """Count a request that ended, in the average of its user."""
        count, average = self._averages.get(user, (0, 0.0))
        step = max(USER_AVERAGE_STEP, 1 / (count + 1))
        self._averages[user] = (count + 1, average + step * (service - average))

    @property
    def service(self) -> float:
        """Service of a typical request: the average of the votes, between floor and ceiling."""
        declared = self.application.service
        low, high = self.application.floor * declared, self.application.ceiling * declared
        votes = [min(max(average, low), high) for _, average in self._averages.values()]
        return (declared + sum(votes)) / (1 + len(votes))

    @property
    def weight(self) -> float:
        """:attr:`service` ÷ :data:`REFERENCE_SERVICE`."""
        return self.service / REFERENCE_SERVICE


@dataclass
class OpenInteraction:
    """An interaction of which at least one call was posted."""

    calls: int = 0
    """Number of calls that were admitted after the first."""
    used: float = 0.0
    """Time of the last call."""


@dataclass(frozen=True)
class FairServeSettings:
    """The operator's settings."""

    applications: Mapping[str, Application] = field(default_factory=dict)
    """Name → application."""
    shares: Mapping[str, float] = field(default_factory=dict)
    """User → share of the service, relative to others; users without an entry have 1."""
    limits: ThrottleLimits = field(default_factory=ThrottleLimits)
    """Limits under overload."""
    interaction_bound: float = 4 * REFERENCE_SERVICE
    """Maximum service by which a user may be ahead of those who wait if further calls of the user's
    interactions are to go before them."""
    max_calls: int = 16
    """Maximum number of calls of an interaction."""
    interaction_timeout_s: float = 600.0
    """An interaction without calls for so long has ended."""
    max_interactions: int = 32
    """Maximum number of open interactions of one user; the oldest end first."""


class FairServe:
    """Gives each user the number of answers of the user's share, and does not interrupt
    interactions.

    Args:
        settings: the settings that the operator makes.
    """

    def __init__(self, settings: FairServeSettings | None = None) -> None:
        self._settings = settings or FairServeSettings()
        self._counters = ServiceCounters(self._settings.shares)
        self._throttle = Throttle(self._settings.limits)
        self._weights = {
            name: ApplicationWeight(application)
            for name, application in self._settings.applications.items()
        }
        self._interactions: dict[str, OrderedDict[str, OpenInteraction]] = {}
        """User → interaction → its record, the one used longest ago first."""
        self._calls = UserQueues()
        """Waiting calls that continue an interaction."""
        self._further_calls: set[str] = set()
        """Names of the calls that continue an interaction and were not posted."""
        self._charged_weight: dict[str, float] = {}
        """Request that left the queue → weight by which it is charged until it ends."""

    @property
    def overloaded(self) -> bool:
        """Whether limits count now."""
        return self._throttle.overloaded

    def weight(self, request: GenerationRequest) -> float:
        """Return what the service of a request is divided by; 1 without an application."""
        weight = self._weights.get(self._application(request))
        return 1.0 if weight is None else weight.weight

    def admit(self, request: GenerationRequest, load: Load, now: float) -> RequestRefusal | None:
        """Refuse a first call that exceeds a limit under overload."""
        application = self._application(request)
        if self._continues(request, now) is not None:
            self._throttle.observe(load)
            self._throttle.count(request, application, now)
            return None
        return self._throttle.check(request, application, load, now)

    def enqueue(self, request: GenerationRequest, now: float) -> None:
        """Queue a request; its user is lifted to those who wait."""
        self._counters.add(request)
        interaction = self._continues(request, now)
        if interaction is not None:
            interaction.calls += 1
            interaction.used = now
            self._calls.add(request)
            self._further_calls.add(request.name)

    def head(self, now: float) -> GenerationRequest | None:
        """Return the oldest call of an interaction whose user is not too far ahead, else the
        oldest request of the user with the least service.
        """
        if self._calls:
            bound = self._counters.least_service() + self._settings.interaction_bound
            calls = [
                head
                for user, head in self._calls.heads().items()
                if self._counters.service(user) <= bound
            ]
            if calls:
                return min(calls, key=lambda head: head[0])[1]
        return self._counters.head()

    def take(self, request: GenerationRequest) -> None:
        """Charge the prompt."""
        self._counters.remove(request)
        self._calls.discard(request)
        weight = self._charged_weight[request.name] = self.weight(request)
        self._counters.charge(request.user, INPUT_WEIGHT * len(request.prompt) / weight)

    def begin(self, request: GenerationRequest, now: float) -> None:
        """Open the request's interaction."""
        is_further = request.name in self._further_calls
        self._further_calls.discard(request.name)
        if request.interaction:
            self._begin_call(request, is_further, now)

    def withdraw(self, request: GenerationRequest) -> None:
        """Refund the charge of a request that has left the queue; else remove it from its queue."""
        self._further_calls.discard(request.name)
        if self._counters.remove(request):
            self._calls.discard(request)
        else:
            weight = self._charged_weight.pop(request.name)
            self._counters.charge(request.user, -INPUT_WEIGHT * len(request.prompt) / weight)

    def generated(self, request: GenerationRequest, count: int) -> None:
        """Charge tokens of the answer."""
        weight = self._charged_weight[request.name]
        self._counters.charge(request.user, OUTPUT_WEIGHT * count / weight)

    def ended(self, request: GenerationRequest, generated: int, now: float) -> None:
        """Count the request in the average of its application."""
        del self._charged_weight[request.name]
        weight = self._weights.get(self._application(request))
        if weight is not None and generated:
            service = INPUT_WEIGHT * len(request.prompt) + OUTPUT_WEIGHT * generated
            weight.observe(request.user, service)
        interactions = self._interactions.get(request.user) or OrderedDict()
        if request.interaction in interactions and not request.ends_interaction:
            interactions[request.interaction].used = now

    def _application(self, request: GenerationRequest) -> str:
        application = self._settings.applications.get(request.application)
        if application is None:
            return ""
        if application.users is not None and request.user not in application.users:
            return ""
        return request.application

    def _continues(self, request: GenerationRequest, now: float) -> OpenInteraction | None:
        """Return the open interaction that a request continues; None if there is none."""
        interactions = self._interactions.get(request.user)
        interaction = interactions.get(request.interaction) if interactions else None
        if (
            interaction is None
            or interaction.calls + 1 >= self._settings.max_calls
            or now - interaction.used > self._settings.interaction_timeout_s
        ):
            return None
        return interaction

    def _begin_call(self, request: GenerationRequest, is_further: bool, now: float) -> None:
        """Record a posted call of an interaction: open, use or close the interaction."""
        interactions = self._interactions.setdefault(request.user, OrderedDict())
        if request.ends_interaction:
            interactions.pop(request.interaction, None)
        elif not is_further and self._continues(request, now) is None:
            interactions[request.interaction] = OpenInteraction(used=now)
        if request.interaction in interactions:
            interactions[request.interaction].used = now
            interactions.move_to_end(request.interaction)
        while len(interactions) > self._settings.max_interactions:
            interactions.popitem(last=False)
        if not interactions:
            del self._interactions[request.user]
