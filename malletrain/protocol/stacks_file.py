"""How a worker is asked where it stands, and where it writes that. Standard library only: training
scripts import it.
"""

from __future__ import annotations

import signal

STACKS_SIGNAL = signal.SIGRTMIN + 7
"""What a worker that reports writes its stacks at. Not one of those that scripts and schedulers
use.
"""
STACKS_FILE = "stacks."
"""The name of the file in the job's directory begins so; the worker's process id follows."""
