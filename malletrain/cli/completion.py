"""Shell completion: names of jobs, requested from the daemon, conda environments, and files.

If the daemon does not answer or a file cannot be read, nothing is offered and no message is
printed, because the user is typing a line.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click
from click.shell_completion import CompletionItem

TIMEOUT_S = 1.0
"""Maximum time that a completion waits for the daemon, seconds."""

Completer = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def files(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete files and directories; the shell lists them."""
    return [CompletionItem(incomplete, type="file")]


def folders(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete directories; the shell lists them."""
    return [CompletionItem(incomplete, type="dir")]


def conda_environments(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Complete names of the user's conda environments, from conda's own list."""
    try:
        lines = Path("~/.conda/environments.txt").expanduser().read_text().splitlines()
    except (OSError, ValueError, RuntimeError):
        return []
    names = {Path(line).name: line for line in lines if Path(line).parent.name == "envs"}
    return [CompletionItem(n, help=p) for n, p in names.items() if n.startswith(incomplete)]


def job_names(*, unfinished: bool = False) -> Completer:
    """Return a completer of job names, the newest first, and of ids if the user has begun to type
    one. ``unfinished``: only jobs that have not ended.
    """

    def complete(
        ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        from malletrain.client import ClientError, Connection

        try:
            with Connection.of(ctx.params.get("state_dir"), timeout_s=TIMEOUT_S) as client:
                jobs = client.jobs()
        except ClientError:
            return []
        previous = ctx.params.get(param.name or "") or ()
        offered: dict[str, str] = {}
        for job in reversed(jobs):
            if unfinished and job.ended is not None:
                continue
            for word in (job.name, *([job.id] if incomplete else [])):
                if word.startswith(incomplete) and word not in previous:
                    # a name means the newest job that has it
                    offered.setdefault(word, f"{job.state}, job {job.id}")
        return [CompletionItem(word, help=description) for word, description in offered.items()]

    return complete
