"""A running ``malletrain web`` for tests, and requests to it as a program makes them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.integration.browser import Browser
from tests.waiting import PATIENCE_S

TOKEN = "token-of-the-tests-0123456789"

MARKUP = '<img src=x onerror="window.pwned=1">'
"""In the name, the log and the metrics of jobs: text, whatever it looks like."""

COLD = '[nodes]\nkeep_warm = "0 s"\n'
"""For sites of jobs without torch: no node imports it."""

CHATTY = """
import os, sys, time, malletrain
step = 0
while not os.path.exists(sys.argv[1]):
    malletrain.report(8)
    step += 1
    if step % 20 == 0:
        malletrain.metric(sys.argv[2], 1.0 / step)
        print("step", step, sys.argv[2], flush=True)
    time.sleep(0.01)
"""
"""Reports progress, a metric and log lines until the file of its first argument is there."""

UNFITTED = """\
[...document.querySelectorAll('figure > svg')].some((svg) => svg.parentElement.clientWidth
  && svg.viewBox.baseVal.width !== Math.floor(svg.parentElement.getBoundingClientRect().width))
"""
"""Whether a chart in sight is drawn for another width than that of its place."""


def when_fitted(tab: Browser, expression: str) -> Any:
    """Return the value of a JavaScript expression at a moment at which each chart is drawn for the
    width of its place. A chart that is drawn anew, or has another place, is so in a later frame.
    """
    script = f"({UNFITTED}) ? null : [{expression}]"
    [value] = tab.until(lambda: tab.run(script), "each chart is drawn for its place")
    return value


@dataclass(frozen=True)
class Answer:
    """The answer to one request: status, headers in lower case and the body, decoded if it is
    JSON.
    """

    status: int
    headers: dict[str, str]
    data: Any


class WebPage:
    """One ``malletrain web``; ``url``: as it was printed, with the token."""

    def __init__(self, state: Path, *options: str) -> None:
        argv = [sys.executable, "-m", "malletrain", "web", "--no-browser", "--state-dir", state]
        environment = {**os.environ, "MALLETRAIN_WEB_TOKEN": TOKEN}
        self._process = subprocess.Popen(
            [*argv, *options], stderr=subprocess.PIPE, text=True, env=environment
        )
        assert self._process.stderr is not None
        line = self._process.stderr.readline()
        assert "The page is at " in line, line + self._process.stderr.read()
        self.url = line.split()[-1]
        self.base = self.url.partition("/?")[0]

    @property
    def pid(self) -> int:
        """Return the id of the process that serves the page."""
        return self._process.pid

    def ask(self, path: str, method: str = "GET", body: object = None, **headers: str) -> Answer:
        """One request under ``/api/v1/`` with the token and the header of the page."""
        request = urllib.request.Request(
            f"{self.base}/api/v1/{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={
                "Authorization": f"Bearer {TOKEN}",
                "Content-Type": "application/json",
                "X-MalleTrain": "test",
                **headers,
            },
        )
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
                return _answer(answer)
        except urllib.error.HTTPError as error:
            with error:
                return _answer(error)

    def get(self, path: str) -> Any:
        """The data that a GET answers."""
        answer = self.ask(path)
        assert answer.status == 200, answer
        return answer.data

    @contextlib.contextmanager
    def stream(self) -> Iterator[Iterator[dict[str, Any]]]:
        """The changes that the server sends, one after the other."""
        request = urllib.request.Request(
            f"{self.base}/api/v1/stream", headers={"Authorization": f"Bearer {TOKEN}"}
        )
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as lines:
            yield (json.loads(line[6:]) for line in lines if line.startswith(b"data: "))

    def stop(self) -> int:
        """Stop the process as Ctrl-C does; return the exit status. A second call does nothing."""
        if self._process.returncode is not None:
            return self._process.returncode
        self._process.send_signal(signal.SIGINT)
        status = self._process.wait(PATIENCE_S)
        assert self._process.stderr is not None
        self.last_words = self._process.stderr.read()
        self._process.stderr.close()
        return status


def _answer(answer: Any) -> Answer:
    text = answer.read().decode()
    headers = {name.lower(): value for name, value in answer.headers.items()}
    is_json = headers.get("content-type", "").startswith("application/json")
    return Answer(answer.status, headers, json.loads(text) if is_json else text)


@contextlib.contextmanager
def page(state: Path, *options: str) -> Iterator[WebPage]:
    """The page of the daemon in ``state``, ended at the end."""
    made = WebPage(state, *options)
    try:
        yield made
    finally:
        made.stop()
