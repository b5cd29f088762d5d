"""Serves the page: builds the application, and decides where it listens, who is admitted there, and
how its address is shown.

:func:`make_access_policy` decides which options can be combined: a header that names the viewer is
trusted only if the proxy alone can send it. :func:`make_app` joins API, page and guard.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import secrets
import socket
import tempfile
import webbrowser
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException
from starlette.middleware.gzip import GZipMiddleware

from malletrain import __version__
from malletrain.client import ClientError, Connection
from malletrain.render.live import PollAnswers
from malletrain.submission.error import SpecError
from malletrain.web.api import API, Routes, WebRefusal, reply
from malletrain.web.guard import COOKIE, AccessPolicy, WebGuard, host_name
from malletrain.web.poller import Board, ConnectionPool, HarvestView, Poller
from malletrain.web.schema import ApiProblem, describe

STATIC = Path(__file__).parent / "static"
STATUS = {"usage": 400, "unreachable": 503, "busy": 503, "internal": 500}
"""Error code of the daemon → HTTP status; 409 for other codes. Those from 500 say nothing about the
request itself: the page sends it again.
"""


def make_app(connect: Callable[[], Connection], policy: AccessPolicy, home: Path) -> FastAPI:
    """Return the application of one page.

    Args:
        connect: opens a connection to the daemon.
        policy: decides who is admitted.
        home: the state directory with this user's sweeps.

    Returns:
        The application. ``state.end()`` ends its streams.

    """
    board, connections = Board(policy.own), ConnectionPool(connect)
    loop: asyncio.AbstractEventLoop | None = None

    def tell(answers: PollAnswers, harvest: HarvestView | None) -> None:
        def take() -> None:
            if board.machine.away:
                connections.close_idle()
            board.update(answers, harvest)

        _later(take)

    def away(sentence: str) -> None:
        _later(lambda: board.away(sentence))

    def _later(function: Callable[[], object]) -> None:
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(function)

    poller = Poller(connect, tell, away)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        nonlocal loop
        loop = asyncio.get_running_loop()
        poller.start()
        try:
            yield
        finally:
            poller.end()
            connections.close()

    app = FastAPI(
        title="MalleTrain",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url=f"{API}/openapi.json",
        lifespan=lifespan,
        # Submitted data are private, even if the environment enables telemetry.
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
    )
    app.state.end = board.end
    app.openapi = lambda: describe(app)  # type: ignore[method-assign]
    app.include_router(Routes(board, poller, connections, home).router)
    app.mount("/", StaticFiles(directory=STATIC, html=True))
    app.add_exception_handler(ClientError, _client_error)
    app.add_exception_handler(WebRefusal, _refusal)
    app.add_exception_handler(SpecError, _spec_error)
    app.add_exception_handler(RequestValidationError, _form_error)
    app.add_exception_handler(HTTPException, _http_error)
    # Streams are not compressed; the rest of the page becomes small.
    app.add_middleware(GZipMiddleware, minimum_size=1000, compresslevel=1)
    app.add_middleware(WebGuard, policy=policy)
    return app


async def _client_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ClientError)
    return reply(ApiProblem(str(error), error.code), STATUS.get(error.code, 409))


async def _refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, WebRefusal)
    return reply(ApiProblem(str(error), error.code), error.status)


async def _spec_error(request: Request, error: Exception) -> Response:
    return reply(ApiProblem(str(error), "usage"), 400)


async def _form_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    problems = [
        f"{'.'.join(str(part) for part in each['loc'][1:]) or 'the body'}: {each['msg']}"
        for each in error.errors()
    ]
    return reply(ApiProblem(f"The request is malformed: {'; '.join(problems)}.", "usage"), 400)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    missing = error.status_code == 404
    sentence = "There is nothing at this path." if missing else f"{error.detail}."
    response = reply(ApiProblem(sentence, "usage"), error.status_code)
    response.headers.update(error.headers or {})
    return response


FIRST_PORT = 8870
"""The first port to try, so that an existing tunnel keeps working."""
PORTS = 20
"""Number of ports to try before any free one."""
ALWAYS = ("127.0.0.1", "localhost", "[::1]")
"""Names of the page that are always allowed."""
SHUTDOWN_TIMEOUT_S = 1
"""Time for which the server waits for the streams of viewers at its end, seconds."""
REDIRECT = """<!doctype html><meta charset="utf-8"><title>MalleTrain</title>
<meta http-equiv="refresh" content="0; url={url}"><a href="{url}">MalleTrain</a>
"""


class WebError(RuntimeError):
    """The page cannot be served with these options; the message is a sentence."""


@dataclass(frozen=True)
class ListenAddress:
    """Address of the page: ``host`` and ``port`` (0 for any free port), or the Unix socket
    ``path``.
    """

    host: str = "127.0.0.1"
    port: int = 0
    path: str = ""

    @property
    def loopback(self) -> bool:
        """Whether only this host can connect."""
        if self.path or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def parse_address(text: str) -> ListenAddress:
    """Parse ``HOST:PORT``, ``:PORT``, ``[HOST]:PORT``, ``HOST`` or ``unix:PATH``.

    Raises WebError.
    """
    if text.startswith("unix:"):
        if not text[5:]:
            raise WebError(
                "--listen unix: names no path; give one, such as unix:/run/malletrain/web."
            )
        return ListenAddress(path=os.path.abspath(text[5:]))
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, port = text, "0"
    if not port.isdecimal() or int(port) > 65535:
        raise WebError(f"--listen {text}: '{port}' is no port; give HOST:PORT or unix:PATH.")
    return ListenAddress(host.strip("[]") or "127.0.0.1", int(port))


def make_access_policy(
    address: ListenAddress, own: str, token: str, hosts: Sequence[str], user_header: str
) -> AccessPolicy:
    """Return the access policy of a page.

    Args:
        address: address of the page.
        own: user as whom the page runs.
        token: token that requests need; empty to generate one.
        hosts: further names of the page.
        user_header: header of a proxy that names the viewer; empty if there is none.

    Raises:
        WebError: the options do not go together.

    """
    if user_header and not address.loopback:
        raise WebError(
            f"--trust-header {user_header}: at {address.host} anybody could send it. Listen on the "
            "loopback or, better, on a Unix socket that only the proxy may open."
        )
    if user_header and not address.path and not token:
        raise WebError(
            "--trust-header on the loopback: every user of this host can connect there. Give the "
            "proxy a token to send (MALLETRAIN_WEB_TOKEN here, 'Authorization: Bearer TOKEN' "
            "there), or listen on a Unix socket."
        )
    if token and (len(token) < 16 or not token.isascii() or not token.replace("-", "").isalnum()):
        raise WebError(
            "The token in MALLETRAIN_WEB_TOKEN is too easy; give 16 letters and digits or more."
        )
    behind_proxy = bool(user_header and address.path)
    proxies = frozenset(host_name(name) for name in hosts)
    names = {*ALWAYS, *proxies}
    if not address.path and address.host not in ("0.0.0.0", "::"):
        names.add(host_name(f"[{address.host}]" if ":" in address.host else address.host))
    if "" in names:
        raise WebError("--allow-host: that is no name of a host.")
    # No token is needed behind a proxy on a Unix socket: only the proxy can connect.
    required_token = "" if behind_proxy and not token else token or secrets.token_hex(32)
    return AccessPolicy(
        own, required_token, frozenset(names), user_header.lower(), proxies - {*ALWAYS}
    )


def bind(address: ListenAddress) -> socket.socket:
    """Return a listening socket at ``address``. Raises WebError."""
    if address.path:
        return _unix(address.path)
    ports = [address.port] if address.port else [*range(FIRST_PORT, FIRST_PORT + PORTS), 0]
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    why = ""
    for port in ports:
        listening = socket.socket(family, socket.SOCK_STREAM)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((address.host, port))
            listening.listen(128)
        except OSError as error:
            listening.close()
            why = error.strerror or str(error)
            continue
        return listening
    raise WebError(f"The address {address.host}:{address.port} cannot be used: {why}.")


def _unix(path: str) -> socket.socket:
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
            listening.connect(path)
            raise WebError(f"Another page listens at {path}; give another path.")
        if os.path.exists(path):
            os.unlink(path)
        listening.close()
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        old_umask = os.umask(0o117)  # writable for the group of its directory, which is the proxy's
        try:
            listening.bind(path)
        finally:
            os.umask(old_umask)
        listening.listen(128)
    except OSError as error:
        listening.close()
        raise WebError(f"The socket {path} cannot be used: {error.strerror or error}.") from None
    return listening


def url_of(address: ListenAddress, listening: socket.socket, token: str) -> str:
    """Return the URL to open, with the token; for a Unix socket its path without the token.

    Args:
        address: address of the page.
        listening: its socket.
        token: token that requests need.
    """
    if address.path:
        return f"unix:{address.path}"
    port = listening.getsockname()[1]
    host = address.host
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}/?token={token}"


@contextlib.contextmanager
def in_browser(url: str) -> Iterator[None]:
    """Open ``url`` in this user's browser, if there is one. A private file redirects to it, because
    every user of the host can read the arguments of a process.
    """
    handle, path = tempfile.mkstemp(prefix="malletrain-web-", suffix=".html")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(REDIRECT.format(url=url))
        with contextlib.suppress(webbrowser.Error):
            webbrowser.open(Path(path).as_uri())
        yield
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)


def serve(
    connect: Callable[[], Connection],
    address: ListenAddress,
    policy: AccessPolicy,
    say: Callable[[str], None],
    home: Path,
    *,
    browser: bool = False,
) -> None:
    """Serve the page until a signal.

    Args:
        connect: opens a connection to the daemon.
        address: address to listen on.
        policy: decides which requests are admitted.
        say: shows the URL to the user.
        home: the state directory with this user's sweeps.
        browser: whether to open the URL in a browser.

    Raises:
        WebError: the address cannot be used.

    """
    listening = bind(address)
    if not address.path:
        port = listening.getsockname()[1]
        policy = replace(policy, cookie=f"{COOKIE}-{port}")
    url = url_of(address, listening, policy.token)
    say(url)
    app = make_app(connect, policy, home)
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        lifespan="on",
        server_header=False,
        proxy_headers=False,
        ws="none",
        timeout_graceful_shutdown=SHUTDOWN_TIMEOUT_S,
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.closing(listening))
        if address.path:
            stack.callback(_unlink, address.path)
        if browser:
            stack.enter_context(in_browser(url))
        _PageServer(config, app.state.end).run(sockets=[listening])


class _PageServer(uvicorn.Server):
    """Server that ends the streams first when it shuts down, because they never end by
    themselves.
    """

    def __init__(self, config: uvicorn.Config, end: Callable[[], None]) -> None:
        super().__init__(config)
        self._end = end

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._end()
        await super().shutdown(sockets)


def _unlink(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)
