"""Asks Slurm through pyslurm and prints the tables of :mod:`scavenger.slurm.bindings` as JSON.

    python -m scavenger.slurm.ask_pyslurm YEAR MONTH [PREFIX]

YEAR, MONTH: the running Slurm's version; PREFIX: what the names of our jobs begin with. Without it
it says only whether pyslurm fits. What goes wrong stands in a sentence on standard error.
"""

from __future__ import annotations

import sys

import msgspec

from scavenger.interface import SchedulerError
from scavenger.slurm.bindings import load_module, read


def main(arguments: list[str]) -> int:
    """Ask Slurm, print the answer and return the exit status."""
    year, month, *prefix = arguments
    module, why = load_module((int(year), int(month)))
    try:
        if module is None:
            raise SchedulerError(why)
        if prefix:
            sys.stdout.buffer.write(msgspec.json.encode(read(module, prefix[0])))
    except SchedulerError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
