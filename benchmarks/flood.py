"""One sender with a valid key sends as fast as it can: measures the growth of the daemon's memory,
and the waits of an ordinary client meanwhile.

    python -m benchmarks.flood [--seconds 15] [--sizes 0 64 1024] [--json]

A row for each size of message (kilobytes beside the message's own), with a daemon of its own: the
ordinary client's p50 and p99 before the flood and during it, each for ``--seconds``; the number of
messages that the flood sent; the growth of the maximum resident memory. The flood consists of
heartbeats of an agent (size 0), else of pieces of a log. Target: 50 MB.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
import threading
import time
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import psutil
import zmq

from benchmarks.fuzz_messages import MOST_GROWTH_MB, Ordinary, cpu_s, daemon_process
from malletrain.protocol import messages, wire

KB = 1024


def flood(at: dict[str, Any], size: int, over: Event, reports: Any) -> None:
    """Send as fast as possible until told to stop."""
    _, node, env = at["leases"][0]
    secret = env["MALLETRAIN_LEASE_KEY"].encode()
    with zmq.Context() as context:
        socket = context.socket(zmq.DEALER)
        socket.linger, socket.sndhwm = 0, 200
        socket.curve_secretkey, socket.curve_publickey = secret, zmq.curve_public(secret)
        socket.curve_serverkey = at["server"].encode()
        socket.connect(at["endpoint"])
        message: messages.Message = messages.Heartbeat("boot")
        if size:
            message = messages.LogChunk(at["jobs"][0], 0, "rank0", node, 0, b"x" * size)
        frames, sent = wire.encode(message), 0
        while not over.is_set():
            while socket.poll(0):
                socket.recv_multipart(zmq.DONTWAIT)
            if socket.poll(100, zmq.POLLOUT):
                socket.send_multipart(frames)
                sent += 1
        socket.close()
    reports.value = sent


class Most:
    """Return the maximum resident memory of a process."""

    def __init__(self, process: psutil.Process) -> None:
        self.rss = process.memory_info().rss
        self._process, self._stop = process, threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(0.05):
            self.rss = max(self.rss, self._process.memory_info().rss)

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


def row(size_kb: int, seconds: float, folder: Path) -> dict[str, Any]:
    """Measure one size."""
    pipe, far = multiprocessing.Pipe()
    target = multiprocessing.Process(target=daemon_process, args=(far, str(folder)))
    target.start()
    at = pipe.recv()
    process = psutil.Process(target.pid)
    quiet = Ordinary(at)
    time.sleep(seconds)
    quiet.stop()
    over, sent = multiprocessing.Event(), multiprocessing.Value("q", 0)
    before, busy = process.memory_info().rss, cpu_s(process)
    apart = multiprocessing.Process(target=flood, args=(at, size_kb * KB, over, sent))
    most, meanwhile = Most(process), Ordinary(at)
    apart.start()
    time.sleep(seconds)
    over.set()
    apart.join()
    meanwhile.stop()
    most.stop()
    busy = cpu_s(process) - busy
    pipe.send("end")
    handler_failures, _, error = pipe.recv()
    target.join()
    return {
        "size_kb": size_kb,
        "seconds": seconds,
        "sent": sent.value,
        "cpu_s": round(busy, 1),
        "alive": error is None,
        "handler_failures": handler_failures,
        "grown_mb": round((most.rss - before) / 1e6, 1),
        "unanswered": meanwhile.failed,
        "quiet_p50_ms": round(quiet.quantile_ms(0.5), 1),
        "quiet_p99_ms": round(quiet.quantile_ms(0.99), 1),
        "p50_ms": round(meanwhile.quantile_ms(0.5), 1),
        "p99_ms": round(meanwhile.quantile_ms(0.99), 1),
    }


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--sizes", type=int, nargs="+", default=[0, 64, 1024], metavar="KB")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = []
    for size in args.sizes:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(row(size, args.seconds, Path(folder)))
    if args.json:
        print(json.dumps({"load": os.getloadavg()[0], "most_mb": MOST_GROWTH_MB, "rows": rows}))
        return
    print("| message | sent | memory grew | p50, p99 before | p50, p99 in it | unanswered |")
    print("|---|---|---|---|---|---|")
    for r in rows:
        print(
            f"| {r['size_kb']} kB | {r['sent']:,} | {r['grown_mb']:.0f} MB | "
            f"{r['quiet_p50_ms']}, {r['quiet_p99_ms']} ms | {r['p50_ms']}, {r['p99_ms']} ms | "
            f"{r['unanswered']} |"
        )


if __name__ == "__main__":
    main()
