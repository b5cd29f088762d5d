"""The signal that requests the stacks of a worker, and the file to which it writes them. Standard
library only: training scripts import it.
"""

from __future__ import annotations

import signal

STACKS_SIGNAL = signal.SIGRTMIN + 7
"""Signal at which a worker that reports writes its stacks. Scripts and schedulers do not use it.
"""
STACKS_FILE = "stacks."
"""Prefix of the file in the job's directory; the worker's process id follows."""
