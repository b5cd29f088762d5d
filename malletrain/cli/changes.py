"""Changes while the daemon runs: by owners to their submitted jobs (``malletrain scale``,
``extend`` and ``requeue``), and by operators to what is leased (``pause``, ``resume``, ``drain``,
``exclude`` and ``reload``)."""

from __future__ import annotations

import datetime
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from malletrain.cli.common import (
    Refused,
    client_of,
    job_names,
    json_option,
    past_time,
    print_json,
    refusal,
    say,
    state_dir_option,
)
from malletrain.cli.job_options import goal_options, tell_goal
from malletrain.protocol.counting import counted


@click.command()
@click.argument("job", metavar="JOB", shell_complete=job_names(unfinished=True))
@click.argument("nodes", metavar="N|MIN:MAX")
@state_dir_option
def scale(job: str, nodes: str, state_dir: Path | None) -> None:
    """Change the minimum and maximum number of nodes of JOB, or of its slots or GPUs if it was
    submitted with --slots or --gpus.

    A running job outside the new limits is rescaled; if its new minimum is not available, it is
    suspended and keeps its place. Refused while a job is being profiled, and for a maximum above
    the one with which the job started, because its processes are sized for that one.

    \b
    Examples:
      malletrain scale train 2:8
      malletrain scale j7 4
    """
    from malletrain.submission.error import SpecError
    from malletrain.submission.spec import parse_nodes

    try:
        low, high = parse_nodes(nodes)
    except SpecError as error:
        raise click.UsageError(str(error)) from None
    with client_of(state_dir) as client:
        limits = {"job": job, "min_nodes": low, "max_nodes": high}
        reply = client.call("scale", limits, changes=True)
    click.echo(reply["sentence"])


@click.command()
@click.argument("job", shell_complete=job_names(unfinished=True))
@goal_options
@state_dir_option
@json_option
def extend(
    job: str,
    deadline: str | None,
    budget: str | None,
    work: str | None,
    state_dir: Path | None,
    as_json: bool,
) -> None:
    """Give JOB (id or name) another deadline, budget or amount of work.

    A job whose budget was spent continues. "+50nh" adds to the current budget; "none" removes a
    goal.

    \b
    Examples:
      malletrain extend train --budget +50nh
      malletrain extend train --deadline "in 2 d"
      malletrain extend train --deadline "friday 18:00"
      malletrain extend train --deadline none
    """
    from malletrain.submission.error import SpecError
    from malletrain.submission.goals import changes_of

    try:
        changes = changes_of(deadline, budget, work)
    except SpecError as error:
        raise click.UsageError(str(error)) from None
    with client_of(state_dir) as client:
        view = client.extend(job, **changes)
    if as_json:
        print_json(view)
        return
    say(f"Job {view.id} ({view.name}) now has its new goals.")
    tell_goal(view.goal)


class _ScriptArgumentsCommand(click.Command):
    """A command that passes the arguments after a "--" to the script."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As :meth:`click.Command.parse_args`."""
        at = args.index("--") if "--" in args else len(args)
        ctx.obj = tuple(args[at + 1 :])
        return super().parse_args(ctx, args[:at])


@click.command(cls=_ScriptArgumentsCommand, options_metavar="[OPTIONS] [JOB]... [-- ARGS...]")
@click.argument("jobs", nargs=-1, metavar="", shell_complete=job_names())
@click.option("--failed", is_flag=True, help="All your failed jobs.")
@click.option(
    "--since",
    metavar="TIME",
    callback=lambda ctx, param, text: None if text is None else past_time(text),
    help='With --failed: only those that ended after that time: "2 d" ago, or 2026-01-31.',
)
@state_dir_option
@json_option
@click.pass_context
def requeue(
    ctx: click.Context,
    jobs: tuple[str, ...],
    failed: bool,
    since: float | None,
    state_dir: Path | None,
    as_json: bool,
) -> None:
    """Submit ended jobs again, unchanged. Each resumes from its own snapshot.

    ARGS are appended to the old arguments of the script: most scripts use the last value of an
    option. The jobs that it waited for (--after) and a past deadline are left out.

    \b
    Examples:
      malletrain requeue train
      malletrain requeue train -- --epochs 120
      malletrain requeue --failed --since "1 d"
    """
    import msgspec

    from malletrain.identity.keys import user_name
    from malletrain.protocol.messages import JobSpec
    from malletrain.submission.error import SpecError
    from malletrain.submission.resuming import omissions, requeued

    if bool(jobs) == failed or (since is not None and not failed):
        raise click.UsageError("Name the jobs, or give --failed (and --since with it).")
    more: tuple[str, ...] = ctx.obj
    new_jobs = []
    with client_of(state_dir) as client:
        if failed:
            originals = [
                job
                for job in client.jobs()
                if job.state == "failed"
                and job.owner == user_name()
                and (since is None or (job.ended or 0.0) >= since)
            ]
        else:
            originals = [client.job(name).job for name in jobs]
        if not originals:
            raise Refused("There is no failed job of yours.")
        now = time.time()
        try:  # check all jobs before the first is submitted
            details = [(j, client.job(j.id)) for j in originals]
            specs = [(j, requeued(detail, more, now, user_name())) for j, detail in details]
        except SpecError as error:
            raise Refused(str(error)) from None
        old = {job.id: msgspec.convert(detail.spec, JobSpec) for job, detail in details}
        for job, spec in specs:
            new = client.submit(spec)
            new_jobs.append(new)
            if not as_json:
                click.echo(
                    f"Submitted {new.name} as job {new.id}. It goes on from the snapshot of "
                    f"{job.id}, if that saved one."
                )
                for sentence in omissions(old[job.id], spec):
                    say(sentence)
    if as_json:
        print_json(new_jobs)


EVERY_NODE = "*"
NAMES_BYTES = 256 * 1024
"""Maximum total length of the names in one request, bytes: half of the maximum request."""
why_option = click.option(
    "--why",
    default="",
    metavar="TEXT",
    help="Reason, shown in the audit log and by 'malletrain nodes'.",
)


def _until(text: str) -> float:
    """Return the seconds since the epoch of ``--until``: a duration from now, or a local date and
    time."""
    from malletrain.config.units import UnitError, parse_duration

    for form in ("%Y-%m-%dT%H:%M", "%Y-%m-%d"):
        try:
            return datetime.datetime.strptime(text, form).astimezone().timestamp()
        except ValueError:
            continue
    try:
        return time.time() + parse_duration(text)
    except UnitError:
        raise click.UsageError(
            f"--until {text}: give a local time such as 2026-11-30T18:00, or a duration such as "
            "'8 h'."
        ) from None


def _send(state_dir: Path | None, op: str, **params: Any) -> None:
    """Send the operation, in several requests if there are many nodes. All requests are sent even
    if some are refused; the command fails only if all are refused.
    """
    from malletrain.client import ClientError

    chunks, refused = _split_names(params.get("nodes", ())), []
    with client_of(state_dir) as client:
        for nodes in chunks:
            arguments = {**params, "nodes": nodes} if nodes else params
            try:
                click.echo(client.call(op, arguments, changes=True)["sentence"])
            except ClientError as error:
                if len(chunks) == 1 or error.code not in ("refused", "usage"):
                    raise
                refused.append(error)
                say(
                    f"Refused for {counted(len(nodes), 'node')}, {nodes[0]} to {nodes[-1]}: {error}"
                )
    if len(refused) == len(chunks):
        raise click.exceptions.Exit(refusal(refused[0]).exit_code)


def _split_names(nodes: Sequence[str]) -> list[list[str]]:
    """Return the names, split for as many requests as needed; one request without names if there
    are none."""
    parts: list[list[str]] = [[]]
    size = 0
    for name in nodes:
        size += len(name.encode("utf-8", "surrogateescape")) + 5
        if parts[-1] and size > NAMES_BYTES:
            parts.append([])
            size = 0
        parts[-1].append(name)
    return parts


@click.command()
@click.option(
    "--release", is_flag=True, help="Give all leases back, too, once their jobs have moved off."
)
@why_option
@state_dir_option
def pause(release: bool, why: str, state_dir: Path | None) -> None:
    """Request no new leases until 'malletrain resume'. For operators.

    Existing leases stay, and jobs continue there; with --release all leases are given back. A
    restarted daemon stays paused.

    \b
    Examples:
      malletrain pause
      malletrain pause --release --why "the network is being looked at"
    """
    _send(state_dir, "pause", release=release, why=why)


@click.command()
@click.argument("nodes", nargs=-1, metavar="[NODE...]")
@click.option("--all", "everything", is_flag=True, help="End 'drain --all'.")
@state_dir_option
def resume(nodes: tuple[str, ...], everything: bool, state_dir: Path | None) -> None:
    """End a pause; with NODEs, let them be leased again. For operators.

    \b
    Examples:
      malletrain resume
      malletrain resume n7 n8
      malletrain resume --all
    """
    _send(state_dir, "resume", nodes=[*nodes, *([EVERY_NODE] if everything else [])])


@click.command()
@click.argument("nodes", nargs=-1, metavar="[NODE...]")
@click.option("--all", "everything", is_flag=True, help="All nodes of the machine.")
@click.option(
    "--until",
    metavar="TIME",
    help="When they may be leased again: 2026-11-30T18:00 (local), or after a duration: '8 h'.  "
    "[default: until 'malletrain resume NODE']",
)
@why_option
@state_dir_option
def drain(
    nodes: tuple[str, ...], everything: bool, until: str | None, why: str, state_dir: Path | None
) -> None:
    """Give NODEs (names, or lists such as "n[1-4,7]") back and do not lease them, such as before
    maintenance. For operators.

    Jobs move off as at a preemption. The main scheduler is not informed and may use the nodes.

    \b
    Examples:
      malletrain drain n7 n8 --why "new memory"
      malletrain drain --all --until 2026-11-30T18:00
    """
    if bool(nodes) == everything:
        raise click.UsageError("Name the nodes to drain, or give --all.")
    _send(
        state_dir,
        "drain",
        nodes=[EVERY_NODE] if everything else list(nodes),
        until=None if until is None else _until(until),
        why=why,
    )


@click.command()
@click.argument("nodes", nargs=-1, required=True, metavar="NODE...")
@why_option
@state_dir_option
def exclude(nodes: tuple[str, ...], why: str, state_dir: Path | None) -> None:
    """Request no new leases on NODEs until 'malletrain resume NODE'. For operators.

    An existing lease stays until it ends by itself; 'drain' gives it back.

    \b
    Example:
      malletrain exclude n7 --why "its fan is loud"
    """
    _send(state_dir, "exclude", nodes=list(nodes), why=why)


@click.command()
@state_dir_option
def reload(state_dir: Path | None) -> None:
    """Make the daemon read its configuration again. For operators.

    Prints the changes: those that take effect at once, those for jobs submitted from now on, and
    those that need a restart (jobs continue during a restart). An invalid file changes nothing.

    \b
    Examples:
      malletrain check --config site.toml && malletrain reload
      systemctl reload malletrain
    """
    with client_of(state_dir) as client:
        reply = client.call("reload", {}, changes=True)
    click.echo(reply["sentence"])
    for name, title in (
        ("applied", "Applied"),
        ("next_jobs", "For jobs that are submitted from now on"),
        ("restart", "Needs a restart of the daemon"),
    ):
        if reply[name]:
            click.echo("\n".join([f"{title}:", *(f"  {line}" for line in reply[name])]))
