"""The process of one node in a service job of MalleTrain: it runs a ``flower-supernode``.

The SuperNode runs while the node is a member of the job. When the node gets a notice of its end,
the SuperNode is stopped: the SuperLink then knows at once that the node is gone, the server assigns
its clients to other nodes, and the node can be released. If the notice is withdrawn, the SuperNode
starts again. Outside MalleTrain the process is a job of one node.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from fedcase.flower import FlowerMissingError, environment, free_port, program, split_arguments
from malletrain import membership
from malletrain.launch.supervisor import die_with_parent

STOP_S = 10.0
"""Seconds that a SuperNode may take to leave the SuperLink."""


class SuperNode:
    """The SuperNode of this node, which can be stopped and started again.

    Args:
        superlink: host and port of the SuperLink.
        node: name of this node.
        binaries: folder of Flower's programs; empty: beside this Python, else in PATH.
        security: Flower's options for TLS and authentication.
    """

    def __init__(self, superlink: str, node: str, binaries: str, security: Sequence[str]) -> None:
        self._program = program("flower-supernode", binaries)
        self._superlink, self._node, self._security = superlink, node, security
        self._process: subprocess.Popen[bytes] | None = None
        self._home = tempfile.TemporaryDirectory(prefix="fedcase-")

    def start(self, on_exit: threading.Event) -> None:
        """Start it. ``on_exit`` is set when it ends without being stopped."""
        parent = os.getpid()
        process = subprocess.Popen(
            [
                *(self._program, "--superlink", self._superlink),
                *("--host", "127.0.0.1", "--port", str(free_port())),
                *("--node-config", f"node={json.dumps(self._node)}"),
                *self._security,
            ],
            env=environment(Path(self._home.name), str(Path(self._program).parent)),
            preexec_fn=lambda: die_with_parent(parent),
        )
        self._process = process
        threading.Thread(target=self._watch, args=(process, on_exit), daemon=True).start()

    def _watch(self, process: subprocess.Popen[bytes], on_exit: threading.Event) -> None:
        process.wait()
        if self._process is process:
            on_exit.set()

    @property
    def running(self) -> bool:
        """Whether it was started and not stopped."""
        return self._process is not None

    def stop(self) -> None:
        """Disconnect it from the SuperLink, and end it."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
        process.kill()
        process.wait()

    def close(self) -> None:
        """Stop it and remove its files."""
        self.stop()
        self._home.cleanup()


def serve(supernode: SuperNode, group: membership.Membership) -> int:
    """Run the SuperNode until the process is ended or the SuperNode ends by itself. Return the
    exit code.
    """
    over, failed = threading.Event(), threading.Event()
    inbox: queue.SimpleQueue[membership.Change] = queue.SimpleQueue()

    def follow() -> None:
        for change in group.changes():
            inbox.put(change)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: over.set())
    supernode.start(failed)
    threading.Thread(target=follow, daemon=True).start()
    while not over.is_set() and not failed.is_set():
        try:
            change = inbox.get(timeout=0.2)
        except queue.Empty:
            continue
        if change.member != group.me:
            continue
        if change.kind == membership.LEAVING:
            supernode.stop()
            group.report_drained()
        elif change.kind == membership.STAYING and not supernode.running:
            supernode.start(failed)
    supernode.close()
    return 1 if failed.is_set() and not over.is_set() else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The process of one node."""
    parser = argparse.ArgumentParser(
        prog="fedcase-node",
        description="Run a flower-supernode on each node of a service job.",
        epilog="After --: options of flower-supernode for TLS and keys, or --insecure.",
    )
    parser.add_argument("--superlink", required=True, metavar="HOST:PORT", help="the SuperLink")
    parser.add_argument(
        "--flower",
        default="",
        metavar="FOLDER",
        help="folder of Flower's programs (default: beside this Python, else in PATH)",
    )
    own, security = split_arguments(sys.argv[1:] if arguments is None else arguments)
    options = parser.parse_args(own)
    if ":" not in options.superlink:
        parser.error(f"{options.superlink} is not an address; write HOST:PORT")
    group = membership.join(membership.host())
    try:
        supernode = SuperNode(options.superlink, group.me.node, options.flower, security)
    except FlowerMissingError as error:
        print(f"fedcase-node: {error}", file=sys.stderr)
        return 1
    return serve(supernode, group)


if __name__ == "__main__":
    sys.exit(main())
