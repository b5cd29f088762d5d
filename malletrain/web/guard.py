"""Decides which requests are admitted, before anything else handles them, and what each viewer may
see.

:class:`WebGuard` answers four questions in this order:

* Is the request meant for this page? Its ``Host`` must be an allowed name, else another site could
  let its own name resolve to this host (DNS rebinding).
* Does it have the token? First in the URL, then in a cookie that no script can read; programs send
  it as ``Authorization: Bearer``. It is compared in constant time. A wrong token is logged, and
  answered with a growing delay.
* Who is the viewer? The user as whom the page runs; if a proxy is trusted, the user in its header.
* Does it change something? Then it must come from the page itself (CSRF): it needs a header that no
  form of another site can send, and if the browser states the request's origin, that must be this
  page.

Headers of every answer tell the browser what the page may load and do.

:class:`FailedLogins` decides how long each request with a wrong token waits for its answer, and
which are logged, by address. A request with the right token is never delayed, even if others from
its address had a wrong one.

:class:`Viewer` decides what a viewer may see. The page runs as one user and asks the daemon with
that user's key. If a proxy names the viewer, other users see what they would see on the command
line: their own jobs, and the public parts of others' jobs. They may cancel their own jobs, but not
submit any, because a job runs as the user whose key submits it.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import re
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode

import msgspec

from malletrain.protocol.bounds import USER_NAME
from malletrain.protocol.redaction import (
    detail_for_others,
    event_for_others,
    job_for_others,
    status_for_others,
)
from malletrain.protocol.views import EventView, JobDetail, JobView, UsageView
from malletrain.web.poller import BoardChange, MachineView
from scavenger.backoff import doubled_s


@dataclass(frozen=True)
class Viewer:
    """A user of the page. ``own``: user as whom the page runs."""

    name: str
    """The viewer's user name."""
    own: str

    @property
    def all_of_it(self) -> bool:
        """Whether the daemon's answers are for this viewer, because the page runs as this user."""
        return self.name == self.own

    def may_manage(self, owner: str) -> bool:
        """Whether this viewer may change a job of ``owner`` and see its private parts. (The daemon
        checks again for the user as whom the page runs.)
        """
        return self.all_of_it or self.name == owner

    def job(self, job: JobView) -> JobView:
        """Return the parts of a job that this viewer may see."""
        return job if self.may_manage(job.owner) else job_for_others(job)

    def detail(self, detail: JobDetail) -> JobDetail:
        """Return the details of a job that this viewer may see."""
        return detail if self.may_manage(detail.job.owner) else detail_for_others(detail)

    def event(self, event: EventView, owners: dict[str, str]) -> EventView:
        """Return the parts of an event that this viewer may see. ``owners``: job → its owner;
        unknown jobs count as another user's.
        """
        visible = not event.job or self.may_manage(owners.get(event.job, ""))
        return event if visible else event_for_others(event)

    def usage(self, rows: list[UsageView]) -> list[UsageView]:
        """Return the rows of this viewer."""
        return [row for row in rows if self.may_manage(row.user)]

    def machine(self, machine: MachineView, owners: dict[str, str]) -> MachineView:
        """Return the parts of the machine that this viewer may see. ``owners``: job → its owner."""
        machine = msgspec.structs.replace(machine, user=self.name)
        if self.all_of_it or machine.status is None:
            return machine
        late = machine.status.late.items()
        own = {job: text for job, text in late if self.may_manage(owners.get(job, ""))}
        return msgspec.structs.replace(machine, status=status_for_others(machine.status, own))

    def change(self, change: BoardChange, owners: dict[str, str]) -> BoardChange:
        """Return the parts of a change that this viewer may see."""
        if self.all_of_it:
            return change
        return msgspec.structs.replace(
            change,
            machine=self.machine(change.machine, owners),
            jobs=tuple(self.job(job) for job in change.jobs),
            events=tuple(self.event(event, owners) for event in change.events),
        )


FIRST_PAUSE_S, MAX_PAUSE_S = 0.25, 8.0
"""First and maximum delay of an answer, seconds. It doubles with each failure."""
FORGOTTEN_AFTER_S = 600.0
"""Time after which the failures of an address are forgotten, seconds."""
MAX_ADDRESSES = 1000
"""Maximum number of addresses that are recorded."""
LOG_EVERY_S = 10.0
"""Minimum interval between log lines about one address, seconds. Each has the number of
failures.
"""


@dataclass
class _Record:
    failures: int = 0
    """Number of failures."""
    at: float = 0.0
    """Time of the last failure, seconds."""
    logged_at: float = float("-inf")
    """Time of the last log line, seconds."""


@dataclass(frozen=True)
class FailedLogin:
    """One failure. ``pause_s``: delay of its answer, seconds. ``line``: line for the log; empty if
    there is none.
    """

    pause_s: float
    line: str


class FailedLogins:
    """The failures of one page. Times are on a monotonic clock."""

    def __init__(self) -> None:
        self._by_address: OrderedDict[str, _Record] = OrderedDict()

    def add(self, address: str, now: float) -> FailedLogin:
        """Record a request with a wrong token from ``address``."""
        record = self._by_address.pop(address, _Record())
        if now - record.at > FORGOTTEN_AFTER_S:
            record = _Record()
        self._by_address[address] = record
        if len(self._by_address) > MAX_ADDRESSES:
            self._by_address.popitem(last=False)
        record.failures, record.at = record.failures + 1, now
        line = ""
        if now - record.logged_at >= LOG_EVERY_S:
            record.logged_at = now
            line = f"A login with a wrong token was refused. It came from {address}"
            line += f", {record.failures} so far." if record.failures > 1 else "."
        return FailedLogin(doubled_s(FIRST_PAUSE_S, record.failures - 1, MAX_PAUSE_S), line)


log = logging.getLogger(__name__)

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]

COOKIE = "malletrain-web"
_ADDRESS = re.compile(r"[0-9a-fA-F.:]{2,45}")
OWN_HEADER = "x-malletrain"
SAFE = ("GET", "HEAD", "OPTIONS")
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}
"""Headers of every answer: no content from other sites, only the page's own scripts, no frames.
"""


@dataclass(frozen=True)
class AccessPolicy:
    """The users whom the page serves, and the names of its host.

    Args:
        own: user as whom the page runs.
        token: the token that requests need; empty if they need none (a Unix socket behind a proxy).
        hosts: allowed names in the ``Host`` header, in lower case and without port.
        user_header: header in which a trusted proxy names the viewer; empty if there is none.
        proxies: those of the ``hosts`` that are proxies. A page may have their origin although its
            requests arrive here with another ``Host``.
        cookie: name of the cookie. Browsers do not keep cookies of different ports apart, so it
            differs from that of another page on this host.
    """

    own: str
    token: str
    hosts: frozenset[str]
    user_header: str = ""
    proxies: frozenset[str] = frozenset()
    cookie: str = COOKIE

    def accepts(self, token: str) -> bool:
        """Whether this is the token."""
        return hmac.compare_digest(token.encode(), self.token.encode())


class RequestDenied(Exception):
    """A request is not admitted. ``status``: HTTP status. The message says why and what to do."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


class WrongToken(RequestDenied):
    """The request has a token, but not the one of this page."""

    def __init__(self, status: int) -> None:
        super().__init__(status, WRONG_TOKEN)


class WebGuard:
    """ASGI middleware that admits requests. Sets ``scope["state"]["viewer"]``.

    Args:
        app: the application.
        policy: decides which requests are admitted.
        sleep: delays the answer to a wrong token.

    """

    def __init__(
        self,
        app: Callable[[Scope, Receive, Send], Awaitable[None]],
        policy: AccessPolicy,
        sleep: Callable[[float], Awaitable[Any]] = asyncio.sleep,
    ) -> None:
        self._app, self._policy, self._sleep = app, policy, sleep
        self._failed_logins = FailedLogins()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request to the application, or answer why it is denied."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return

        async def guarded(message: Any) -> None:
            if message["type"] == "http.response.start":
                fixed = [(k.encode(), v.encode()) for k, v in HEADERS.items()]
                message = {**message, "headers": [*message.get("headers", ()), *fixed]}
            await send(message)

        try:
            if scope["type"] != "http":
                raise RequestDenied(400, "This page speaks HTTP only.")
            headers = _headers(scope)
            _check_host(headers, self._policy)
            if (answer := self._token_in_address(scope, headers)) is not None:
                await _answer(guarded, *answer)
                return
            self._authenticate(headers)
            viewer = self._viewer(headers)
            _check_origin(scope["method"], headers, self._policy)
        except RequestDenied as denial:
            if isinstance(denial, WrongToken):
                failure = self._failed_logins.add(_address(scope, headers), time.monotonic())
                if failure.line:
                    log.warning("%s %s", time.strftime("%Y-%m-%dT%H:%M:%S"), failure.line)
                await self._sleep(failure.pause_s)
            if scope["type"] == "http":
                await _answer(guarded, denial.status, _reason(scope, denial), ())
            return
        scope.setdefault("state", {})["viewer"] = viewer
        await self._app(scope, receive, guarded)

    def _token_in_address(
        self, scope: Scope, headers: dict[str, str]
    ) -> tuple[int, tuple[str, bytes], Iterable[tuple[str, str]]] | None:
        """Return the answer to a URL with the right token: a redirect to the URL without it, with a
        cookie. None if the URL has no token.
        """
        if scope["method"] != "GET" or not self._policy.token:
            return None
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        token = next((value for name, value in query if name == "token"), None)
        if token is None:
            return None
        if not self._policy.accepts(token):
            raise WrongToken(403)
        rest = urlencode([pair for pair in query if pair[0] != "token"])
        cookie = f"{self._policy.cookie}={token}; HttpOnly; SameSite=Strict; Path=/"
        if headers.get("x-forwarded-proto") == "https":
            cookie += "; Secure"
        page = f"./{quote(scope['path'].rsplit('/', 1)[-1], safe='')}"  # never another site
        location = f"{page}?{rest}" if rest else page
        return 303, ("text/plain", b""), (("location", location), ("set-cookie", cookie))

    def _authenticate(self, headers: dict[str, str]) -> None:
        policy = self._policy
        if not policy.token:
            return
        kind, _, bearer = headers.get("authorization", "").partition(" ")
        has_bearer = kind.lower() == "bearer"
        if has_bearer and policy.accepts(bearer.strip()):
            return
        tokens = _cookies(headers.get("cookie", ""), policy.cookie)
        if not tokens:
            raise WrongToken(401) if has_bearer else RequestDenied(401, NO_TOKEN)
        if not any(policy.accepts(token) for token in tokens):
            raise WrongToken(401)

    def _viewer(self, headers: dict[str, str]) -> Viewer:
        policy = self._policy
        if not policy.user_header:
            return Viewer(policy.own, policy.own)
        name = headers.get(policy.user_header, "")
        if not USER_NAME.fullmatch(name):
            raise RequestDenied(
                401,
                f"The proxy did not say who you are: its header {policy.user_header} is missing or "
                "no name of a user.",
            )
        return Viewer(name, policy.own)


NO_TOKEN = (
    "This page is for who started it. Open the address that 'malletrain web' printed, with its "
    "token; programs send the token as 'Authorization: Bearer TOKEN'."
)
WRONG_TOKEN = (
    "This is not the token of this page; it changes with every start. Open the address that "
    "'malletrain web' printed last."
)


def _headers(scope: Scope) -> dict[str, str]:
    """Return the request's headers. Values of repeated headers are joined, so that none of them is
    accepted alone.
    """
    joined: dict[str, str] = {}
    for name, value in scope["headers"]:
        key, text = name.decode("latin-1").lower(), value.decode("latin-1")
        joined[key] = f"{joined[key]}, {text}" if key in joined else text
    return joined


def _cookies(header: str, name: str) -> list[str]:
    """Return the values of the cookies of this name. Cookies of other pages of this host, such as
    those with JSON, do not matter; ``http.cookies`` stops at the first one that it does not know.
    """
    pairs = (part.partition("=") for part in header.split(";"))
    return [value.strip().strip('"') for key, _, value in pairs if key.strip() == name]


def _address(scope: Scope, headers: dict[str, str]) -> str:
    """Return the address of the client. Behind a Unix socket it is the last one in the proxy's
    header, because the client can set the others.
    """
    if client := scope.get("client"):
        return str(client[0])
    forwarded = headers.get("x-forwarded-for", "").rpartition(",")[2].strip()
    return forwarded if _ADDRESS.fullmatch(forwarded) else "a Unix socket"


def host_name(host: str) -> str:
    """Return a ``Host`` header without its port, in lower case."""
    match = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^:\[\]]+)(?::\d{1,5})?", host.strip())
    return match[1].lower().rstrip(".") if match else ""


def _check_host(headers: dict[str, str], policy: AccessPolicy) -> None:
    if host_name(headers.get("host", "")) not in policy.hosts:
        raise RequestDenied(
            421,
            "This page is not known by the name in the request. Use http://127.0.0.1, or allow the "
            "name: malletrain web --allow-host NAME.",
        )


def _check_origin(method: str, headers: dict[str, str], policy: AccessPolicy) -> None:
    if method in SAFE:
        return
    origin = headers.get("origin", headers.get("host", "")).rpartition("://")[2]
    is_foreign = origin != headers.get("host") and host_name(origin) not in policy.proxies
    if is_foreign or headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        raise RequestDenied(
            403, "This request came from another page than this one; nothing was done."
        )
    if OWN_HEADER not in headers:
        raise RequestDenied(
            403,
            "A request that changes something carries the header X-MalleTrain (with any value), "
            "which no form of another page can send; nothing was done.",
        )


def _reason(scope: Scope, denial: RequestDenied) -> tuple[str, bytes]:
    if "/api/" in scope["path"]:
        text = json.dumps({"error": str(denial), "code": "refused"})
        return "application/json", text.encode()
    return "text/plain; charset=utf-8", f"{denial}\n".encode()


async def _answer(
    send: Send, status: int, body: tuple[str, bytes], headers: Iterable[tuple[str, str]]
) -> None:
    kind, content = body
    all_headers = (("content-type", kind), ("content-length", str(len(content))), *headers)
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [(k.encode(), v.encode("latin-1")) for k, v in all_headers],
        }
    )
    await send({"type": "http.response.body", "body": content})
