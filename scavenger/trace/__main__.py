"""Command line of the traces: ``python -m scavenger.trace stats FILE`` and ``python -m
scavenger.trace synth -o FILE``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from scavenger.trace import files, synthesis
from scavenger.trace.trace import Statistics, Trace, TraceError, summary

DAY_S = 86400.0


def parser() -> argparse.ArgumentParser:
    """Return the parser of ``python -m scavenger.trace``."""
    p = argparse.ArgumentParser(
        prog="python -m scavenger.trace", description="Look at, cut and make traces of idle nodes."
    )
    commands = p.add_subparsers(dest="command", required=True)

    stats = commands.add_parser(
        "stats", help="what is in a trace: idle nodes over time, lengths of the gaps"
    )
    stats.add_argument("file", type=Path, help="CSV of idle/busy events, plain or gzip")
    stats.add_argument(
        "--nodes",
        type=Path,
        metavar="FILE",
        help="all node names of the machine, one a line (default: those in the trace)",
    )
    stats.add_argument(
        "--duration",
        type=float,
        metavar="S",
        help="end of the observation in seconds (default: the last event)",
    )
    stats.add_argument("--json", action="store_true", help="print one JSON object")

    make = commands.add_parser(
        "synth", help="make a trace with the statistics of Summit, or of another trace"
    )
    make.add_argument(
        "-o",
        "--output",
        type=Path,
        required=True,
        help="file to write; gzip when its name ends in .gz",
    )
    make.add_argument(
        "--nodes", type=int, default=4734, help="number of nodes (default %(default)s)"
    )
    make.add_argument(
        "--days", type=float, default=7.0, help="length in days (default %(default)s)"
    )
    make.add_argument(
        "--mean-idle",
        type=float,
        metavar="N",
        help="idle nodes on average (default: 8.3 %% of the nodes, as on Summit)",
    )
    make.add_argument(
        "--like",
        type=Path,
        metavar="FILE",
        help="take the statistics of this trace instead of Summit's",
    )
    make.add_argument(
        "--demo",
        type=float,
        metavar="SPEEDUP",
        help="a lively trace of few nodes, to be played this much faster",
    )
    make.add_argument(
        "--seconds",
        type=float,
        default=150.0,
        help="with --demo: real seconds to play (default %(default)s)",
    )
    make.add_argument(
        "--seed",
        type=int,
        default=0,
        help="another number gives another trace (default %(default)s)",
    )
    make.add_argument(
        "--json", action="store_true", help="print the statistics of the trace as one JSON object"
    )
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Return 0, or 1 with sentences on standard error if the trace or its
    parameters cannot be used.
    """
    args = parser().parse_args(argv)
    try:
        if args.command == "stats":
            names = None if args.nodes is None else files.read_names(args.nodes)
            trace = files.read(args.file, names=names, duration_s=args.duration)
        else:
            trace = _make(args)
            files.write(trace, args.output)
    except (TraceError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    statistics = trace.statistics()
    try:
        print(json.dumps(statistics.to_dict()) if args.json else _table(statistics), flush=True)
    except BrokenPipeError:  # the reader has closed the pipe; write nothing more, also not at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _make(args: argparse.Namespace) -> Trace:
    if args.demo is not None:
        return synthesis.demo_trace(
            args.nodes, args.seconds, args.demo, args.seed, mean_idle=args.mean_idle
        )
    model = synthesis.SUMMIT if args.like is None else synthesis.like(files.read(args.like))
    return synthesis.synthesise(
        model, args.nodes, args.days * DAY_S, args.seed, mean_idle=args.mean_idle
    )


def _table(statistics: Statistics) -> str:
    lines = [f"{label:<12} {text}" for label, text in summary(statistics).items()]
    largest = max((n for _, _, n in statistics.histogram), default=0)
    for low, high, n in statistics.histogram:
        bar = "#" * round(40 * n / largest) if largest else ""
        lines.append(
            f"{low:>8,.0f} to {f'{high:,.0f}' if high < float('inf') else 'more':>6} s {n:>9,} "
            f"{bar}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
