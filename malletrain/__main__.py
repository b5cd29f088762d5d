"""``malletrain``, and ``python -m malletrain`` where the console script is not on the path: how the
command line is entered.

Decides what Ctrl-C does before there is a command that could answer it, while Python still reads
modules, which takes seconds on a busy login node: the process ends without a word, as a shell
expects. Imports nothing at its top for that reason.
"""

from __future__ import annotations

import signal


def main() -> None:
    """Run the command line."""
    # Not where somebody has it ignored, as nohup does.
    mine = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if mine:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from malletrain.cli import main as command_line

    if mine:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    command_line(prog_name="malletrain")


if __name__ == "__main__":
    main()
