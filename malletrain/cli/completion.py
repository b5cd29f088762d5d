"""What the shell completes: names of jobs asked of the daemon, and files.

Whatever goes wrong, nothing is offered and nothing is said: the person is in the middle of a line.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click
from click.shell_completion import CompletionItem

PATIENCE_S = 1.0
"""How long a pressed Tab waits for the daemon."""

Completer = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def files(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Files and directories, which the shell itself lists."""
    return [CompletionItem(incomplete, type="file")]


def folders(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Directories, which the shell itself lists."""
    return [CompletionItem(incomplete, type="dir")]


def conda_environments(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Names of the user's conda environments, from the list that conda keeps of them."""
    try:
        lines = Path("~/.conda/environments.txt").expanduser().read_text().splitlines()
    except (OSError, ValueError, RuntimeError):
        return []
    names = {Path(line).name: line for line in lines if Path(line).parent.name == "envs"}
    return [CompletionItem(n, help=p) for n, p in names.items() if n.startswith(incomplete)]


def job_names(*, unfinished: bool = False) -> Completer:
    """Names of jobs, the newest first; ids to those who began to type one. ``unfinished``: only of
    jobs that have not ended.
    """

    def complete(
        ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        from malletrain.client import ClientError, Connection

        try:
            with Connection.of(ctx.params.get("state_dir"), timeout_s=PATIENCE_S) as client:
                jobs = client.jobs()
        except ClientError:
            return []
        previous = ctx.params.get(param.name or "") or ()
        offered = {
            word: f"{j.state}, job {j.id}"
            for j in reversed(jobs)
            if not (unfinished and j.ended is not None)
            for word in (j.name, *([j.id] if incomplete and j.id.startswith(incomplete) else []))
            if word.startswith(incomplete) and word not in previous
        }
        return [CompletionItem(word, help=description) for word, description in offered.items()]

    return complete
