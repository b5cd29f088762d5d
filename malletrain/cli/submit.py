"""``malletrain submit`` and ``malletrain cancel``."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from malletrain.cli.common import (
    REFUSED,
    client_of,
    files,
    job_names,
    jobs_go_on,
    json_option,
    print_json,
    say,
    state_dir_option,
    usage_sentence,
)
from malletrain.cli.job_options import (
    apply_directives,
    environment_options,
    goal_options,
    kind_option,
    line_of,
    name_option,
    notify_option,
    slots_option,
    start_and_end_options,
    tell_goal,
    weight_option,
)
from malletrain.cli.wait import exit_code, exit_code_of_failed, until_ended
from malletrain.protocol.counting import counted
from malletrain.protocol.event_kinds import EventKind
from malletrain.submission.script import output_folders

if TYPE_CHECKING:
    from collections.abc import Sequence

    from malletrain.client import Connection
    from malletrain.protocol.messages import JobSpec
    from malletrain.protocol.views import JobView

_MAX_SCRIPT_BYTES = 16 * 1024 * 1024


MAX_COMPARED_JOBS = 50
"""Maximum number of unfinished jobs, the newest, whose snapshot paths are compared with a new
job's."""
LAST_EVENTS = 100
"""Number of newest events of a failed job in which the exit code of its workers is looked for."""


EQUIVALENTS = {
    "sbatch": {
        "-N": "--nodes",
        "--ntasks": "--nodes, times --nproc-per-node",
        "-n": "--nodes, times --nproc-per-node",
        "--ntasks-per-node": "--nproc-per-node",
        "--job-name": "--name",
        "--chdir": "--workdir",
        "--export": "--env NAME=VALUE",
        "-t": "--time-limit",
        "--time": "--time-limit",
        "--dependency": "--after JOB",
        "--mail-type": "--notify",
        "--mail-user": "--notify",
        "-o": "malletrain logs JOB",
        "--output": "malletrain logs JOB",
        "-G": "--gpus, where nodes are shared",
        "--constraint": "--kind KIND",
        "-p": "nothing to give: the operator sets it",
        "--partition": "nothing to give: the operator sets it",
        "--qos": "nothing to give: the operator sets it",
        "--account": "nothing to give: the operator sets it",
        "--gres": "nothing to give: the operator sets it",
    },
    "torchrun": {
        "--nnodes": "--nodes",
        "--rdzv-backend": "nothing to give: MalleTrain sets it",
        "--rdzv-endpoint": "nothing to give: MalleTrain sets it",
        "--rdzv-id": "nothing to give: MalleTrain sets it",
        "--max-restarts": "nothing to give: the operator sets max_tries",
    },
}
"""Program → its option → what ``malletrain submit`` has in its place. docs/submitting.md has the
table for the reader."""


class _BeforeScript(click.Command):
    """Options end at SCRIPT, so that the script's own options need no "--" before them and are
    never taken for options of MalleTrain. If a script's option is spelled like one of MalleTrain, a
    note says so, because the user may have meant that one.

    A "--" before or right after SCRIPT marks everything after it as the script's. Options at the
    head of SCRIPT are merged.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As :meth:`click.Command.parse_args`; prints a note about options that were passed to the
        script."""
        command_line = list(args)
        try:
            rest = super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            hint = f"{usage_sentence(error)} {_hint(error.option_name)}"
            raise click.UsageError(hint, ctx) from None
        if not ctx.resilient_parsing and ctx.params.get("script") is not None:
            _apply_directives(self, ctx, _file_of(ctx.params))
        script, words = ctx.params.get("script"), ctx.params.get("args") or ()
        before = len(command_line) - len(words) - 2
        if (
            ctx.resilient_parsing
            or script is None
            or (before >= 0 and command_line[before] == "--")
        ):
            return rest
        if words[:1] == ("--",):
            ctx.params["args"] = words[1:]
            return rest
        options = [p for p in self.get_params(ctx) if isinstance(p, click.Option)]
        own_options = {
            word for option in options for word in (*option.opts, *option.secondary_opts)
        }
        script_words = words[: words.index("--")] if "--" in words else words
        if like := [word for word in script_words if word.split("=", 1)[0] in own_options]:
            say(
                f"Note: these are passed to the script, because they stand after it: "
                f"{' '.join(like)}. Put options of MalleTrain before {script}. If they are the "
                "script's own, put -- directly after it, which turns this note off."
            )
        return rest


def _hint(option: str) -> str:
    """Return what to give in place of an option that submit does not have."""
    sentences = [
        f"In place of {option} of {program} there is {equivalent}."
        for program, table in EQUIVALENTS.items()
        if (equivalent := table.get(option)) is not None
    ]
    return " ".join([*sentences, "Options of the script stand after the script."])


def _apply_directives(command: click.Command, ctx: click.Context, script: str) -> None:
    from malletrain.submission.directives import foreign_directives

    try:
        with open(Path(script).expanduser(), "rb") as file:
            text = file.read(_MAX_SCRIPT_BYTES).decode("utf-8-sig", "replace")
    except OSError:
        return  # problems of the script itself are reported elsewhere
    apply_directives(command, ctx, script, text)
    if foreign := foreign_directives(text):
        say(
            f"Note: the {foreign} lines of {script} are not read: the options of a job are those "
            'of the command line, and of lines such as "#MALLETRAIN --nodes 1:4".'
        )


def _file_of(params: dict[str, Any]) -> str:
    """Return the file of the script or module; a missing one is reported elsewhere."""
    from malletrain.submission.error import SpecError
    from malletrain.submission.script import module_of

    if not params.get("as_module"):
        return str(params["script"])
    try:
        return str(module_of(params["script"], params.get("workdir")))
    except SpecError:
        return str(params["script"])


@click.command(cls=_BeforeScript, context_settings={"allow_interspersed_args": False})
@name_option
@click.option(
    "--nodes",
    metavar="MIN:MAX",
    help="Nodes the job can use, or slots of one kind: N, or MIN:MAX to grow and shrink. Without "
    "--kind MalleTrain chooses the class. Default: 1; for a service the sizes of its value file.",
)
@slots_option
@click.option(
    "--gpus",
    metavar="MIN:MAX",
    help="GPUs the job can use, each a slot of one GPU: N, or MIN:MAX. The slots are of --kind, or "
    "of the site's only kind with one GPU. In place of --nodes. (--gpus of malletrain map is "
    "another option: the GPUs of a task.)",
)
@kind_option
@click.option(
    "--nproc-per-node",
    metavar="N|auto",
    help="Worker processes on each node. auto: found by measuring in the first minute. Default: "
    "one for each GPU, one without GPUs.",
)
@click.option(
    "--threads",
    metavar="N|auto",
    help="Threads of each process. auto: found by measuring. Default: the node's cores divided "
    "by its processes, or OMP_NUM_THREADS.",
)
@click.option(
    "--loader-workers",
    metavar="N|auto",
    help="Loader workers of each process, for DataLoaders that name no num_workers. auto: found "
    "by measuring. Default: none.",
)
@click.option(
    "--data-memory",
    metavar="PERCENT|SIZE",
    help="Memory of each node for the script's malletrain.DataCache, such as 25% or 8G, unless "
    "the script itself says memory=. Default: 25%.",
)
@weight_option
@click.option(
    "--goal",
    type=click.Choice(["throughput", "efficiency"]),
    help="Benefit to maximise with more nodes: samples/s, or samples/s relative to one node. "
    "Default: the site's objective.",
)
@goal_options
@click.option(
    "--curve",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help='Known scaling curve: CSV with the header "nodes,samples_per_s", or JSON {"1": 120, '
    '"2": 230}. Without it MalleTrain measures.',
)
@environment_options
@click.option(
    "--launcher",
    type=click.Choice(["builtin", "torchrun"]),
    default="builtin",
    show_default=True,
    help="Launcher of the workers: the agent itself, or torchrun with the rendezvous of "
    "MalleTrain.",
)
@click.option(
    "--profile/--no-profile",
    default=True,
    help="Measure how the job scales while it trains: up to its largest size, then down step by "
    "step. Default: yes, but not with --curve.",
)
@click.option(
    "--profile-sizes",
    metavar="N,N,...",
    help="Measure at these numbers of nodes instead of a selection of MalleTrain's.",
)
@click.option(
    "--profile-key",
    metavar="TEXT",
    help="Jobs with the same key start from each other's scaling curves, as in a sweep.",
)
@click.option(
    "--model-size",
    metavar="PARAMETERS[,FLOPS]",
    help="Size of the model, FLOPs per sample: the job starts from the curves of similar jobs.",
)
@click.option(
    "--live",
    is_flag=True,
    help="The script uses malletrain.elastic: its processes are not restarted when nodes come "
    "and go.",
)
@click.option(
    "--service",
    is_flag=True,
    help="The script is a service: one process on each node, notified by malletrain.membership "
    "of nodes that come and go. Needs --value.",
)
@click.option(
    "--value",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help='Value of nodes to a service: CSV with the header "nodes,value", or TOML with a '
    "table [value] of lines such as 4 = 100.0; auto: its process reports it; 0: no node until "
    "'malletrain worth' sets another value.",
)
@click.option(
    "--start-cost",
    metavar="TIME|auto[:TIME]",
    help="Time from the start of a service's process on a node until it is ready, such as 180s. "
    "auto: measured; auto:180s: taken to be 180 s until then. Default: 5 s.",
)
@click.option(
    "--resume-from",
    metavar="JOB|PATH",
    help="Start from the snapshot of another job, or from this file. Without it another job's "
    "snapshot is refused.",
)
@click.option(
    "--array",
    metavar="LIST",
    help="Submit a job for each index, such as 1-10, 0-20:5 or 1,4,9. It replaces "
    "{index} in arguments and --env, and is $MALLETRAIN_ARRAY_INDEX in the script.",
)
@start_and_end_options
@click.option(
    "--on-hang",
    type=click.Choice(["tell", "restart"]),
    default="tell",
    show_default=True,
    help="Action when workers hang, that is, stop reporting: tell you where they hang, or "
    "also restart them, which counts as a failure.",
)
@notify_option
@click.option(
    "--wait",
    is_flag=True,
    help="Wait until the job has ended. Exit codes: 0 completed, 3 cancelled, the script's "
    "exit code if it failed. Of an array: 1 if one failed.",
)
@state_dir_option
@json_option
@click.option(
    "-m",
    "as_module",
    is_flag=True,
    help="SCRIPT names a module of the working directory or of this Python, such as "
    "package.train, and is run as python -m does: with that directory on the path.",
)
@click.argument("script", shell_complete=files)
@click.argument("args", nargs=-1, type=click.UNPROCESSED, shell_complete=files)
def submit(
    script: str,
    args: tuple[str, ...],
    resume_from: str | None,
    array: str | None,
    wait: bool,
    state_dir: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Submit the training SCRIPT as a job that follows the idle nodes.

    The script is an ordinary torchrun script that also reports its progress (malletrain.report). It
    is restarted at another scale whenever nodes come or go, and resumes from its snapshot. All
    arguments after SCRIPT are passed to it unchanged; put options of MalleTrain before it, or at
    the head of the script in lines such as "#MALLETRAIN --nodes 1:16". The command line takes
    precedence. The Python that runs malletrain now runs the script too, unless --venv, --conda or
    --container names another.

    \b
    Examples:
      malletrain submit train.py
      malletrain submit --nodes 1:16 train.py --epochs 90 --lr 0.1
      malletrain submit --name ablation-3 --nodes 2:8 --nproc-per-node 4 \\
          --module cuda/12.4 --env WANDB_MODE=offline train.py
      malletrain submit --nodes 1:8 -m package.train --epochs 90
      malletrain submit --nodes 1:32 --deadline "in 6 h" --budget 100nh train.py
      malletrain submit --container ~/images/pytorch.sif train.py
      malletrain submit --service --value value.csv cache.py
      malletrain submit --array 1-10 --wait train.py --seed {index}
      malletrain submit --after train --time-limit "2 h" evaluate.py
    """
    from malletrain.submission.error import SpecError
    from malletrain.submission.options import ScriptOptions
    from malletrain.submission.resuming import file_of, resuming, with_snapshots_bound
    from malletrain.submission.software import SoftwareOptions
    from malletrain.submission.spec import build
    from malletrain.submission.task_lists import indices, one_of

    software = {field.name: options.pop(field.name) for field in fields(SoftwareOptions)}
    try:
        job_options = ScriptOptions(software=SoftwareOptions(**software), **options)
        spec = build(script, args, job_options)
        file = file_of(resume_from) if resume_from is not None else None
        numbers = indices(array) if array is not None else None
    except SpecError as error:
        ctx = click.get_current_context()
        line = line_of(ctx, error.options)
        where = f"{script} line {line}: " if line is not None else ""
        raise click.UsageError(f"{where}{error}", ctx) from None
    with client_of(state_dir) as client:
        if resume_from is not None:
            spec = resuming(spec, file or client.job(resume_from).job.id)
        spec = with_snapshots_bound(spec)
        specs = [spec] if numbers is None else [one_of(spec, number) for number in numbers]
        for sentence in _shared_places(client, spec, specs[:2]):
            click.echo(sentence, err=True)
        jobs = [client.submit(each) for each in specs]
    if not (as_json and wait):
        _print_submitted(jobs, numbers is not None, as_json)
    if wait:
        ended = until_ended([job.id for job in jobs], state_dir, quiet=as_json)
        if as_json:
            print_json(ended if numbers is not None else ended[0])
        click.get_current_context().exit(_exit_code(ended, state_dir))


def _exit_code(ended: Sequence[JobView], state_dir: Path | None) -> int:
    """Return the exit code after waiting for these jobs; for a single failed job, its script's."""
    if len(ended) > 1 or ended[0].state != "failed":
        return exit_code(job.state for job in ended)
    with client_of(state_dir) as client:
        events = client.events(since=-LAST_EVENTS, job=ended[0].id)
    return exit_code_of_failed(e for e in events if e.kind == EventKind.WORKERS_FAILED)


def _print_submitted(jobs: Sequence[JobView], array: bool, as_json: bool) -> None:
    """Print the submitted jobs."""
    first, last = jobs[0], jobs[-1]
    if as_json:
        print_json(list(jobs) if array else first)
    elif array:
        click.echo(
            f"Submitted {counted(len(jobs), 'job')}, {first.name} ({first.id}) to "
            f"{last.name} ({last.id})."
        )
        tell_goal(first.goal)
    else:
        click.echo(
            f"Submitted {first.name} as job {first.id}. Follow it with: malletrain logs "
            f"{first.name} -f"
        )
        tell_goal(first.goal)


def _shared_places(client: Connection, spec: JobSpec, jobs: Sequence[JobSpec]) -> list[str]:
    """Return warnings about unfinished jobs that use the snapshot path or output folder of
    ``spec``, and about an array whose first ``jobs`` share an output folder.
    """
    from malletrain.submission.resuming import snapshot_paths

    own_paths = snapshot_paths(spec.script, spec.args, spec.workdir)
    folders = output_folders(spec.script, spec.args, spec.workdir)
    if not own_paths and not folders:
        return []
    warnings = []
    if len(jobs) > 1:
        both = [output_folders(job.script, job.args, job.workdir) for job in jobs]
        warnings += [
            f"Warning: all jobs of the array write to the output folder {path}. No job "
            "resumes from or overwrites another job's checkpoint: a job that finds one fails. Put "
            "{index} into the folder's name."
            for path in sorted(both[0] & both[1])
        ]
    unfinished = [job for job in client.jobs() if job.ended is None and job.owner == spec.owner]
    for job in unfinished[-MAX_COMPARED_JOBS:]:
        other_spec = client.job(job.id).spec
        paths = snapshot_paths(
            other_spec["script"], other_spec.get("args", ()), other_spec["workdir"]
        )
        warnings += [
            f"Warning: job {job.id} ({job.name}) is not finished and saves to the same snapshot, "
            f"{path}. The new job will neither restore nor overwrite it. Give it another path, or "
            "none: Snapshot() uses a folder of the job."
            for path in sorted(own_paths & paths)
        ]
        others = output_folders(
            other_spec["script"], other_spec.get("args", ()), other_spec["workdir"]
        )
        warnings += [
            f"Warning: job {job.id} ({job.name}) is not finished and writes to the same output "
            f"folder, {path}. The new job will neither resume from nor overwrite its "
            "checkpoints: it fails if it finds one. Give it another folder."
            for path in sorted(folders & others - own_paths)
        ]
    return warnings


def _of_the_same_name(client: Connection, names: Sequence[str], ids: set[str]) -> list[str]:
    """Return notes about this user's unfinished jobs that have one of ``names`` but none of
    ``ids``, those of the jobs that the names meant."""
    from malletrain.client import ClientError
    from malletrain.identity.keys import user_name

    try:
        unfinished = [job for job in client.jobs(ended=0) if job.ended is None]
    except ClientError:
        return []  # what was asked for is done
    user, notes = user_name(), []
    for name in names:
        others = [
            job.id
            for job in unfinished
            if job.name == name and job.owner == user and job.id not in ids
        ]
        if others:
            notes.append(f"Note: the name {name} is not unique. {jobs_go_on(others)}")
    return notes


@click.command()
@click.argument(
    "jobs", nargs=-1, required=True, metavar="JOB...", shell_complete=job_names(unfinished=True)
)
@state_dir_option
@json_option
def cancel(jobs: tuple[str, ...], state_dir: Path | None, as_json: bool) -> None:
    """Cancel jobs: stop their processes and free their nodes. Snapshots and logs are kept.

    JOB is the id or the name of a job (the newest of several with the same name), or the name of an
    array, to cancel all its jobs.

    \b
    Examples:
      malletrain cancel train
      malletrain cancel j3 j4 j5
    """
    with client_of(state_dir) as client:
        results = client.cancel(jobs)
        if as_json:
            print_json({"results": results})
        for result in results:
            if not as_json or not result["ok"]:
                click.echo(result["sentence"], err=not result["ok"])
        ids = {result["job"] for result in results}
        names = [job for job in dict.fromkeys(jobs) if job not in ids]
        for note in [] if as_json or not names else _of_the_same_name(client, names, ids):
            say(note)
    if not all(result["ok"] for result in results):
        click.get_current_context().exit(REFUSED)
