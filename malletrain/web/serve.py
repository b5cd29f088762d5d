"""Serving the page: where it listens, who is let in there, and how its address is told.

Decides what goes together: a header that says who looks is believed only where nobody but the proxy
can send one.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import secrets
import socket
import tempfile
import webbrowser
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import uvicorn

from malletrain.client import Connection
from malletrain.web.app import make_app
from malletrain.web.guard import COOKIE, AccessPolicy, host_name

FIRST_PORT = 8870
"""The port that is tried first, so that a tunnel finds it again."""
PORTS = 20
ALWAYS = ("127.0.0.1", "localhost", "[::1]")
LEAVE_S = 1
"""How long the end waits for viewers that still watch."""
REDIRECT = """<!doctype html><meta charset="utf-8"><title>MalleTrain</title>
<meta http-equiv="refresh" content="0; url={url}"><a href="{url}">MalleTrain</a>
"""


class WebError(RuntimeError):
    """The page cannot be served like this; the message is a sentence."""


@dataclass(frozen=True)
class ListenAddress:
    """Where the page listens: ``host`` and ``port`` (0: one that is free), or the Unix socket
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
    """The address in ``HOST:PORT``, ``:PORT``, ``[HOST]:PORT``, ``HOST`` or ``unix:PATH``.

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
    """The access policy of the page at ``address``.

    ``token``: what visitors have to know, empty: one is drawn. ``hosts``: further names of the
    page. ``user_header``: of a proxy, empty: none. Raises WebError.
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
    # A second wins over nothing: without a header the socket's permissions do not say who looks.
    made = "" if behind_proxy and not token else token or secrets.token_hex(32)
    return AccessPolicy(own, made, frozenset(names), user_header.lower(), proxies - {*ALWAYS})


def bind(address: ListenAddress) -> socket.socket:
    """A listening socket at ``address``. Raises WebError."""
    if address.path:
        return _unix(address.path)
    ports = [address.port] if address.port else [*range(FIRST_PORT, FIRST_PORT + PORTS), 0]
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    why = ""
    for port in ports:
        made = socket.socket(family, socket.SOCK_STREAM)
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind((address.host, port))
            made.listen(128)
        except OSError as error:
            made.close()
            why = error.strerror or str(error)
            continue
        return made
    raise WebError(f"The address {address.host}:{address.port} cannot be used: {why}.")


def _unix(path: str) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
            made.connect(path)
            raise WebError(f"Another page listens at {path}; give another path.")
        if os.path.exists(path):
            os.unlink(path)
        made.close()
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        before = os.umask(0o117)  # for the group of its directory, which is the proxy's
        try:
            made.bind(path)
        finally:
            os.umask(before)
        made.listen(128)
    except OSError as error:
        made.close()
        raise WebError(f"The socket {path} cannot be used: {error.strerror or error}.") from None
    return made


def url_of(address: ListenAddress, listening: socket.socket, token: str) -> str:
    """The address to open, with the token; that of a Unix socket has none."""
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
    """Open ``url`` in this user's browser, if there is one. By way of a private file: everybody on
    the host can read the arguments of a process.
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
    """Serve the page until a signal ends it. ``say``: tells a person the address; ``home``: the
    state directory with this user's sweeps; ``browser``: opens it as well. Raises WebError.
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
        timeout_graceful_shutdown=LEAVE_S,
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.closing(listening))
        if address.path:
            stack.callback(_unlink, address.path)
        if browser:
            stack.enter_context(in_browser(url))
        _PageServer(config, app.state.end).run(sockets=[listening])


class _PageServer(uvicorn.Server):
    """Ends the streams first, which have no end of their own."""

    def __init__(self, config: uvicorn.Config, end: Callable[[], None]) -> None:
        super().__init__(config)
        self._end = end

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._end()
        await super().shutdown(sockets)


def _unlink(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)
