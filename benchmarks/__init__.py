"""Measurements of the product, separate from its tests: every script prints JSON and a table."""

import signal
import sys

from benchmarks import needs

if sys.argv[0] == "-m":
    # Before the benchmark is imported: one of its imports may be missing.
    sys.excepthook = needs.explain


def end_in_order() -> None:
    """Let SIGTERM (``timeout``, a batch scheduler) end this process like an exception, so that its
    processes are stopped too.
    """
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
