"""``malletrain simulate``: runs MalleTrain on a trace, with a virtual clock."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from malletrain.cli.common import Refused, print_json, print_text, say
from malletrain.cli.daemon import load
from malletrain.core import defaults

if TYPE_CHECKING:
    from malletrain.core.settings import ControllerSettings
    from malletrain.sim.settings import SimSettings
    from malletrain.sim.slot_kinds import SlotKinds
    from malletrain.sim.workloads import SimJob
    from scavenger.trace.amounts import DividedTrace, TraceKind

F = TypeVar("F", bound=Callable[..., Any])

FILE = click.Path(path_type=Path, dir_okay=False)
POSITIVE = click.FloatRange(min=0, min_open=True)
COUNT = click.IntRange(min=1)


def _seconds(name: str, default: float, what: str) -> Callable[[F], F]:
    return click.option(
        name,
        type=click.FloatRange(min=0),
        default=default,
        show_default=True,
        metavar="S",
        help=what,
    )


def _one_of(name: str, choices: tuple[str, ...], what: str) -> Callable[[F], F]:
    return click.option(
        name, type=click.Choice(choices), default=choices[0], show_default=True, help=what
    )


_TRAINER_OF = "malletrain.trainer_of"
"""Key of click's context: the site's map from users to trainers."""


def _site(context: click.Context, _: click.Parameter, path: Path | None) -> ControllerSettings:
    """Return the settings of the site in ``path``; they become the defaults of the options."""
    from malletrain.core.settings import ControllerSettings

    if path is None:
        return ControllerSettings()
    config = load(path)
    from malletrain.daemon.engine.parties import Parties
    from malletrain.daemon.site.settings import controller_settings

    context.meta[_TRAINER_OF] = Parties(config).trainer
    site = controller_settings(config)
    cost = site.planning.cost
    context.default_map = {
        **(context.default_map or {}),
        "max_jobs": site.planning.max_running,
        "t_fwd": site.planning.t_fwd_s,
        "starvation": site.starvation_s,
        "rescale_up": cost.up_s,
        "rescale_down": cost.down_s,
        "start_cost": cost.start_s,
    }
    return site


_OPTIONS: tuple[Callable[[Any], Any], ...] = (
    click.option(
        "--workload",
        default="hpo",
        show_default=True,
        metavar="hpo|nas|FILE",
        help="Jobs: drawn at random, or CSV or JSON.",
    ),
    click.option(
        "--curves",
        type=FILE,
        metavar="FILE",
        help="Scaling curves, CSV model,nodes,samples_per_s.  [default: built-in]",
    ),
    click.option(
        "--jobs",
        default="1000",
        show_default=True,
        metavar="N|FILE",
        help="Number of jobs; or a real log (SWF, CSV of GPU jobs, sacct, PBS) with their "
        "arrivals, sizes and lengths.",
    ),
    click.option(
        "--jobs-from",
        type=click.FloatRange(min=0),
        default=0.0,
        metavar="H",
        help="Skip the first H hours of that log.",
    ),
    click.option(
        "--per-node",
        type=COUNT,
        metavar="N",
        help="Processors or GPUs of a node, for logs that count those.",
    ),
    click.option(
        "--max-nodes",
        type=COUNT,
        metavar="N",
        help="Maximum number of nodes of a job.  [default: where its curve ends; built-in: 64]",
    ),
    click.option(
        "--samples",
        type=POSITIVE,
        metavar="X",
        help="Work of each job.  [default: hpo 1.3e8, nas 1.28e7]",
    ),
    click.option(
        "--given",
        type=click.Choice(["exact", "other", "linear", "none"]),
        help="What owners state of their jobs' scaling: the true curve, another model's, a "
        "linear one, nothing. If it is not the true one, policy malletrain measures the jobs, and "
        "policy freetrain plans by what is stated.  [default: exact; nas: none]",
    ),
    click.option(
        "--deadlines",
        type=click.FloatRange(min=0, max=1),
        default=0.0,
        metavar="SHARE",
        help="This share of the jobs that need ten minutes or more gets a deadline: 1.5 to 5 times "
        "the time that they need on their largest size.",
    ),
    _one_of(
        "--policy",
        (
            "malletrain",
            "profiled",
            "freetrain",
            "equal",
            "fcfs",
            "gang",
            "doubling",
            "additive",
            "ideal",
        ),
        "Policy that allocates the nodes. gang, doubling and additive restrict how jobs begin and "
        "grow.",
    ),
    click.option(
        "--config",
        "site",
        type=FILE,
        is_eager=True,
        callback=_site,
        metavar="FILE",
        help="Simulate the settings of this site's daemon (TOML); options on the command line take "
        "precedence.  [default: the daemon's defaults]",
    ),
    click.option(
        "--max-jobs",
        type=COUNT,
        default=defaults.MAX_RUNNING,
        show_default=True,
        metavar="J",
        help="Maximum number of jobs that run at the same time.",
    ),
    click.option(
        "--t-fwd",
        type=POSITIVE,
        default=defaults.T_FWD_S,
        show_default=True,
        metavar="S",
        help="Forward-looking time.",
    ),
    _seconds(
        "--starvation",
        defaults.STARVATION_S,
        "Maximum time that a job waits for its minimum (inf: no limit).",
    ),
    _one_of("--costs", ("real", "freetrain"), "Cost model of rescales."),
    _one_of(
        "--mode",
        ("restart", "live"),
        "Cost of a node loss without notice: work since the snapshot, or a step (real costs).",
    ),
    _seconds("--rescale-up", defaults.RESCALE_UP_S, "Pause of growing."),
    _seconds("--rescale-down", defaults.RESCALE_DOWN_S, "Pause of shrinking."),
    _seconds("--start-cost", defaults.START_S, "Pause of starting (real costs)."),
    _seconds("--snapshot-every", 60.0, "Time between snapshots (real costs)."),
    _seconds("--snapshot-cost", 0.0, "Pause of a job for a snapshot (real costs)."),
    _seconds("--notice", 0.0, "Notice of a preemption."),
    _seconds("--lease-delay", 0.0, "Time from the request of a node to its availability."),
    _one_of(
        "--foresight",
        ("none", "age", "known"),
        "Forecast of the remaining time of gaps: none, by their age (as in the daemon), or the "
        "trace itself (the upper bound).",
    ),
    click.option(
        "--hours",
        type=POSITIVE,
        metavar="H",
        help="Stop after H hours.  [default: where the trace ends]",
    ),
    click.option(
        "--seed",
        type=click.IntRange(min=0),
        default=0,
        show_default=True,
        metavar="K",
        help="Seed of all random numbers.",
    ),
)


def simulation_options(command: F) -> F:
    """Add the options of a simulation besides the idle nodes: jobs, policy, costs."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@click.command()
@click.option(
    "--trace",
    "trace_file",
    required=True,
    type=FILE,
    metavar="FILE",
    help="Trace of which node is idle when: CSV time_s,node,event.",
)
@click.option(
    "--node-list",
    type=FILE,
    metavar="FILE",
    help="All nodes, one per line, if the trace does not name them all.",
)
@click.option(
    "--nodes",
    type=COUNT,
    metavar="N",
    help="Draw N of the trace's nodes at random.  [default: all]",
)
@click.option(
    "--slot",
    "slots",
    multiple=True,
    metavar="[KIND=]N|node[@HOSTS]",
    help="For a trace with amounts (CSV time_s,node,event,amount): units, such as GPUs, of a slot; "
    "node: whole nodes. Sizes of jobs then count slots. Several kinds: give it once for each, with "
    "its hosts; hosts of no kind are whole nodes.  [default: 1]",
)
@click.option(
    "--price",
    "prices",
    multiple=True,
    metavar="KIND=X",
    help="Node-hours that one hour of a slot of this kind counts.  [default: its part of a host]",
)
@simulation_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def simulate(
    trace_file: Path,
    node_list: Path | None,
    nodes: int | None,
    slots: tuple[str, ...],
    prices: tuple[str, ...],
    as_json: bool,
    **options: Any,
) -> None:
    """Run model jobs on a trace of idle nodes: the daemon's own controller and allocator, with a
    virtual clock.

    Every number is relative to an upper bound: the samples that the jobs of each moment could
    process if rescales were free.

    \b
    Examples:
      malletrain simulate --trace week1.csv.gz --curves scaling.csv --nodes 1024 --max-jobs 10
      malletrain simulate --trace week1.csv.gz --workload nas --policy equal --json
      malletrain simulate --trace week1.csv.gz --jobs cluster.swf.gz --hours 24
      malletrain simulate --trace week1.csv.gz --config site.toml --t-fwd 300
      malletrain simulate --trace gpus.csv.gz --slot 1
      malletrain simulate --trace mixed.csv.gz --slot gpu=1@g[01-64] --slot cpu=node@c[001-256]
    """
    from malletrain.sim.engine import simulate as run
    from malletrain.sim.results import table
    from malletrain.sim.workloads import WorkloadError
    from scavenger.trace.amounts import read_kinds
    from scavenger.trace.files import read_names
    from scavenger.trace.trace import TraceError

    try:
        names = read_names(node_list) if node_list else None
        divided = read_kinds(trace_file, _kinds(slots), names=names)
        trace, kinds = divided.trace, _slot_kinds(divided, slots, prices)
        if nodes is not None:
            trace = trace.sample(nodes, options["seed"])
        settings = settings_of(options)
        caution = settings.caution()
        if caution:
            say(caution)
        result = run(trace, jobs_of(options), settings, kinds)
    except (TraceError, WorkloadError) as error:
        raise Refused(str(error)) from None
    if as_json:
        print_json(result.to_dict())
    else:
        print_text(table(result))


def _kinds(slots: tuple[str, ...]) -> list[TraceKind]:
    """Return the kinds in the values of --slot."""
    from scavenger.trace.amounts import TraceKind

    try:
        return [TraceKind.parse(text) for text in slots or ("1",)]
    except ValueError as error:
        raise Refused(f"--slot {error}") from None


def _slot_kinds(
    divided: DividedTrace, slots: tuple[str, ...], prices: tuple[str, ...]
) -> SlotKinds | None:
    """Return the kinds of the slots of a trace, at the values of --price; None if there is one
    kind, without a name and a price.
    """
    from malletrain.sim.slot_kinds import SlotKinds

    named = any(mark in text for text in slots for mark in "=@")
    if len(slots) < 2 and not named and not prices:
        return None
    price_of = dict(divided.parts)
    for text in prices:
        kind, _, price = text.rpartition("=")
        if kind not in price_of:
            raise Refused(
                f"--price {text}: give KIND=X; the kinds are {', '.join(sorted(price_of))}."
            )
        try:
            price_of[kind] = float(price)
        except ValueError:
            price_of[kind] = math.nan
        if not 0 < price_of[kind] < math.inf:
            raise Refused(f"--price {text}: a price is a number of node-hours above 0.")
    return SlotKinds(divided.kind_of, price_of)


def settings_of(options: dict[str, Any]) -> SimSettings:
    """Return the settings in the values of :func:`simulation_options`. Raises WorkloadError."""
    from malletrain.sim.model_jobs import CostModel
    from malletrain.sim.policies import POLICIES
    from malletrain.sim.settings import SimSettings

    o = options
    costs = CostModel(
        o["costs"],
        o["rescale_up"],
        o["rescale_down"],
        o["start_cost"],
        o["snapshot_every"],
        o["notice"],
        o["mode"],
        snapshot_s=o["snapshot_cost"],
    )
    return SimSettings(
        POLICIES[o["policy"]],
        costs,
        max_running=o["max_jobs"],
        t_fwd_s=o["t_fwd"],
        starvation_s=o["starvation"],
        lease_delay_s=o["lease_delay"],
        foresight=o["foresight"],
        hours=o["hours"],
        seed=o["seed"],
        time_limit_s=o["site"].planning.time_limit_s,
        site=o["site"],
    )


def jobs_of(options: dict[str, Any]) -> list[SimJob]:
    """Return the jobs in the values of :func:`simulation_options`. Raises WorkloadError."""
    from malletrain.sim import nas, workloads
    from malletrain.sim.joblogs import read_log
    from malletrain.sim.workload_files import read_curves, read_workload
    from malletrain.sim.workloads import built_in, with_deadlines

    o = options
    log = None if o["jobs"].isdigit() else read_log(o["jobs"], per_node=o["per_node"])
    begin = o["jobs_from"] * 3600.0
    end = begin + (o["hours"] or float("inf")) * 3600.0
    log_jobs = [job for job in log.jobs if begin <= job.submit_s < end] if log else []
    log_jobs = [job for job in log_jobs if job.run_s]
    arrivals = [(job.submit_s - begin, job.nodes, job.run_s or 0.0) for job in log_jobs]
    if log and not arrivals:
        raise workloads.WorkloadError(
            f"{o['jobs']}: the log has no job that is submitted in these hours; give other hours "
            "(--jobs-from, --hours)."
        )
    count = len(arrivals) if log else int(o["jobs"])
    if o["workload"] == "nas":
        jobs = nas.nas(
            count,
            o["seed"],
            samples=o["samples"] or nas.NAS_SAMPLES,
            max_nodes=o["max_nodes"] or 64,
        )
    else:
        curves = read_curves(o["curves"]) if o["curves"] else built_in(o["max_nodes"] or 64)
        if o["workload"] == "hpo":
            jobs = workloads.hpo(
                curves,
                count,
                o["seed"],
                samples=o["samples"] or workloads.HPO_SAMPLES,
                max_nodes=o["max_nodes"],
            )
        else:
            if not Path(o["workload"]).exists():
                raise workloads.WorkloadError(
                    f"--workload {o['workload']} is no workload and no file; give hpo, nas, or the "
                    "path of a CSV or JSON file."
                )
            jobs = read_workload(o["workload"], curves)
    if log:
        larger = sum(
            nodes > job.max_nodes for job, (_, nodes, _) in zip(jobs, arrivals, strict=False)
        )
        if larger:
            say(
                f"{larger} of {count} jobs of the log had more nodes than their curves have: they "
                "grow to the largest size of their curve, and run longer than in the log."
            )
        users = [job.user for job in log_jobs]
        arrived = zip(workloads.arriving(jobs, arrivals), users, strict=False)
        jobs = [replace(job, user=user) for job, user in arrived]
    if o["deadlines"]:
        jobs = with_deadlines(jobs, o["deadlines"], seed=o["seed"])
    context = click.get_current_context(silent=True)
    if context is not None and _TRAINER_OF in context.meta:
        jobs = [replace(job, trainer=context.meta[_TRAINER_OF](job.user)) for job in jobs]
    return workloads.with_stated_curves(jobs, o["given"], o["seed"]) if o["given"] else jobs
