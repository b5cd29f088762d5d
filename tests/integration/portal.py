"""What Open OnDemand does with an interactive app, for tests: it renders the templates, runs the
session's script on a node, and leads a browser there by ``/rnode/HOST/PORT/``.

There is no package of Open OnDemand here. This follows its sources: ``batch_connect/session.rb``
of the dashboard (templates, and the modes of what they make), ``batch_connect/template.rb`` of
ood_core (the script) and ``ood-portal.conf.erb`` (the proxy, and what it edits in answers).
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

from malletrain.shipped import shipped
from tests import waiting
from tests.waiting import PATIENCE_S

APP = shipped("site-configs/ood/form.yml").parent
NAME = "127.0.0.2"
"""The portal's name for browsers; the page knows it only from the session's form."""
NODE = "127.0.0.3"
RENDER = """
require 'erb'; require 'json'; require 'shellwords'; require 'ostruct'
request = JSON.parse($stdin.read)
scope = OpenStruct.new(request['names'])
scope.context = OpenStruct.new(request['context'])
print ERB.new(request['text'], trim_mode: '-').result(scope.instance_eval { binding })
"""
SCRIPT = """
cd "$1"
export host port
find_port () { python3 -c 'import socket
s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])'; }
create_passwd () (
  tr -cd 'a-zA-Z0-9' < /dev/urandom 2> /dev/null | head -c${1:-8}
)
host=$2
[[ -e "before.sh" ]] && source "before.sh"
"./script.sh" &
SCRIPT_PID=$!
trap 'kill ${SCRIPT_PID}' TERM
(umask 077; echo -e "host: $host\\nport: $port\\npassword: $password" > connection.yml)
wait ${SCRIPT_PID}; wait ${SCRIPT_PID}
"""
STRIPPED = {"connection", "transfer-encoding", "keep-alive"}


def render(text: str, context: dict[str, str], **names: Any) -> str:
    """A template as the dashboard renders it, by Ruby."""
    request = json.dumps({"text": text, "context": context, "names": names})
    done = subprocess.run(
        ["ruby", "-e", RENDER], input=request, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def form() -> dict[str, Any]:
    """The form's description."""
    return yaml.safe_load((APP / "form.yml").read_text())


def stage(folder: Path, context: dict[str, str]) -> None:
    """Put into ``folder`` what the template makes, each with the mode of its template."""
    folder.mkdir()
    for template in (APP / "template").iterdir():
        made = folder / template.name.removesuffix(".erb")
        made.write_text(render(template.read_text(), context))
        shutil.copymode(template, made)


@contextlib.contextmanager
def session(folder: Path, state: Path) -> Iterator[dict[str, Any]]:
    """Run the staged session as a batch job would; yields what connection.yml says."""
    log = folder / "output.log"
    with log.open("w") as output:
        running = subprocess.Popen(
            ["bash", "-c", SCRIPT, "job", str(folder), NODE],
            stdout=output,
            stderr=output,
            env={**os.environ, "MALLETRAIN_STATE_DIR": str(state)},
        )
        try:

            def listens() -> bool:
                assert running.poll() is None, log.read_text()
                return "The page is at" in log.read_text() and (folder / "connection.yml").exists()

            waiting.until(listens, "the page listens", 0.1, log.read_text)
            yield yaml.safe_load((folder / "connection.yml").read_text())
        finally:
            running.send_signal(signal.SIGTERM)
            running.wait(PATIENCE_S)


class _Rnode(BaseHTTPRequestHandler):
    """The relative proxy: takes ``/rnode/HOST/PORT`` off, and edits answers as the portal does."""

    def _pass_on(self) -> None:
        if self.path == "/card":
            self._say(self.server.card.encode())  # type: ignore[attr-defined]
            return
        match = re.fullmatch(r"(/rnode/([^/]+)/(\d+))(/.*|)", self.path)
        if match is None:
            self.send_error(404)
            return
        base, host, port, uri = match.groups()
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        sent = {k: v for k, v in self.headers.items() if k.lower() not in {"host", *STRIPPED}}
        sent |= {"X-Forwarded-Proto": "http", "X-Forwarded-User": "ann"}
        upstream = http.client.HTTPConnection(host, int(port), timeout=PATIENCE_S)
        with contextlib.closing(upstream), contextlib.suppress(OSError):
            upstream.request(self.command, uri or "/", body or None, sent)  # Host: HOST:PORT
            answer = upstream.getresponse()
            self.send_response(answer.status)
            for key, value in answer.getheaders():
                if key.lower() not in STRIPPED:
                    self.send_header(key, edited(base, key.lower(), value))
            self.send_header("Connection", "close")
            self.end_headers()
            while piece := answer.read1(65536):
                self.wfile.write(piece)
                self.wfile.flush()

    do_GET = do_POST = do_PUT = _pass_on

    def _say(self, text: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        """Do nothing."""


def edited(base: str, key: str, value: str) -> str:
    """A header of an answer, as ``Header edit`` of ood-portal.conf leaves it."""
    if key == "location":
        return re.sub(r"^([^/]+//[^/]+)|(?=/)|^([./]{1,}(?<!/))", lambda _: base, value, count=1)
    if key == "set-cookie":
        value = re.sub(r"(?i);\s*(domain|path)[^;]*", "", value)
        return re.sub(r"^([^;]+)", rf"\1; Path={base}", value)
    return value


@contextlib.contextmanager
def portal(card: str) -> Iterator[str]:
    """A portal whose page ``/card`` has the session's card; yields its address."""
    server = ThreadingHTTPServer((NAME, 0), _Rnode)
    server.daemon_threads = True
    server.card = card  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://{NAME}:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
