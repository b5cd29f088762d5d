"""The operator's file of the gateway: keys, their defaults, and what a valid value is.

Reads the file and makes the policy that it describes. All errors of a file are reported at once, as
sentences that name the key.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from llmserve.gateway.errors import GatewayError
from llmserve.policies import (
    Application,
    FairServe,
    FairServeSettings,
    Fcfs,
    RequestsPerMinute,
    SchedulingPolicy,
    ThrottleLimits,
    VirtualTokenCounter,
)

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,63}")
_PAGE = re.compile(r"https?://[A-Za-z0-9\[][!-?A-~]{0,250}")
_WEIGHT = re.compile(r"(\S+)\s+(\d+(?:\.\d+)?)")

PolicyName = Literal["fairserve", "vtc", "rpm", "fcfs"]
POLICIES_OF: dict[str, tuple[PolicyName, ...]] = {
    "shares": ("fairserve", "vtc"),
    "limits.requests_per_minute": ("fairserve", "rpm"),
    "limits.overload_begins_at": ("fairserve",),
    "limits.overload_ends_at": ("fairserve",),
    "users.NAME.requests_per_minute": ("fairserve", "rpm"),
    "applications.NAME.requests_per_minute": ("fairserve",),
}
"""Key → the policies with which it has an effect. With another one it is refused."""


class ConfigurationError(GatewayError):
    """The file cannot be used; the message has a sentence for each error."""


def _named(table: dict[str, object]) -> dict[str, object]:
    for name in table:
        if not _NAME.fullmatch(name):
            raise ValueError(
                f'"{name}" is not a name; use up to 64 letters, digits and "_.@-", and begin with '
                "a letter or digit"
            )
    return table


Names = AfterValidator(_named)


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class UserSection(_Section):
    """``[users.NAME]``: someone who may have keys."""

    requests_per_minute: int | None = Field(default=None, ge=1)
    """Limit of this user, which replaces that in ``[limits]``."""


class ApplicationSection(_Section):
    """``[applications.NAME]``: the typical request of an application, for the policy fairserve. The
    weight of its requests is measured, and is between ``floor`` and ``ceiling`` times the declared
    weight.
    """

    input_tokens: float = Field(ge=0)
    """Number of tokens of a typical prompt."""
    output_tokens: float = Field(ge=0)
    """Number of tokens of a typical answer."""
    floor: float = Field(default=0.5, gt=0, le=1)
    ceiling: float = Field(default=2.0, ge=1)
    users: list[str] | None = None
    """Users who may use it; absent: everyone."""
    requests_per_minute: int | None = Field(default=None, ge=1)
    """Limit of each user in this application."""

    @model_validator(mode="after")
    def _some_tokens(self) -> ApplicationSection:
        if not self.input_tokens + self.output_tokens:
            raise ValueError("input_tokens and output_tokens are both 0; one must be above 0")
        return self


class UserSharesSection(_Section):
    """``[shares]``: the users' shares of the service, as in MalleTrain's configuration."""

    weights: list[str] = []
    """The weight of each user, such as ``["alice 2", "bob 0.5"]``."""
    others: float = Field(default=1.0, gt=0, le=1e6)
    """The weight of users who are not named."""

    @field_validator("weights")
    @classmethod
    def _weights(cls, weights: list[str]) -> list[str]:
        names = set()
        for text in weights:
            match = _WEIGHT.fullmatch(text)
            if match is None or not 0 < float(match[2]) <= 1e6 or match[1] in names:
                raise ValueError(
                    f'"{text}" is not a weight; write each name once and a number above 0, such '
                    'as "alice 2"'
                )
            names.add(match[1])
        return weights

    @property
    def factors(self) -> dict[str, float]:
        """User → weight relative to that of a user who is not named."""
        matches = [_WEIGHT.fullmatch(text) for text in self.weights]
        return {match[1]: float(match[2]) / self.others for match in matches if match}


class LimitsSection(_Section):
    """``[limits]``: requests per minute. With the policy fairserve the limit applies only under
    overload, with rpm always. :data:`POLICIES_OF` has the keys that other policies refuse.
    """

    requests_per_minute: int | None = Field(default=None, ge=1)
    """Limit of each user; absent: none."""
    overload_begins_at: float = Field(default=2.0, gt=0)
    """Overload begins at so many waiting requests for each slot."""
    overload_ends_at: float = Field(default=1.0, ge=0)
    """Overload ends below so many waiting requests for each slot."""
    open_requests: int = Field(default=1000, ge=1)
    """Maximum number of unanswered requests of one user, with every policy."""

    @model_validator(mode="after")
    def _order(self) -> LimitsSection:
        if self.overload_ends_at > self.overload_begins_at:
            raise ValueError(
                "overload_ends_at is above overload_begins_at; it must be equal or lower"
            )
        return self


class ModelSection(_Section):
    """``[models.NAME]``: a model and its replicas, which are those of a service of MalleTrain or
    engines with fixed addresses.
    """

    job: str = ""
    """Name or id of the service."""
    engines: list[str] = []
    """Addresses of engines without a service, ``HOST:PORT`` or ``unix:PATH``."""
    engine_slots: int = Field(default=64, ge=1)
    """Maximum number of concurrent requests of each of ``engines``."""
    engine_kv_tokens: int = Field(default=65_536, ge=2)
    """Maximum number of tokens of all concurrent requests of an engine."""
    engine_model: str = ""
    """Name of the model in the engines; empty: the name of this section."""
    tokenizer: str = ""
    """Folder with the model's tokenizer (Hugging Face); ``simulated``: that of the simulated
    engine. It has no default, because the ids of another model's tokenizer would give wrong
    answers.
    """
    max_request_tokens: int | None = Field(default=None, ge=2)
    """Maximum number of tokens of prompt and answer together; absent: that of the replicas."""

    @model_validator(mode="after")
    def _one_place(self) -> ModelSection:
        if bool(self.job) == bool(self.engines):
            raise ValueError("set either job or engines")
        if len(set(self.engines)) != len(self.engines):
            raise ValueError("engines names an address twice")
        if not self.tokenizer:
            raise ValueError(
                'set tokenizer, the folder of the model\'s tokenizer, or "simulated" for the '
                "simulated engine"
            )
        return self


class ScalingSection(_Section):
    """``[scaling]``: how many nodes the gateway requests."""

    idle_s: float = Field(default=600.0, gt=0)
    """Seconds without requests after which the service releases its nodes."""
    node_value: float = Field(default=100.0, gt=0)
    """Value of a node that the requests need, samples/s: comparable to the throughput that a
    training gains from a node."""
    requests_per_node: float = Field(default=16.0, gt=0)
    """Number of concurrent requests that a node answers without delay."""
    max_nodes: int = Field(default=8, ge=1, le=10_000)
    """Maximum number of nodes."""
    scale_down_s: float = Field(default=120.0, ge=0)
    """Seconds for which nodes keep their worth after requests have filled them."""
    interval_s: float = Field(default=5.0, gt=0)
    """Seconds between two checks of the queue."""


class GatewayConfiguration(_Section):
    """The whole file. Paths are relative to it."""

    listen: str = "127.0.0.1:8300"
    """Address and port."""
    url: str = ""
    """Address of the gateway in browsers, to which MalleTrain links the services of its models;
    empty: there are no links.
    """
    keys: Path = Path("keys.json")
    """File of the users' keys."""
    database: str = "sqlite:///gateway.db"
    """SQLAlchemy URL of files and batches."""
    policy: PolicyName = "fairserve"
    comment_interval_s: float = Field(default=10.0, gt=0)
    """Seconds between two comments on a stream that has no token yet."""
    max_body_bytes: int = Field(default=16 << 20, ge=1024)
    """Maximum size of a request."""
    max_file_bytes: int = Field(default=200 << 20, ge=1024)
    """Maximum size of an uploaded file."""
    keep_requests_days: float = Field(default=30.0, ge=0)
    """Days for which lengths and times of requests are kept, for ``llmserve trace``; 0: none are.
    """
    metrics_for: list[str] = []
    """Users whose keys may read ``/metrics``."""
    models: Annotated[dict[str, ModelSection], Field(min_length=1)]
    users: Annotated[dict[str, UserSection], Names] = {}
    applications: Annotated[dict[str, ApplicationSection], Names] = {}
    shares: UserSharesSection = UserSharesSection()
    limits: LimitsSection = LimitsSection()
    scaling: ScalingSection = ScalingSection()

    @field_validator("listen")
    @classmethod
    def _address(cls, listen: str) -> str:
        host, _, port = listen.rpartition(":")
        if not host or not port.isdigit() or int(port) > 65535:
            raise ValueError('write an address and a port, such as "127.0.0.1:8300"')
        return listen

    @field_validator("url")
    @classmethod
    def _page(cls, url: str) -> str:
        if url and not _PAGE.fullmatch(url):
            raise ValueError('write an address such as "https://llm.example.org/", or leave it out')
        return url

    @model_validator(mode="after")
    def _declared(self) -> GatewayConfiguration:
        named = dict.fromkeys(self.shares.factors, "shares.weights")
        named |= dict.fromkeys(self.metrics_for, "metrics_for")
        for application, section in self.applications.items():
            named |= dict.fromkeys(section.users or (), f"applications.{application}.users")
        for name, place in named.items():
            if name not in self.users:
                raise ValueError(
                    f'{place} names "{name}", who is not a user; add [users.{name}] or correct it'
                )
        if self.policy == "rpm" and self.limits.requests_per_minute is None:
            raise ValueError("the policy rpm needs limits.requests_per_minute; set it")
        return self

    @model_validator(mode="after")
    def _effective(self) -> GatewayConfiguration:
        """Check that each key that is set has an effect with the policy."""
        idle = [
            f"{key} (for {' and '.join(POLICIES_OF[kind])})"
            for kind, keys in self._policy_keys().items()
            if self.policy not in POLICIES_OF[kind]
            for key in keys
        ]
        if idle:
            raise ValueError(
                f"with the policy {self.policy} these keys have no effect: {', '.join(idle)}; "
                "remove them, or set another policy"
            )
        return self

    def _policy_keys(self) -> dict[str, list[str]]:
        """Key of :data:`POLICIES_OF` → where it is set."""
        limits = ("requests_per_minute", "overload_begins_at", "overload_ends_at")
        return {
            "shares": ["shares"] if self.shares.model_fields_set else [],
            **{
                f"limits.{name}": [f"limits.{name}"]
                for name in limits
                if name in self.limits.model_fields_set
            },
            "users.NAME.requests_per_minute": [
                f"users.{name}.requests_per_minute" for name in self._user_limits()
            ],
            "applications.NAME.requests_per_minute": [
                f"applications.{name}.requests_per_minute" for name in self._application_limits()
            ],
        }

    @property
    def address(self) -> tuple[str, int]:
        """Host and port to listen on."""
        host, _, port = self.listen.rpartition(":")
        return host.strip("[]"), int(port)

    def make_policy(self) -> SchedulingPolicy:
        """Return a new policy, as the file describes it."""
        if self.policy == "fcfs":
            return Fcfs()
        if self.policy == "vtc":
            return VirtualTokenCounter(self.shares.factors)
        if self.policy == "rpm":
            assert self.limits.requests_per_minute is not None
            return RequestsPerMinute(self.limits.requests_per_minute, self._user_limits())
        return FairServe(
            FairServeSettings(self._policy_applications(), self.shares.factors, self._throttle())
        )

    def _policy_applications(self) -> dict[str, Application]:
        return {
            name: Application(
                section.input_tokens,
                section.output_tokens,
                section.floor,
                section.ceiling,
                None if section.users is None else frozenset(section.users),
            )
            for name, section in self.applications.items()
        }

    def _throttle(self) -> ThrottleLimits:
        return ThrottleLimits(
            self.limits.requests_per_minute,
            self._user_limits(),
            self._application_limits(),
            self.limits.overload_begins_at,
            self.limits.overload_ends_at,
        )

    def _user_limits(self) -> dict[str, int]:
        """User → its own limit of requests per minute."""
        return {
            name: section.requests_per_minute
            for name, section in self.users.items()
            if section.requests_per_minute is not None
        }

    def _application_limits(self) -> dict[str, int]:
        """Application → limit of each user in it, requests per minute."""
        return {
            name: section.requests_per_minute
            for name, section in self.applications.items()
            if section.requests_per_minute is not None
        }


def read(path: Path) -> GatewayConfiguration:
    """Return the configuration in a file; its paths are relative to the file.

    Raises:
        ConfigurationError: the file cannot be read, is no TOML, or has wrong values.
    """
    try:
        with open(path, "rb") as file:
            values = tomllib.load(file)
    except FileNotFoundError:
        raise ConfigurationError(
            f"There is no file {path}; name the gateway's configuration with --config."
        ) from None
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} is no TOML: {error}.") from None
    try:
        configuration = GatewayConfiguration.model_validate(values)
    except ValidationError as error:
        raise ConfigurationError("\n".join(_sentences(path, error))) from None
    folder = path.resolve().parent
    return configuration.model_copy(
        update={
            "keys": folder / configuration.keys.expanduser(),
            "database": _database(configuration.database, folder),
        }
    )


def _database(url: str, folder: Path) -> str:
    """The URL; the relative path of an SQLite file is relative to the configuration."""
    prefix = "sqlite:///"
    if url.startswith(prefix) and not url.startswith(prefix + "/") and url != prefix:
        return prefix + str(folder / url.removeprefix(prefix))
    return url


def _sentences(path: Path, error: ValidationError) -> list[str]:
    sentences = []
    for problem in error.errors():
        key = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            sentence = f"{path}: there is no key {key}; correct or remove it."
        elif problem["type"] == "missing":
            sentence = f"{path}: {key} is missing; set it."
        else:
            reason = problem["msg"].removeprefix("Value error, ")
            value = problem["input"]
            shown = f" (it is {value!r})" if isinstance(value, (str, int, float)) else ""
            sentence = f"{path}: {key + ': ' if key else ''}{reason}{shown}."
        sentences.append(sentence)
    return sentences
