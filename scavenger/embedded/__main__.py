"""Command line of the embedded cluster (``python -m scavenger.embedded``): reads the settings and
runs the cluster.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from scavenger.embedded.cluster import EmbeddedCluster, Settings
from scavenger.embedded.hosts import Division
from scavenger.embedded.layout import Layout, node_names, read_json


def parser() -> argparse.ArgumentParser:
    """Return the parser of ``python -m scavenger.embedded``."""
    p = argparse.ArgumentParser(
        prog="python -m scavenger.embedded",
        description="An embedded cluster: virtual nodes on this machine, whose leases are real "
        "processes. Stop it with SIGTERM.",
    )
    p.add_argument(
        "--dir",
        type=Path,
        required=True,
        help="directory of the cluster's files; one cluster per directory",
    )
    p.add_argument(
        "--nodes",
        type=int,
        default=6,
        help="number of virtual nodes, named n1, n2, ... (default %(default)s)",
    )
    p.add_argument(
        "--trace",
        type=Path,
        help="CSV of idle/busy events that decides which nodes are idle (default: all, always)",
    )
    p.add_argument(
        "--trace-end",
        type=float,
        metavar="S",
        help="where the trace's observation ends (default: its last event)",
    )
    p.add_argument(
        "--speedup",
        type=float,
        default=1.0,
        help="divide the trace's times by this (default %(default)s)",
    )
    p.add_argument(
        "--start",
        type=float,
        metavar="S",
        help="second of the trace to begin at (default: where most happens)",
    )
    p.add_argument(
        "--duration",
        type=float,
        metavar="S",
        help="real seconds of the trace to use (default: all)",
    )
    p.add_argument(
        "--at-end",
        default="repeat",
        metavar="WHAT",
        help="after the trace: repeat, idle, busy, hold (default %(default)s)",
    )
    p.add_argument(
        "--grace",
        type=float,
        default=5.0,
        metavar="S",
        help="from SIGTERM to SIGKILL (default %(default)s)",
    )
    p.add_argument(
        "--notice-fraction",
        type=float,
        default=1.0,
        metavar="F",
        help="fraction of preemptions announced by SIGTERM; the others kill at once (default "
        "%(default)s)",
    )
    p.add_argument(
        "--sweep",
        type=float,
        default=1.0,
        metavar="S",
        help="time for an ended lease's processes to go by themselves (default %(default)s)",
    )
    p.add_argument(
        "--seed",
        type=int,
        default=0,
        help="chooses nodes of the trace and preemptions without notice",
    )
    p.add_argument(
        "--slots",
        default="",
        metavar="JSON",
        help="what each node has and its kinds of slots, as MalleTrain passes them (default: whole "
        "nodes)",
    )
    p.add_argument(
        "--lifetime",
        type=float,
        metavar="S",
        help="stop by itself after this time (default: never)",
    )
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run a cluster until it is stopped. Return 0 if it was stopped in order, 1 with a sentence on
    standard error if it could not start.
    """
    p = parser()
    args = p.parse_args(argv)
    if args.nodes < 1:
        p.error("--nodes must be 1 or more")
    if not 0 <= args.notice_fraction <= 1:
        p.error("--notice-fraction must be between 0 and 1")
    if args.grace < 0 or args.sweep < 0:
        p.error("--grace and --sweep must be 0 or more")
    names = node_names(args.nodes)
    try:
        division = Division.from_json(args.slots) if args.slots else Division()
        replay = None
        if args.trace is not None:
            from scavenger.trace.replay import read_replay

            replay = read_replay(
                args.trace,
                names,
                speedup=args.speedup,
                seed=args.seed,
                start_s=args.start,
                duration_s=args.duration,
                trace_end_s=args.trace_end,
                at_end=args.at_end,
            )
        umask = os.umask(0o077)
        layout = Layout(args.dir.resolve())
        layout.create()
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    with open(layout.lock, "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            try:
                pid = (read_json(layout.state) or {}).get("pid", "unknown")
            except ValueError:
                pid = "unknown"
            print(
                f"Another cluster (process {pid}) runs in {layout.root}. Stop it, or take "
                "another directory.",
                file=sys.stderr,
            )
            return 1
        settings = Settings(
            layout.root,
            names,
            division,
            grace_s=args.grace,
            notice_fraction=args.notice_fraction,
            seed=args.seed,
            sweep_s=args.sweep,
            lifetime_s=args.lifetime,
            trace=None if args.trace is None else str(args.trace.resolve()),
            speedup=args.speedup,
            umask=umask,
        )
        return 0 if EmbeddedCluster(settings, replay).run() else 1


if __name__ == "__main__":
    sys.exit(main())
