"""Measures the cost of one ``malletrain.report()`` call in a training loop, in microseconds.

Cases, each in fresh processes:

* ``no-op``: outside MalleTrain;
* ``agent``: a reader process empties the socket, as an agent does;
* ``agent absent``: the socket file is gone;
* ``agent stuck``: the socket exists and its queue is full.

Each is measured in a tight loop (a datagram every 50 ms at most, as in a training loop), and with
``every call sends``: the most expensive call, which a loop with steps longer than 50 ms makes once
per step. Also measures ``Snapshot.step()`` when nothing is due.

    python -m benchmarks.report [--json] [--calls N] [--repeats N]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

TARGET_US = 20.0

READER = """
import socket, sys
reader = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
reader.bind(sys.argv[1])
print("ready", flush=True)
while reader.recv(65536) != b"end":
    pass
"""

CASES = (
    "no-op",
    "agent",
    "agent absent",
    "agent stuck",
    "agent, every call sends",
    "agent absent, every call sends",
    "snapshot.step()",
)


def time_calls(call: Callable[[], None], calls: int) -> float:
    """Return the mean cost of one call in microseconds, without the loop itself."""
    loop = range(calls)
    began = time.perf_counter()
    for _ in loop:
        pass
    empty = time.perf_counter() - began
    began = time.perf_counter()
    for _ in loop:
        call()
    return max(0.0, time.perf_counter() - began - empty) / calls * 1e6


def measure(case: str, calls: int) -> dict[str, float]:
    """Run in a process of its own. Return mean and maximum cost of a call, microseconds."""
    import malletrain
    from malletrain.training import report

    call: Callable[[], None]
    if case == "snapshot.step()":
        snapshot = malletrain.Snapshot("unused", every_s=float("inf"), facts={})
        call = snapshot.step
    else:
        if case.endswith("every call sends"):
            report.SEND_INTERVAL_S = 0.0

        def call() -> None:
            malletrain.report(128)

    call()
    mean = time_calls(call, calls)
    worst = 0.0
    for _ in range(min(calls, 20_000)):
        began = time.perf_counter()
        call()
        worst = max(worst, time.perf_counter() - began)
    return {"mean_us": mean, "worst_us": worst * 1e6}


@contextlib.contextmanager
def surroundings(case: str) -> Iterator[dict[str, str]]:
    """Return the environment of a worker, with the agent's end of the socket in the state of the
    case.
    """
    from malletrain.protocol.flags import FlagsWriter

    if case == "no-op":
        yield {}
        return
    folder = tempfile.mkdtemp()
    path = os.path.join(folder, "agent")
    flags = FlagsWriter(os.path.join(folder, "flags"))
    reader: subprocess.Popen[bytes] | None = None
    stuck: socket.socket | None = None
    try:
        if case == "agent stuck":
            stuck = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            stuck.bind(path)
        elif "absent" not in case:
            reader = subprocess.Popen([sys.executable, "-c", READER, path], stdout=subprocess.PIPE)
            assert reader.stdout is not None
            reader.stdout.readline()
        yield {
            "MALLETRAIN_SOCKET": path,
            "MALLETRAIN_FLAGS": flags.path,
            "MALLETRAIN_JOB": "benchmark",
            "MALLETRAIN_GENERATION": "1",
            "RANK": "0",
        }
    finally:
        if reader is not None:
            reader.kill()
            reader.wait()
        if stuck is not None:
            stuck.close()
        flags.close()
        shutil.rmtree(folder, ignore_errors=True)


def run(calls: int, repeats: int) -> list[dict[str, object]]:
    """Return one row per case; every repeat is a new process."""
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MALLETRAIN", "RANK"))
    }
    rows: list[dict[str, object]] = []
    for case in CASES:
        means, worst = [], []
        for _ in range(repeats):
            with surroundings(case) as env:
                command = [
                    sys.executable,
                    "-m",
                    "benchmarks.report",
                    "--case",
                    case,
                    "--calls",
                    str(calls),
                ]
                done = subprocess.run(
                    command, env=clean | env, check=True, capture_output=True, text=True
                )
            result = json.loads(done.stdout)
            means.append(result["mean_us"])
            worst.append(result["worst_us"])
        rows.append(
            {
                "case": case,
                "median_us": round(statistics.median(means), 3),
                "min_us": round(min(means), 3),
                "max_us": round(max(means), 3),
                "worst_single_call_us": round(statistics.median(worst), 1),
                "under_target": max(means) < TARGET_US,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of the table"
    )
    parser.add_argument("--calls", type=int, default=200_000)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        print(json.dumps(measure(args.case, args.calls)))
        return
    rows = run(args.calls, args.repeats)
    if args.json:
        print(
            json.dumps(
                {
                    "benchmark": "report",
                    "python": platform.python_version(),
                    "cpus": os.cpu_count(),
                    "load": round(os.getloadavg()[0], 2),
                    "calls": args.calls,
                    "repeats": args.repeats,
                    "target_us": TARGET_US,
                    "rows": rows,
                }
            )
        )
        return
    print(
        f"{args.repeats} processes per case, {args.calls} calls each; microseconds per call, "
        f"target {TARGET_US:.0f}"
    )
    print(f"{'case':34}{'median':>9}{'min':>9}{'max':>9}{'worst single':>14}")
    for row in rows:
        print(
            f"{row['case']:34}{row['median_us']:>9}{row['min_us']:>9}{row['max_us']:>9}{row['worst_single_call_us']:>14}"
        )


if __name__ == "__main__":
    main()
