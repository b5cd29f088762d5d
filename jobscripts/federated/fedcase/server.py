"""The server of a federated training, which runs outside the leases: Flower's SuperLink with a
database, and the run.

It keeps both alive until all rounds count: it starts a SuperLink that died again, and a failed run,
which continues after the last round that counts. If the server itself dies, its processes die with
it; start it again with the same folder.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from fedcase.flower import (
    FlowerMissingError,
    environment,
    environment_without,
    program,
    split_arguments,
)
from fedcase.options import TrainingOptions
from fedcase.ratio import RULES
from fedcase.rules import PACKAGES, RuleError, missing_package
from fedcase.state import LOCK, TrainingStateError, end_holder, last_round, lock
from fedcase.task import load_task
from malletrain.launch.supervisor import die_with_parent

POLL_S = 2.0
"""Seconds between two checks of the SuperLink and the state."""
CHECK_S = 20.0
"""Seconds without a new round after which ``flwr list``, which takes seconds, checks the run."""
MOST_FAILURES = 3
"""Maximum number of failures of the SuperLink and of runs without a new round in between."""
STOP_S = 10.0
CALL_S = 120.0
"""Seconds that one call of ``flwr`` may take."""

_APP = """\
[project]
name = "fedcase-run"
version = "1.0.0"
description = "Federated rounds"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "malletrain"

[tool.flwr.app.components]
serverapp = "fedcase_run.server_app:app"
clientapp = "fedcase_run.client_app:app"

[tool.flwr.app.config]
options = {options}
"""
"""The Flower app that is sent to the SuperLink. Its two modules import :mod:`fedcase.apps`."""


class ServerError(RuntimeError):
    """The training cannot continue; the message says why and where to look."""


class FederatedServer:
    """The SuperLink and the run of one training.

    Args:
        options: the training; its folder gets the state, the database and the logs.
        host: address on which the SuperLink listens.
        port: its port.
        binaries: folder of Flower's programs.
        security: options of flower-superlink for TLS and keys, or ``--insecure``.
        authority: file with the certificate of the authority that signed the SuperLink's; empty:
            without TLS.

    Raises:
        FlowerMissingError: a program of Flower is not there.
        RuleError: Flower's environment does not have the package that the ratio rule needs.
    """

    def __init__(
        self,
        options: TrainingOptions,
        host: str,
        port: int,
        binaries: str = "",
        security: Sequence[str] = (),
        authority: str = "",
    ) -> None:
        self._options, self._host, self._port = options, host, port
        self._folder = Path(options.folder)
        self._superlink_program = program("flower-superlink", binaries)
        self._flwr = program("flwr", binaries)
        package = PACKAGES.get(options.rule)
        if package and (folder := environment_without(package, self._flwr)):
            raise RuleError(missing_package(options.rule, folder))
        self._security, self._authority = security, authority
        self._superlink: subprocess.Popen[bytes] | None = None
        self._run = ""
        self._last_round, self._failures, self._checked_at = self._rounds(), 0, 0.0
        self._home = self._folder / "flower"
        self._environment = environment(self._home, str(Path(self._flwr).parent))
        self._stop = threading.Event()

    @property
    def log(self) -> Path:
        """The file with the output of the SuperLink and of the run."""
        return self._folder / "superlink.log"

    def stop(self) -> None:
        """Have :meth:`run` return."""
        self._stop.set()

    def run(self) -> int:
        """Run until all rounds count. Return the number of rounds that count, which is smaller
        than that of the options only after :meth:`stop`.

        Raises:
            ServerError: the SuperLink or the runs fail again and again.
            TrainingStateError: the state is damaged, or another server uses it.
        """
        one_server = lock(self._folder / "server.lock")
        try:
            self._write_app()
            while self._rounds() < self._options.rounds and not self._stop.is_set():
                self._look()
                self._stop.wait(POLL_S)
        finally:
            self._end_superlink()
            os.close(one_server)
        return self._rounds()

    def _look(self) -> None:
        """Start the SuperLink, or the run, if it is not running."""
        now, rounds = time.monotonic(), self._rounds()
        if rounds != self._last_round:
            self._last_round, self._checked_at, self._failures = rounds, now, 0
        if self._superlink is None or self._superlink.poll() is not None:
            if self._superlink is not None:
                self._fail("The SuperLink has ended")
            self._start_superlink()
            self._run = ""
        elif not self._run:
            if self._listening():
                self._run = self._start_run()
                self._checked_at = time.monotonic()
                if not self._run:
                    self._fail("The run could not be started")
        elif now - self._checked_at > CHECK_S:
            ended = self._has_ended(self._run)
            self._checked_at = time.monotonic()
            if ended:
                self._run = ""
                self._fail("The run has failed")

    def _fail(self, what: str) -> None:
        self._failures += 1
        if self._failures > MOST_FAILURES and self._rounds() == self._last_round:
            raise ServerError(
                f"{what}: failure {self._failures} since round {self._last_round}. "
                f"{self.log} says why."
            )

    def _rounds(self) -> int:
        return last_round(self._folder) or 0

    # --- the app and how flwr finds the SuperLink ---

    def _write_app(self) -> None:
        modules = self._folder / "app" / "fedcase_run"
        modules.mkdir(parents=True, exist_ok=True)
        self._home.mkdir(mode=0o700, exist_ok=True)
        options = (self._folder / "options.json").resolve()
        self._options.write(options)
        (modules.parent / "pyproject.toml").write_text(
            _APP.format(options=json.dumps(str(options)))
        )
        (modules / "__init__.py").write_text("")
        for name in ("server", "client"):
            text = f"from fedcase.apps import {name} as app\n\n__all__ = ['app']\n"
            (modules / f"{name}_app.py").write_text(text)
        security = (
            f"root-certificates = {json.dumps(os.path.abspath(self._authority))}"
            if self._authority
            else "insecure = true"
        )
        (self._home / "config.toml").write_text(
            '[superlink]\ndefault = "fedcase"\n\n[superlink.fedcase]\n'
            f'address = "{self._address()}"\n{security}\n'
        )

    def _address(self) -> str:
        host = "127.0.0.1" if self._host in ("0.0.0.0", "::") else self._host
        return f"{host}:{self._port}"

    # --- the SuperLink ---

    def _start_superlink(self) -> None:
        end_holder(self._folder / LOCK)
        parent = os.getpid()
        with self.log.open("ab") as log:
            self._superlink = subprocess.Popen(
                [
                    *(self._superlink_program, "--host", self._host, "--port", str(self._port)),
                    *("--database", str((self._folder / "superlink.db").resolve())),
                    "--disable-runtime-dependency-installation",
                    *self._security,
                ],
                env=self._environment,
                stdout=log,
                stderr=log,
                preexec_fn=lambda: die_with_parent(parent),
            )

    def _listening(self) -> bool:
        host, _, port = self._address().rpartition(":")
        try:
            socket.create_connection((host, int(port)), 1.0).close()
        except OSError:
            return False
        return True

    def _end_superlink(self) -> None:
        if self._superlink is None:
            return
        self._superlink.terminate()
        try:
            self._superlink.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._superlink.kill()
            self._superlink.wait()

    # --- the run ---

    def _start_run(self) -> str:
        """Start the run. Return its number; empty if the SuperLink does not answer yet."""
        answer = self._call("run", str(self._folder / "app"), "fedcase")
        return str(answer.get("run-id") or "")

    def _has_ended(self, run: str) -> bool:
        answer = self._call("list", "fedcase", "--run-id", run)
        runs = answer.get("runs") or [{}]
        return str(runs[0].get("status", "")).startswith("finished")

    def _call(self, *words: str) -> dict[str, Any]:
        try:
            done = subprocess.run(
                [self._flwr, *words, "--format", "json"],
                env=self._environment,
                capture_output=True,
                text=True,
                timeout=CALL_S,
                check=False,
            )
            answer = json.loads(done.stdout)
        except (OSError, ValueError, subprocess.TimeoutExpired) as error:
            answer = {"success": False, "error-message": str(error)}
        if not answer.get("success"):
            with self.log.open("a") as log:
                log.write(f"flwr {words[0]}: {answer.get('error-message', answer)}\n")
        return answer if isinstance(answer, dict) else {}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command ``fedcase-server``. Exit codes: 0 all rounds count, 1 they do not, 2 usage."""
    parser = argparse.ArgumentParser(
        prog="fedcase-server",
        description="The server of a federated training.",
        epilog="After --: options of flower-superlink for TLS and keys, or --insecure.",
    )
    default = {field.name: field.default for field in fields(TrainingOptions)}
    add = parser.add_argument
    add("folder", help="folder of the state; an interrupted training continues from it")
    add("--task", required=True, metavar="MODULE:FACTORY", help="what is trained")
    factory = "arguments of the factory (default %(default)s)"
    add("--task-options", default=default["task_options"], metavar="JSON", help=factory)
    name = "name of the training in the nodes' memory (default %(default)s)"
    add("--name", default=default["name"], help=name)
    add("--rounds", type=int, default=default["rounds"], help="rounds (default %(default)s)")
    add(
        "--clients",
        type=int,
        default=default["clients"],
        help="clients of a round (default %(default)s)",
    )
    epochs = "epochs of a client in a round (default %(default)s)"
    add("--epochs", type=int, default=default["epochs"], help=epochs)
    cold = "share of a client's samples outside memory that an epoch reads (default %(default)s)"
    add("--cold-share", type=float, default=default["cold_share"], metavar="SHARE", help=cold)
    hot = "share of a client's samples that is kept in memory (default %(default)s)"
    add("--cache-share", type=float, default=default["cache_share"], metavar="SHARE", help=hot)
    size = "memory of each node for samples, bytes (default %(default)s)"
    add("--cache-bytes", type=int, default=default["cache_bytes"], metavar="BYTES", help=size)
    rule = (
        "how the share of experienced clients in a round is chosen (default %(default)s); forest "
        "needs scikit-learn in Flower's environment"
    )
    add("--rule", choices=sorted(RULES), default=default["rule"], help=rule)
    limit = "maximum time for a node's answer, seconds (default %(default)s)"
    add("--answer", type=float, default=default["answer_s"], metavar="SECONDS", help=limit)
    seed = "seed of all random draws (default %(default)s)"
    add("--seed", type=int, default=default["seed"], help=seed)
    address = "address on which the SuperLink listens (default %(default)s)"
    add("--host", default="127.0.0.1", help=address)
    port = "port of the SuperLink, for nodes and users (default %(default)s)"
    add("--port", type=int, default=9091, help=port)
    programs = "folder of Flower's programs (default: beside this Python, else in PATH)"
    add("--flower", default="", metavar="FOLDER", help=programs)
    add("--authority", default="", metavar="FILE", help="certificate of the SuperLink's authority")
    own, security = split_arguments(sys.argv[1:] if arguments is None else arguments)
    parsed = parser.parse_args(own)
    options = TrainingOptions(
        **{name: getattr(parsed, name) for name in default if name != "answer_s"},
        answer_s=parsed.answer,
    )
    if options.rounds < 1 or options.clients < 1 or options.epochs < 1:
        parser.error("--rounds, --clients and --epochs are at least 1")
    if not 0 < options.cold_share <= 1 or not 0 <= options.cache_share <= 1:
        parser.error("--cold-share is above 0 to 1, --cache-share 0 to 1")
    try:
        load_task(options.task, options.task_options)
        Path(options.folder).mkdir(parents=True, exist_ok=True)
        server = FederatedServer(
            options, parsed.host, parsed.port, parsed.flower, security, parsed.authority
        )
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: server.stop())
        rounds = server.run()
    except (
        FlowerMissingError,
        RuleError,
        ServerError,
        TrainingStateError,
        ValueError,
        OSError,
    ) as error:
        print(f"fedcase-server: {error}", file=sys.stderr)
        return 1
    print(f"{rounds} of {options.rounds} rounds count")
    return 0 if rounds >= options.rounds else 1


if __name__ == "__main__":
    sys.exit(main())
