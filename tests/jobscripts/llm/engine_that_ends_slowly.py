"""An engine that generates nothing. After SIGTERM it goes on until it has said at ``/health`` that
it is not well. ``SOCKET``.
"""

from __future__ import annotations

import signal
import sys
from http.server import BaseHTTPRequestHandler
from socketserver import UnixStreamServer

is_ending = has_said = False


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        global has_said
        status = 404
        if self.path == "/health":
            status, has_said = (503 if is_ending else 200), is_ending
        self.send_response(status)
        self.end_headers()
        self.wfile.write(b"stopping" if has_said else b"")

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(404)
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        """Do nothing: a Unix socket has no address of the client."""


def end(*_: object) -> None:
    global is_ending
    is_ending = True


signal.signal(signal.SIGTERM, end)
with UnixStreamServer(sys.argv[1], Handler) as server:
    while not has_said:
        server.handle_request()
