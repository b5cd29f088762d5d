"""A stand-in for a job's launcher and workers if torch would need too much memory: a job submitted
with this file as its Python.

It communicates with the agent as :mod:`malletrain.launch.restart` does (rounds, store, release) and
reports progress, so that agents, daemon, leases and rounds are the real ones; it does not train.
Each member of a round records when it worked, in the directory BENCH_SPANS.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import malletrain.training.report  # loaded once, before the forks
from malletrain.protocol import env
from malletrain.protocol.launcher_channel import LauncherEnd, RoundInbox, read_order
from malletrain.protocol.messages import Assignment, Phase, Release, Round, StoreUp
from malletrain.protocol.phases import AssignmentPhase

REPORT_EVERY_S = 0.5


def work(generation: int, rank: int, size: int, spans: Path, node: str) -> None:
    """Run one worker of a round: report regularly until killed. The file's last change is the last
    time at which it worked.
    """
    os.environ.update({"RANK": str(rank), "WORLD_SIZE": str(size), env.GENERATION: str(generation)})
    span = spans / f"{node}.{os.getpid()}.{generation}"
    span.write_text(repr(time.time()))
    while True:
        malletrain.report(8)
        os.utime(span)
        time.sleep(REPORT_EVERY_S)


def main() -> int:
    """Serve rounds until the job leaves the node."""
    order = read_order(sys.argv[-1])
    end, inbox = LauncherEnd(order.endpoint), RoundInbox()
    spans, node = Path(os.environ["BENCH_SPANS"]), os.environ["MALLETRAIN_NODE"].replace("/", "_")
    child = 0

    def stop(*_: object) -> None:
        if child:
            os.kill(child, signal.SIGKILL)
        os._exit(0)

    signal.signal(signal.SIGTERM, stop)
    end.send(Phase(Assignment(order.job, AssignmentPhase.READY, 0)))
    while True:
        for message in end.receive(1.0):
            if isinstance(message, Round) and message.job == order.job:
                inbox.add(message)
            elif isinstance(message, Release):
                stop()
        if end.agent_gone:
            stop()
        pending = inbox.pending()
        if pending is None:
            continue
        if child:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        if not pending.store_host:
            end.send(StoreUp(order.job, pending.generation, order.host, 1))
        inbox.take()
        child = os.fork()
        if not child:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            work(pending.generation, pending.group_rank, pending.group_size, spans, node)
        end.send(Phase(Assignment(order.job, AssignmentPhase.RUNNING, pending.generation)))


if __name__ == "__main__":
    sys.exit(main())
