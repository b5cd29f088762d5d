"""``malletrain scale``, ``malletrain extend`` and ``malletrain requeue``: changes to submitted jobs
by their owners.
"""

from __future__ import annotations

import time
from pathlib import Path

import click

from malletrain.cli.common import (
    Refused,
    client_of,
    job_names,
    json_option,
    past_time,
    print_json,
    say,
    state_dir_option,
)
from malletrain.cli.job_options import goal_options, tell_goal


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
                click.echo(f"Submitted {new.name} as job {new.id}; it goes on where {job.id} was.")
                for sentence in omissions(old[job.id], spec):
                    say(sentence)
    if as_json:
        print_json(new_jobs)
