"""``malletrain assess``: estimates the yield of MalleTrain on a machine.

:class:`ProgressLine` shows the progress of the computation and its remaining time on stderr: a bar
on a terminal, otherwise a line at the start and then every half minute.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from malletrain.cli.common import Refused, print_json, say
from malletrain.cli.simulate import COUNT, FILE, jobs_of, settings_of, simulation_options

EVERY_S = 30.0
"""Time between two lines without a terminal, seconds."""


class ProgressLine:
    """Use it as a context; call :meth:`update` as often as you like."""

    def __init__(self) -> None:
        from rich import progress as bars
        from rich.console import Console

        terminal = Console(stderr=True)
        self._bar = bars.Progress(
            bars.TextColumn("Simulating: {task.description}"),
            bars.BarColumn(),
            bars.TaskProgressColumn(),
            bars.TimeRemainingColumn(),
            console=terminal,
            transient=True,
            disable=not terminal.is_terminal,
        )
        self._tasks: dict[str, bars.TaskID] = {}
        self._lines = not terminal.is_terminal
        self._started_at = self._printed_at = time.monotonic()

    def __enter__(self) -> ProgressLine:
        self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.stop()
        sys.stderr.flush()

    def update(self, what: str, part: float) -> None:
        """Report that the fraction ``part`` (0 to 1) of the task ``what`` is done."""
        if what not in self._tasks:
            self._tasks[what] = self._bar.add_task(what, total=1.0)
            self._started_at = self._printed_at = time.monotonic()
            if self._lines:
                say(f"Simulating: {what} …")
        self._bar.update(self._tasks[what], completed=part)
        now = time.monotonic()
        if self._lines and now - self._printed_at >= EVERY_S and 0 < part < 1:
            self._printed_at = now
            remaining_s = (now - self._started_at) * (1 - part) / part
            say(f"Simulating: {what}, {100 * part:.0f} % done, about {_time(remaining_s)} to go")


def _time(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"


DEFAULT_HOURS = 168.0
MAX_JOBS = 20_000
"""Maximum number of simulated jobs, unless ``--jobs`` asks for more."""


@click.command()
@click.option(
    "--sacct",
    type=FILE,
    metavar="FILE",
    help="Slurm's accounting: the output of the sacct command above.",
)
@click.option(
    "--pbs-logs",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="PBS accounting logs (server_priv/accounting).",
)
@click.option(
    "--swf", type=FILE, metavar="FILE", help="A log in the Standard Workload Format (also .gz)."
)
@click.option(
    "--trace",
    type=FILE,
    metavar="FILE",
    help="Trace of which node is idle when (CSV time_s,node,event; also .gz).",
)
@click.option(
    "--nodes",
    type=COUNT,
    metavar="N",
    help="Number of nodes of the machine.  [default: from the log]",
)
@click.option(
    "--from",
    "begin",
    metavar="TIME",
    help="Time from which the log lists every job: a date, or '30 d' after its first submission.  "
    "[default: found by rule]",
)
@click.option(
    "--to",
    "end",
    metavar="TIME",
    help="Time until which the log lists every job.  [default: found by rule]",
)
@click.option(
    "--gpus-per-node",
    multiple=True,
    metavar="[HOSTS=]N",
    help="Number of GPUs of each host, or of these hosts: a list such as gpu[01-40], or a pattern "
    "such as a100-*. May be given several times.  [default: the most in use at once on the host]",
)
@click.option(
    "--cpus-per-node",
    multiple=True,
    metavar="[HOSTS=]N",
    help="The same for the number of CPUs.",
)
@click.option(
    "--memory-per-node",
    multiple=True,
    metavar="[HOSTS=]SIZE",
    help="The same for the memory, such as '512 GB'.",
)
@click.option(
    "--nodes-file",
    type=FILE,
    metavar="FILE",
    help="GPUs, CPUs and memory of all hosts: the output of sinfo --Node --format='%N|%c|%m|%G' or "
    "of pbsnodes -a -F json, or a CSV with the columns node, gpus, cpus, memory.",
)
@click.option(
    "--slot",
    "slots",
    multiple=True,
    metavar="gpus=K[,cpus=C][,memory=SIZE]",
    help="Share of a host that a lease holds where hosts are shared. Several are compared.  "
    "[default: gpus=1]",
)
@simulation_options
@click.option(
    "--output",
    type=FILE,
    default=Path("assessment.html"),
    show_default=True,
    metavar="FILE",
    help="Path of the report.",
)
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print one JSON object instead of text; the report is written, too.",
)
def assess(
    sacct: Path | None,
    pbs_logs: Path | None,
    swf: Path | None,
    trace: Path | None,
    nodes: int | None,
    begin: str | None,
    end: str | None,
    gpus_per_node: tuple[str, ...],
    cpus_per_node: tuple[str, ...],
    memory_per_node: tuple[str, ...],
    nodes_file: Path | None,
    slots: tuple[str, ...],
    output: Path,
    as_json: bool,
    **options: Any,
) -> None:
    """Estimate the yield of this machine: its gaps, and what MalleTrain would harvest in them with
    given jobs.

    Reads one log of the jobs that ran (or a trace of idle nodes), and writes a report: one
    self-contained HTML file with plots. Gaps are counted over the whole log; a typical week of it
    (or --hours) is simulated. If the log says which GPUs jobs hold, the report tells what is idle
    beside jobs on shared hosts, too.

    \b
    Slurm's accounting:
      sacct --allusers --allocations --duplicates --parsable2 \\
            --starttime=2024-01-01 --endtime=2024-02-01 \\
            --format=JobID,Submit,Start,End,State,NNodes,NodeList,AllocTRES > january.txt
      malletrain assess --sacct january.txt --nodes 1200 --from 2024-01-01 --to 2024-02-01

    \b
    Shared hosts with GPUs:
      sinfo --Node --format='%N|%c|%m|%G' > nodes.txt
      malletrain assess --sacct january.txt --nodes-file nodes.txt \\
            --slot gpus=1 --slot gpus=1,cpus=8,memory=60GB

    \b
    Examples with other logs:
      malletrain assess --pbs-logs /var/spool/pbs/server_priv/accounting
      malletrain assess --swf KTH-SP2-1996.swf.gz --max-jobs 5
      malletrain assess --trace week1.csv.gz --workload nas
    """
    from malletrain.assess.gaps import gap_report, typical_window
    from malletrain.assess.gpus import SlotSize, gpu_report, has_gpus
    from malletrain.assess.hosts import Hosts, MachineUse, SizeRules, read_hosts
    from malletrain.assess.page import Assessment, page, text
    from malletrain.assess.sharing import sharing_report
    from malletrain.assess.whatif import cases, enough_at_a_time, lasting
    from malletrain.sim.accounting_logs import read_pbs, read_sacct
    from malletrain.sim.idle import idle_nodes
    from malletrain.sim.joblogs import read_swf
    from malletrain.sim.observation import moment, observe
    from malletrain.sim.occupancy import lists_cpus, names_nodes, spans_of
    from malletrain.sim.workloads import WorkloadError
    from scavenger.trace.files import read
    from scavenger.trace.trace import TraceError

    inputs = {"--sacct": sacct, "--pbs-logs": pbs_logs, "--swf": swf, "--trace": trace}
    chosen = [(name, path) for name, path in inputs.items() if path is not None]
    if len(chosen) != 1:
        raise click.UsageError(f"Give one of {', '.join(inputs)}.")
    kind, path = chosen[0]
    assumed: tuple[str, ...] = ()
    gpus = bounds = sharing = None
    gpu_options = any((gpus_per_node, cpus_per_node, memory_per_node, nodes_file, slots))
    if gpu_options and kind not in ("--sacct", "--pbs-logs"):
        raise click.UsageError(
            "--gpus-per-node, --cpus-per-node, --memory-per-node, --nodes-file and --slot are for "
            "--sacct and --pbs-logs; other logs do not say what jobs hold on their nodes."
        )
    hours = options["hours"] = options["hours"] or DEFAULT_HOURS
    try:
        if kind == "--trace":
            if nodes is not None or begin or end:
                raise click.UsageError(
                    "--nodes, --from and --to are for logs; a trace names its nodes and is whole."
                )
            idle, source = read(path), f"trace {path.name}"
        else:
            readers = {"--sacct": read_sacct, "--pbs-logs": read_pbs}
            log = (
                readers[kind](path)
                if kind in readers
                else read_swf(path, per_node=options["per_node"])
            )
            edges = (moment(at, log) if at else None for at in (begin, end))
            observed = observe(log, *edges)
            hosts = replace(
                Hosts() if nodes_file is None else read_hosts(nodes_file),
                gpus=SizeRules.parse("--gpus-per-node", gpus_per_node),
                cpus=SizeRules.parse("--cpus-per-node", cpus_per_node),
                memory=SizeRules.parse("--memory-per-node", memory_per_node, is_size=True),
            )
            states_gpus = bool(
                gpus_per_node
                or memory_per_node
                or slots
                or any(size.gpus for size in hosts.listed.values())
            )
            counts_gpus = states_gpus or (log.lists_resources and has_gpus(log))
            is_named = names_nodes(spans_of(log), observed)
            wanted_slots = [SlotSize.parse(text) for text in slots] or [SlotSize()]
            use = None
            if counts_gpus or (is_named and lists_cpus(log.jobs)):
                # What no slot needs is not divided among nodes: a log has millions of jobs.
                with_memory = any(slot.memory for slot in wanted_slots)
                use = MachineUse(log, observed, hosts, with_memory)
            if counts_gpus and use is not None:
                gpus = gpu_report(log, use, hosts, wanted_slots, nodes)
            ground = "as stated (--nodes)"
            named = {name for job in log.jobs for name in job.names}
            if gpus is not None or (nodes is None and is_named):  # where hosts count by name
                hosts.require_forms_of(named)
            if nodes is None and hosts.names and is_named:
                nodes = len({*hosts.names, *named})
                ground = "those that --nodes-file or an option names and those that jobs used"
            elif nodes is None and hosts.listed:
                nodes, ground = len(hosts.listed), "those of --nodes-file"
            availability = idle_nodes(
                log, nodes, observed, nodes_ground=ground, cpus_per_node=hosts.largest_cpus()
            )
            sharing = sharing_report(log, observed, hosts, availability, use)
            idle, source = availability.trace, f"{log.source} {path.name}, {len(log.jobs):,} jobs"
            bounds = availability.bounds
            assumed = (
                *availability.assumptions,
                *sharing.sentences(counts_slots=gpus is not None),
                *(() if gpus is None else gpus.assumptions),
            )
        first, last = typical_window(idle, hours)
        gaps = gap_report(idle)
        part = idle.window(first, last)
        jobs = jobs_of(options)
        if _is_default("max_jobs"):
            options["max_jobs"] = enough_at_a_time(part, jobs, options["max_jobs"])
        settings = settings_of(options)
        if all(map(_is_default, ("jobs", "samples"))) and options["workload"] in ("hpo", "nas"):
            count = lasting(jobs, float(part.gaps().length.sum()))
            options["jobs"] = str(max(len(jobs), min(MAX_JOBS, count)))
            jobs = jobs_of(options)
        with ProgressLine() as progress:
            runs = cases(part, jobs, settings, progress.update) if gaps.idle_node_hours else []
        result = Assessment(
            source,
            gaps,
            tuple(runs),
            (first / 3600, last / 3600),
            (*assumed, *_assumptions(options)),
            " ".join(["malletrain", *sys.argv[1:]]),
            gpus,
            bounds,
            sharing,
        )
        output.write_text(page(result), encoding="utf-8")
    except (TraceError, WorkloadError) as error:
        raise Refused(str(error)) from None
    except OSError as error:
        raise Refused(
            f"The report cannot be written to {output}: {error.strerror or error}."
        ) from None
    except ModuleNotFoundError as error:
        raise Refused(
            f"The report needs the package {error.name}; run: "
            "pip install --find-links WHEELS 'malletrain[demo]'"
        ) from None
    if as_json:
        print_json(result.to_dict())
    else:
        for line in text(result):
            click.echo(line)
        click.echo(f"The report: {output}")


def _is_default(option: str) -> bool:
    """Return whether the option was not given on the command line."""
    source = click.get_current_context().get_parameter_source(option)
    return source is ParameterSource.DEFAULT


def _assumptions(o: dict[str, Any]) -> list[str]:
    """Return the assumptions of the simulation, as sentences."""
    jobs = (
        f"{o['jobs']} jobs"
        if o["jobs"].isdigit()
        else f"jobs that arrive as in {Path(o['jobs']).name}"
    )
    kinds = {
        "hpo": "a hyperparameter search over "
        + ("the models of " + Path(o["curves"]).name if o["curves"] else "built-in models")
    }
    kinds["nas"] = "a search over NAS-Bench-101 cells"
    lines = [
        f"Work: {jobs}, {kinds.get(o['workload'], 'from ' + str(o['workload']))}, at most "
        f"{o['max_jobs']} at a time. "
        "Their throughput by scale is modelled, not measured on this machine, unless --curves "
        "says so.",
        f"A change of scale stops a job for {o['rescale_up']:g} s (growing) or "
        f"{o['rescale_down']:g} s (shrinking), a start for "
        f"{o['start_cost']:g} s; a node is there {o['lease_delay']:g} s after it was asked for.",
    ]
    if o["costs"] == "real":
        notice = f"{o['notice']:g} s of notice" if o["notice"] else "no notice"
        lines.append(
            f"Preemptions come with {notice}; jobs take a snapshot every {o['snapshot_every']:g} s."
        )
    lines.append(
        "The scheduler of the log would have decided the same with MalleTrain's preemptable "
        "leases on its idle nodes."
    )
    return lines
