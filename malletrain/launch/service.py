"""The launcher of a service on one node. It starts the process of the service once, sends it every
change of the membership, and watches it.

    starting ──the process has joined──▶ ready ──first view──▶ running ──▶ …
                                              (loading until the process says that it is ready)
    it ends ──▶ succeeded (code 0) | failed, and exited

Decides how the process is started, watched and stopped. :mod:`malletrain.rounds.service` decides
which nodes are members, and the process decides how it reacts to a change. Works without torch.

They exchange JSON objects, one per line, on a Unix socket (path in ``MALLETRAIN_SERVICE``).
Process: ``{"say": "join", "address", "loading"}``, if it was loading ``{"say": "ready"}``,
``{"say": "drained"}``, ``{"say": "worth", "nodes": {"4": 100.0, …}, "expires_s": seconds}``.
Launcher: ``{"view": number, "members": [[node, host, address, gone_in_s or null, lasts_s or null,
loading], …]}`` and, if there is no daemon that could send views, ``{"leave": seconds}``.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from malletrain.launch.lines import LineConnection, ProcessLine
from malletrain.launch.loop import (
    Child,
    LaunchLoop,
    last_words,
    order_from_arguments,
    stop_all,
)
from malletrain.launch.script import script_command
from malletrain.launch.worker_variables import WorkerVariables
from malletrain.protocol import env
from malletrain.protocol.job_files import SERVICE_LOG
from malletrain.protocol.launcher_channel import LaunchOrder
from malletrain.protocol.messages import (
    Assignment,
    Drain,
    Drained,
    Failure,
    Message,
    Phase,
    Round,
    Worth,
)
from malletrain.protocol.phases import AssignmentPhase


class ServiceLauncher:
    """The process of one service on this node."""

    def __init__(self, order: LaunchOrder) -> None:
        """Start the process.

        Args:
            order: the agent's order.
        """
        self.order = order
        self._loop = LaunchLoop(order)
        self._log = os.path.join(order.log_dir, SERVICE_LOG)
        self._connection: LineConnection | None = None
        self._address: str | None = None
        self._view: Round | None = None
        self._generation = 0
        self._loading = False
        self._start_s: float | None = None
        self._started_at = time.monotonic()
        self._child: Child | None = Child(
            self._loop, self._command(), {**os.environ, env.SERVICE: self._loop.lines.path}
        )

    def run(self) -> int:
        """Run until the job leaves the node or its process fails. Return the exit code."""
        return self._loop.run(self)

    # --- the agent ---

    def on_message(self, message: Message) -> None:
        """Handle a view, or a drain, after which there are no further views."""
        if isinstance(message, Round) and message.job == self.order.job:
            if self._view is None or message.generation > self._view.generation:
                self._view = message
                self._send_view()
        elif isinstance(message, Drain) and self._connection is not None:
            self._connection.send({"leave": message.timeout_s})

    def _send_view(self) -> None:
        view = self._view
        if view is None or self._address is None or view.generation <= self._generation:
            return
        if self._child is None:  # the end of the process has been reported
            return
        self._generation = view.generation
        if self._connection is not None:
            members = [
                [p.node, p.host, p.address, p.gone_in_s, p.lasts_s, p.loading] for p in view.members
            ]
            self._connection.send({"view": view.generation, "members": members})
        self._report(AssignmentPhase.RUNNING)

    def _report(self, phase: AssignmentPhase, failures: tuple[Failure, ...] = ()) -> None:
        self._loop.agent.send(
            Phase(
                Assignment(
                    self.order.job,
                    phase,
                    self._generation,
                    failures,
                    self._address or "",
                    loading=self._loading,
                    start_s=self._start_s,
                )
            )
        )

    def _report_up(self) -> None:
        """Report that the process is there, in a view or before the first one."""
        self._report(AssignmentPhase.RUNNING if self._generation else AssignmentPhase.READY)

    # --- the process ---

    def _command(self) -> list[str]:
        spec, supervisor = self.order.spec, Path(__file__).with_name("supervisor.py")
        return [
            *(sys.executable, "-I", "-S", str(supervisor), "--parent", str(os.getpid())),
            *("--chdir", spec.workdir, "--log", self._log, "--"),
            *script_command(spec),
        ]

    def on_line(self, connection: LineConnection, message: ProcessLine) -> None:
        """Handle a line of the process: it joins, is ready, has drained, or reports what nodes are
        worth.
        """
        if message.say == "join" and (self._connection is None or not self._connection.open):
            self._connection = connection
        if connection is not self._connection:
            # There is one connection per process; that of a child process is rejected.
            self._loop.lines.hang_up(connection)
        elif message.say == "join":
            self._address, self._loading = message.address, message.loading
            if not self._loading:
                self._note_start()
            self._report_up()
            self._send_view()
        elif message.say == "ready" and self._loading:
            self._loading = False
            self._note_start()
            self._report_up()
        elif message.say == "drained":
            self._loop.agent.send(Drained(self.order.job, self._generation, True))
        elif message.say == "worth" and message.nodes:
            self._loop.agent.send(Worth(self.order.job, message.nodes, message.expires_s))

    def _note_start(self) -> None:
        """Note how long the process took until it was ready. It starts once."""
        if self._start_s is None:
            self._start_s = time.monotonic() - self._started_at

    def check_processes(self) -> None:
        """Report the end of the process."""
        code = self._child.ended() if self._child is not None else None
        if code is None:
            return
        self._child = None
        if code == 0:
            self._report(AssignmentPhase.SUCCEEDED)
            return
        output = last_words(self._log)
        nodes = [p.node for p in self._view.members] if self._view else []
        own = os.environ.get(env.NODE, "")
        rank = nodes.index(own) if own in nodes else 0
        failures = (Failure(rank, code, time.time(), output),)
        self._report(AssignmentPhase.FAILED, failures)
        end = f"with code {code}" if code > 0 else f"by signal {-code}"
        print(output, flush=True)
        last = Assignment(self.order.job, AssignmentPhase.EXITED, self._generation, failures)
        self._loop.leave(Phase(last), f"The service's process ended {end}.")

    def stop(self) -> None:
        """Stop the process."""
        if self._child is not None:
            stop_all([self._child], self.order.stop_grace_s)


def main() -> int:
    """Read the order and run it."""
    order = order_from_arguments(
        "malletrain.launch.service", "Run the process of one service on this node."
    )
    if order is None:
        return 2
    WorkerVariables().set(order.spec.layout)
    return ServiceLauncher(order).run()


if __name__ == "__main__":
    sys.exit(main())
