"""``malletrain demo``: the whole system at work on this machine."""

from __future__ import annotations

from pathlib import Path

import click

from malletrain.cli.common import Refused


@click.command()
@click.option(
    "--nodes",
    type=click.IntRange(min=2, max=64),
    default=6,
    show_default=True,
    metavar="N",
    help="Virtual nodes (agents).",
)
@click.option(
    "--trace",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Replay this trace (CSV time_s,node,event; also .gz). Default: a trace drawn from the "
    "statistics of Summit.",
)
@click.option(
    "--duration",
    type=click.FloatRange(min=30, max=3600),
    default=100.0,
    show_default=True,
    metavar="S",
    help="Seconds of the trace: a calm beginning, then nodes become idle and busy; after it all "
    "are idle until the jobs are done.",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Seed of the trace, the preemptions and the jobs.",
)
@click.option(
    "--chaos",
    is_flag=True,
    help="Kill the daemon (kill -9) in the middle, and announce fewer preemptions.",
)
@click.option(
    "--plain", is_flag=True, help="Lines instead of a live screen, for logs. The default in a pipe."
)
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print one JSON object as the last line of stdout; everything else goes to stderr.",
)
@click.option(
    "--web",
    is_flag=True,
    help="Serve the page of 'malletrain web' while it runs; its address is printed at the start.",
)
@click.option(
    "--output",
    metavar="DIR",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("demo-output"),
    show_default=True,
    help="Folder of timeline.png, timeline.svg, the logs and the state directory. A folder of an "
    "earlier demo is replaced.",
)
def demo(
    nodes: int,
    trace: Path | None,
    duration: float,
    seed: int,
    chaos: bool,
    plain: bool,
    as_json: bool,
    web: bool,
    output: Path,
) -> int:
    """Run the whole system on this machine, in at most three minutes on two cores.

    An embedded cluster of virtual nodes, whose main scheduler replays a trace; a real daemon; three
    training jobs, submitted as by 'malletrain submit', which follow the idle nodes; and a second
    copy of each job that runs undisturbed, to compare the accuracy. At the end it prints a summary
    and plots the use of each node over time.

    \b
    Examples:
      malletrain demo
      malletrain demo --web
      malletrain demo --chaos --plain
      malletrain demo --trace summit_idle_week1.csv.gz --output week1

    While it runs, look from another terminal: malletrain top --state-dir demo-output/state
    """
    try:
        from malletrain.demo.main import DemoOptions, run
        from malletrain.demo.stage import DemoError
    except ModuleNotFoundError as error:
        if error.name and error.name.split(".")[0] == "malletrain":
            raise
        raise Refused(
            f"The demo needs the package {error.name}, which is not installed; run: "
            "pip install --find-links WHEELS 'malletrain[demo]'"
        ) from None
    try:
        return run(DemoOptions(nodes, trace, duration, seed, chaos, plain, as_json, output, web))
    except DemoError as error:
        raise Refused(str(error)) from None
