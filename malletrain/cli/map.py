"""``malletrain map``: submits a command for each row of a list as a farm.

Decides where the list comes from, and that Ctrl-C while tasks are being added cancels the farm.
:mod:`malletrain.submission.task_lists` reads the list, and :mod:`malletrain.submission.farm` checks
the options.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from malletrain.cli.common import files, json_option, print_json, refusal, say, state_dir_option
from malletrain.cli.job_options import (
    LINES,
    apply_directives,
    deadline_and_budget_options,
    environment_options,
    kind_option,
    name_option,
    notify_option,
    slots_option,
    start_and_end_options,
    tell_goal,
    weight_option,
)
from malletrain.cli.wait import exit_code, until_ended
from malletrain.protocol.counting import counted

if TYPE_CHECKING:
    from malletrain.api.client import Client
    from malletrain.protocol.messages import JobSpec
    from malletrain.protocol.views import JobView
    from malletrain.submission.task_lists import TaskInput, TaskList

SHOWN = 3
"""Number of command lines that ``--dry-run`` prints."""
TASK_OPTIONS = (
    "cpus",
    "gpus",
    "memory",
    "time",
    "drain",
    "retries",
    "max_running",
    "output",
    "log",
    "checkpoint",
    "array_env",
    "duplicate_stragglers",
)
"""Parameters that are fields of TaskOptions."""
_STDIN = "the standard input"


class _BeforeDashes(click.Command):
    """Options end at ``--``; what follows is the command of a task. The ``#MALLETRAIN`` and
    ``#SBATCH`` lines of a batch script set the options that the command line does not set.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As :meth:`click.Command.parse_args`; the command becomes the parameter ``command``."""
        own, dashes, command = _split(args)
        rest = super().parse_args(ctx, own)
        if ctx.resilient_parsing:
            return rest
        if not dashes:
            raise click.UsageError(
                "The command of a task stands after --, such as: malletrain map --tasks runs.csv "
                "-- ./simulate --lr {lr}",
                ctx,
            )
        if not command:
            raise click.UsageError("There is no command after --.", ctx)
        ctx.params["command"] = tuple(command)
        _apply_script(self, ctx)
        return rest


def _split(args: list[str]) -> tuple[list[str], bool, list[str]]:
    """Return the arguments before the first ``--``, whether there is one, and those after it."""
    if "--" not in args:
        return args, False, []
    at = args.index("--")
    return args[:at], True, args[at + 1 :]


def _apply_script(map_command: click.Command, ctx: click.Context) -> None:
    """Use the ``#MALLETRAIN`` and ``#SBATCH`` lines of the script that the command names, if it is
    one, and the interpreter of a script that is not executable. The command line overrides both,
    and ``#MALLETRAIN`` lines override ``#SBATCH`` lines.
    """
    from malletrain.identity.keys import user_name
    from malletrain.submission.directives import batch_options
    from malletrain.submission.error import SpecError
    from malletrain.submission.farm import script_words

    script = ctx.params["command"][0]
    command, text = script_words(ctx.params["command"])
    ctx.params["command"] = tuple(command)
    apply_directives(map_command, ctx, script, text)
    try:
        options = batch_options(text, script, user_name())
    except SpecError as error:
        raise click.UsageError(str(error), ctx) from None
    explicit = {
        name for name in ctx.params if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE
    }
    explicit.update(ctx.meta[LINES])
    values = dict(options.values)
    if "memory_bytes" in values:
        values["memory"] = values.pop("memory_bytes")
    if "time_s" in values:
        values["time"] = values.pop("time_s")
    if explicit & {"tasks", "each", "array"}:
        values.pop("array", None)
    elif "array" in values:
        values["array_env"] = True
    for name, value in values.items():
        if isinstance(value, tuple):
            ctx.params[name] = (*value, *ctx.params[name])
        elif name not in explicit:
            ctx.params[name] = value
    if options.ignored:
        say(
            f"Note: these options of sbatch mean nothing to a farm and are left out: "
            f"{' '.join(options.ignored)}."
        )


@click.command(
    "map",
    cls=_BeforeDashes,
    options_metavar="[OPTIONS]",
    context_settings={"allow_interspersed_args": True},
)
@click.option(
    "--tasks",
    metavar="FILE",
    type=click.Path(dir_okay=False),
    shell_complete=files,
    help="A task for each row: CSV or TSV whose first line names the columns, or JSON lines; - is "
    "the standard input. {name} in the command is the value of a column.",
)
@click.option(
    "--each",
    metavar="PATTERN",
    multiple=True,
    shell_complete=files,
    help='A task for each file, in natural order: a pattern such as "data/*.nc" or "**/*.csv", or '
    "names of files. {} in the command is the file.",
)
@click.option(
    "--array",
    metavar="LIST",
    help="A task for each index, as sbatch writes it, such as 1-1000:2 or 1,4,9; {index} in the "
    "command is the index.",
)
@name_option
@click.option(
    "--nodes",
    metavar="MIN:MAX",
    help="Nodes the farm can use, or slots of one kind: N, or MIN:MAX to grow and shrink. Without "
    "--kind MalleTrain chooses the class. Default: 1.",
)
@slots_option
@kind_option
@click.option(
    "--cpus",
    type=int,
    metavar="N",
    help="Processors of a task, as the scheduler counts them. Default: without --gpus one task a "
    "node at a time.",
)
@click.option(
    "--gpus",
    type=int,
    default=0,
    metavar="N",
    help="GPUs of a task. (--gpus of malletrain submit is another option: the GPUs of the job.)",
)
@click.option("--memory", metavar="SIZE", help='Memory of a task, such as "4 GB".')
@click.option(
    "--time",
    metavar="TIME",
    help='Maximum duration of a task, such as "30 min". A task that exceeds it is stopped, and has '
    "failed.",
)
@click.option(
    "--drain",
    metavar="TIME",
    help="How long the tasks on a node may go on when it is about to be taken, such as "
    '"20 s", at most as long as the notice allows. Then they get SIGTERM. Default: at once.',
)
@click.option(
    "--retries",
    type=int,
    default=0,
    show_default=True,
    metavar="N",
    help="Number of failures (exit codes other than 0) after which a task is tried again. A node "
    "that is lost is no failure.",
)
@click.option(
    "--output",
    metavar="PATTERN",
    help="Result file of a task, such as results/{index}.nc. {output} in the command is a "
    "temporary name beside it, which is renamed after exit code 0.",
)
@click.option(
    "--log",
    metavar="PATTERN",
    help="File of a task's output and errors. Default: "
    "malletrain-logs/NAME-TIME/{index}.log in the working directory.",
)
@click.option(
    "--checkpoint",
    metavar="PATTERN",
    help="Directory that each try of a task gets as $MALLETRAIN_CHECKPOINT_DIR, such as "
    "checkpoints/{index}.",
)
@click.option(
    "--array-env/--no-array-env",
    default=False,
    help="Set SLURM_ARRAY_TASK_ID, PBS_ARRAY_INDEX and their like for each task. Default: only for "
    "a script whose #SBATCH lines have --array.",
)
@click.option(
    "--max-running",
    type=int,
    metavar="N",
    help="Maximum number of tasks that run at a time on all nodes together, such as licences that "
    "they need. Default: N of %N in --array, else as many as the nodes have room for.",
)
@click.option(
    "--duplicate-stragglers",
    is_flag=True,
    help="Run a task that is late on a second node too; the first result counts. Only for tasks "
    "that can run twice at the same time.",
)
@weight_option
@deadline_and_budget_options
@environment_options
@start_and_end_options
@notify_option
@click.option(
    "--dry-run",
    is_flag=True,
    help=f"Print the number of tasks and the first {SHOWN} command lines, and submit nothing.",
)
@click.option(
    "--wait",
    is_flag=True,
    help="Wait until the farm has ended. Exit codes: 0 all tasks are done, 1 some failed, 3 it was "
    "cancelled.",
)
@state_dir_option
@json_option
@click.argument("names", nargs=-1, metavar="[FILES]... -- COMMAND...", shell_complete=files)
def map_(
    command: tuple[str, ...],
    tasks: str | None,
    each: tuple[str, ...],
    array: str | None,
    names: tuple[str, ...],
    dry_run: bool,
    wait: bool,
    state_dir: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Run COMMAND once for each task of a list, on idle nodes.

    The list is a file of rows, files, indices of an array, or the lines of the standard input.
    Nodes may come and go: a task whose node is lost runs again, and a task is done when its exit
    code is 0. Names in braces in COMMAND, and in the patterns of files, stand for the values of a
    task; no shell reads COMMAND, so that pipes need sh -c '...'. A batch script runs unchanged: its
    #SBATCH lines set the options that the command line leaves open, as do lines such as
    "#MALLETRAIN --nodes 1:16" at its head, which override them.

    \b
    Examples:
      malletrain map --tasks runs.csv --nodes 1:8 --cpus 1 -- ./simulate --lr {lr} --seed {seed}
      malletrain map --each "data/*.nc" --output "{}.png" -- ./plot {} {output}
      malletrain map --array 1-1000 --cpus 2 --time "1 h" --retries 1 -- python run.py {index}
      seq 100 | malletrain map --cpus 1 -- ./run {}
      malletrain map --nodes 1:16 -- array.sbatch
    """
    from malletrain.submission.error import SpecError
    from malletrain.submission.farm import TaskOptions, build_farm, check_files
    from malletrain.submission.options import JobOptions
    from malletrain.submission.software import SoftwareOptions
    from malletrain.submission.task_lists import TaskList

    software = SoftwareOptions(**{f.name: options.pop(f.name) for f in fields(SoftwareOptions)})
    of_tasks = {name: options.pop(name) for name in TASK_OPTIONS}
    try:
        elsewhere = options["workdir"] is not None
        with _opened(tasks, (*each, *names), array, bool(each), elsewhere) as (source, at_once):
            rows = TaskList(source)
        if of_tasks["max_running"] is None:
            of_tasks["max_running"] = at_once
        with contextlib.closing(rows):
            if source.columns == ("index",) and array is not None:
                of_tasks["array_range"] = _range_of(rows)
            task_options = TaskOptions(**of_tasks)
            job_options = JobOptions(software=software, **options)
            spec, notes = build_farm(command, rows.columns, rows.count, task_options, job_options)
            assert spec.farm is not None
            check_files(spec.farm, rows.groups())
            for note in notes:
                say(note)
            if dry_run:
                _print_commands(spec, rows, as_json)
                return
            _submit(spec, rows, state_dir, wait=wait, as_json=as_json)
    except SpecError as error:
        raise click.UsageError(str(error), click.get_current_context()) from None


@contextlib.contextmanager
def _opened(
    tasks: str | None,
    each: tuple[str, ...],
    array: str | None,
    has_each: bool,
    elsewhere: bool,
) -> Iterator[tuple[TaskInput, int]]:
    """Yield the input that the options name, and how many of its tasks run at a time by the list
    itself (0: no limit). ``elsewhere``: the tasks run in another directory.
    """
    from malletrain.submission import task_lists
    from malletrain.submission.error import SpecError

    if each and not has_each:
        raise SpecError(
            f"{each[0]} stands before -- and belongs to no option; the command comes after --, "
            "files after --each."
        )
    if sum((tasks is not None, has_each, array is not None)) > 1:
        raise SpecError("--tasks, --each and --array each give the tasks; use one of them.")
    if has_each:
        yield task_lists.files_of(each, absolute=elsewhere), 0
    elif array is not None:
        source, at_once = task_lists.array_of(array)
        yield source, at_once or 0
    elif tasks is not None and tasks != "-":
        try:
            with open(Path(tasks).expanduser(), "rb") as file:
                yield task_lists.open_tasks(file, tasks), 0
        except OSError as error:
            raise SpecError(f"--tasks: {tasks} cannot be read: {error.strerror}.") from None
    else:
        stdin = sys.stdin.buffer if sys.stdin is not None else None  # None: it is closed
        if stdin is None or stdin.isatty():
            raise SpecError(
                "There are no tasks: give --tasks FILE, --each PATTERN or --array LIST, or write "
                "lines to the standard input."
            )
        if tasks is None:
            yield task_lists.open_lines(stdin, _STDIN), 0
        else:
            yield task_lists.open_tasks(stdin, _STDIN), 0


def _range_of(rows: TaskList) -> tuple[int, int, int]:
    """Return the smallest and largest index of an array, and the step that all indices have, else
    1.
    """
    numbers = sorted(int(values[0]) for _, group in rows.groups() for values in group)
    steps = {after - before for before, after in pairwise(numbers)}
    return numbers[0], numbers[-1], steps.pop() if len(steps) == 1 else 1


def _print_commands(spec: JobSpec, rows: TaskList, as_json: bool) -> None:
    """Print what would be submitted."""
    from malletrain.submission.farm import command_line

    assert spec.farm is not None
    lines = [command_line(spec.farm, values, k) for k, values in enumerate(rows.head(SHOWN))]
    if as_json:
        print_json({"tasks": rows.count, "commands": lines})
        return
    click.echo("\n".join(lines))
    more = rows.count - len(lines)
    click.echo(counted(rows.count, "task")
               + (f", {more:,} more than these." if more else "."))  # fmt: skip


def _submit(
    spec: JobSpec, rows: TaskList, state_dir: Path | None, *, wait: bool, as_json: bool
) -> None:
    """Submit the farm and add its tasks. Its tasks are added once, whatever is repeated."""
    from malletrain.api.client import Client
    from malletrain.client import ClientError, operations
    from malletrain.client.connection import upload

    try:
        with Client(state_dir) as client:
            job = client.do(operations.submit(spec))
            try:
                with _progress(rows.count) as progress:
                    upload(client.do, job.id, rows.groups(), progress)
            except (ClientError, KeyboardInterrupt):
                _cancel(client, job.id)
                raise
            view = _after_upload(client, job)
    except ClientError as error:
        raise refusal(error) from None
    if not (as_json and wait):
        if as_json:
            print_json(view)
        else:
            click.echo(
                f"Submitted {view.name} as job {view.id} with "
                f"{counted(rows.count, 'task')}. Follow it with: malletrain tasks {view.id} "
                "--follow"
            )
            if spec.deadline is not None or spec.budget_nh is not None:
                tell_goal(view.goal)
    if wait:
        ended = until_ended([view.id], state_dir, quiet=as_json)
        if as_json:
            print_json(ended[0])
        click.get_current_context().exit(exit_code(each.state for each in ended))


def _after_upload(client: Client, submitted: JobView) -> JobView:
    """Return the farm with all its tasks; as it was submitted, if the daemon does not answer: it
    has the tasks, and nothing has failed.
    """
    from malletrain.client import ClientError, operations
    from malletrain.client.errors import TRANSIENT

    try:
        return client.do(operations.job(submitted.id)).job
    except ClientError as error:
        if error.code not in TRANSIENT:
            raise
        return submitted


def _cancel(client: Client, job: str) -> None:
    """Cancel a farm whose tasks have not all been added."""
    from malletrain.client import ClientError, operations

    try:
        client.do(operations.cancel([job], "not all of its tasks were added"))
        say(f"Job {job} was cancelled, because not all of its tasks were added.")
    except ClientError as error:
        say(
            f"Job {job} could not be cancelled: {error} The daemon cancels it if no more tasks "
            "come."
        )


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    """Yield a function that shows how many tasks have been added, on a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda count: None
        return
    columns = (TextColumn("Adding tasks"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("tasks", total=total)
        yield lambda count: bar.update(task, completed=count)
