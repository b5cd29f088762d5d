"""Measurements of the product, separate from its tests: every script prints JSON and a table."""

import signal
import sys

from benchmarks import needs

if sys.argv[0] == "-m":
    # Before the benchmark is imported, whose first imports may be what is missing.
    sys.excepthook = needs.explain


def end_in_order() -> None:
    """Have SIGTERM (``timeout``, a batch scheduler) end this process like an exception, so that
    what it started is stopped too.
    """
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
