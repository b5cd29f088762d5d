"""Entry point of the command line: ``malletrain``, and ``python -m malletrain`` if the console
script is not on the path.

Decides what Ctrl-C does before a command can handle it, while Python still imports modules, which
takes seconds on a busy login node: the process ends without a message, as a shell expects. For that
reason the module imports nothing else at its top.
"""

from __future__ import annotations

import signal


def main() -> None:
    """Run the command line."""
    # Leave SIGINT alone if the parent process ignores it, as nohup does.
    has_default_handler = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if has_default_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from malletrain.cli import main as command_line

    if has_default_handler:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    command_line(prog_name="malletrain")


if __name__ == "__main__":
    main()
