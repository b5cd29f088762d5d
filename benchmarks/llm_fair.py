"""Fair scheduling of LLM requests, and replicas on idle nodes, on a virtual clock.

    python -m benchmarks.llm_fair [--items users,interactions,adversaries,losses,traces,gaps]
    [--trace FILE …] [--idle FILE] [--seconds 300] [--replicas 1] [--seed 1] [--json]

The dispatcher, its policies and the life table are those of the product; engines are modelled, an
iteration at a time. Each measure has a target, and the table says whether it is met.

* ``users``: two users whose requests always wait, of one application and of two, one with twice the
  weight.
* ``interactions``: 20 users, of whom two send ten times as many interactions of 1 to 10 calls.
* ``adversaries``: two of 20 users claim that all their requests are calls of one interaction, or
  raise the average of their application, or come back after a pause.
* ``losses``: 200 streams, eight at a time, while one of four replicas is lost every 20 s.
* ``traces``: each trace, compressed to 1.5 times what the replicas can serve. ``--trace`` takes the
  forms of Azure, VTC-arena, Mooncake (JSON lines) and ServeGen.
* ``gaps``: models that load in 60, 180 and 600 s on the gaps of Summit's week.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks import llm_fair_cases as cases
from benchmarks import llm_gaps as gaps
from benchmarks import needs
from scavenger.trace import files

from llmserve.traces import TraceFileError, read  # isort: skip

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
TRACES = (
    "vtc_arena_trace.csv.gz",
    "AzureLLMInferenceTrace_conv.csv.gz",
    "AzureLLMInferenceTrace_code.csv.gz",
)
ITEMS = ("users", "interactions", "adversaries", "losses", "traces", "gaps")
LOADS_S = {60.0: 0.94, 180.0: 0.84, 600.0: 0.62}
"""Seconds of loading → share of the idle time of Summit's week that remains useful, computed
independently.
"""


@dataclass(frozen=True)
class Measure:
    """One measured number, and its target."""

    item: str
    measure: str
    value: float
    target: str = ""
    """Target; empty: the number is shown for comparison."""
    met: bool | None = None


def within(value: float, low: float, high: float) -> bool:
    """Return whether a value is in an interval."""
    return low <= value <= high


def users(engine: cases.Engine, seconds: float) -> list[Measure]:
    """Simulate two users whose requests always wait, and two applications."""
    rows = cases.two_users(engine, seconds)
    bound = cases.published_bound(engine, 256)
    item = "two users"
    vtc = rows["vtc"]
    measures = [
        Measure(item, "vtc: service of two / one", vtc["ratio"], "1.00 ± 0.05",
                within(vtc["ratio"], 0.95, 1.05)),
        Measure(item, "vtc: widest difference / bound", vtc["widest"] / bound, "≤ 1",
                vtc["widest"] <= bound),
        Measure(item, "fcfs: service of two / one", rows["fcfs"]["ratio"], "2.0 ± 0.1",
                within(rows["fcfs"]["ratio"], 1.9, 2.1)),
        Measure(item, "fairserve: service of two / one", rows["fairserve"]["ratio"]),
    ]  # fmt: skip
    for longer, item in ((False, "application of weight 2"), (True, "application twice as long")):
        rows = cases.two_applications(engine, seconds, longer=longer)
        fair, total = rows["fairserve"]["ratio"], rows["vtc"]["tokens_per_s"]
        share = rows["fairserve"]["tokens_per_s"] / total
        measures += [
            Measure(item, "fairserve: service of heavy / light", fair, "2.0 ± 0.1",
                    within(fair, 1.9, 2.1)),
            Measure(item, "fairserve: tokens/s / vtc's", share, "≥ 0.98", share >= 0.98),
            Measure(item, "vtc: service of heavy / light", rows["vtc"]["ratio"]),
            Measure(item, "vtc: tokens/s", total),
        ]  # fmt: skip
    return measures


def interactions(engine: cases.Engine, seconds: float, seed: int) -> list[Measure]:
    """Simulate 20 users, two of whom send many more requests."""
    rows = cases.interactions(engine, seconds, seed)
    item = "interactions"
    p99, fcfs = rows["fairserve"]["ttft_p99_s"], rows["fcfs"]["ttft_p99_s"]
    measures = [
        Measure(item, "fairserve: interactions cut", rows["fairserve"]["cut"], "0",
                rows["fairserve"]["cut"] == 0),
        Measure(item, "fairserve: benign TTFT p99 / fcfs's", p99 / fcfs, "≤ 0.5",
                p99 <= 0.5 * fcfs),
    ]  # fmt: skip
    for name, row in rows.items():
        measures += [Measure(item, f"{name}: {key}", value) for key, value in row.items()]
    return measures


def adversaries(engine: cases.Engine, seconds: float) -> list[Measure]:
    """Simulate 20 users, two of whom try to gain service."""
    measures = []
    for case, row in cases.adversaries(engine, seconds).items():
        for name, value in row.items():
            fair = name == "fairserve"
            measures.append(
                Measure(
                    "adversaries",
                    f"{case}, {name}: least benign / due",
                    value,
                    "≥ 0.9" if fair else "",
                    value >= 0.9 if fair else None,
                )
            )
    return measures


def losses(engine: cases.Engine) -> list[Measure]:
    """Simulate streams while replicas are lost; on at least four replicas."""
    engine = cases.Engine(engine.times, engine.capacity, max(4, engine.replicas))
    rows = cases.losses(engine)
    measures = []
    for name, row in rows.items():
        item = f"losses, {name}"
        for key in ("failed", "different"):
            measures.append(Measure(item, f"streams {key}", row[key], "0", row[key] == 0))
        measures.append(Measure(item, "streams disturbed", row["disturbed"]))
    sudden, announced = rows.values()
    beyond = sudden["stall_p50_s"] - cases.DETECTION_S
    return [
        *measures,
        Measure("losses, no notice", "stall p50 beyond detection, s", beyond, "≤ 1", beyond <= 1),
        Measure("losses, no notice", "stall p99, s", sudden["stall_p99_s"]),
        Measure("losses, notice of 5 s", "stall p99, s", announced["stall_p99_s"], "≤ 1",
                announced["stall_p99_s"] <= 1),
        Measure("losses, notice of 5 s", "tokens generated again", announced["repeated"], "≤ 0.02",
                announced["repeated"] <= 0.02),
    ]  # fmt: skip


def traces(engine: cases.Engine, paths: list[Path], seed: int) -> list[Measure]:
    """Return the tokens per second of each policy on each trace."""
    measures = []
    for path in paths:
        rows = cases.trace(engine, read(path), seed)
        fcfs = rows["fcfs"]["tokens_per_s"]
        for name, row in rows.items():
            ratio = row["tokens_per_s"] / fcfs
            if name != "fcfs":
                measures.append(
                    Measure(path.name, f"{name}: tokens/s / fcfs's", ratio, "≥ 0.97", ratio >= 0.97)
                )
            measures += [Measure(path.name, f"{name}: {key}", value) for key, value in row.items()]
    return measures


def gap_accounts(path: Path, lease_s: float, worth: float) -> list[Measure]:
    """Simulate loading on the gaps of a week."""
    trace = files.read(path)
    table = gaps.life_table(trace, gaps.DAY_S)
    week = gaps.lengths(trace, 0.0, trace.duration_s)
    later = gaps.lengths(trace, gaps.DAY_S, trace.duration_s)
    measures = []
    for load_s, expected in LOADS_S.items():
        item = f"load of {load_s:g} s"
        whole = gaps.account(week, table, load_s, lease_s, worth)
        rest = gaps.account(later, table, load_s, lease_s, worth)
        measures += [
            Measure(item, f"allowed by gaps (issued: {expected:g})", whole.allowed),
            Measure(item, "serving / allowed", whole.of_allowed, "≥ 0.9", whole.of_allowed >= 0.9),
            Measure(item, "days 2 to 7: useful time with start cost / without",
                    rest.useful_on / rest.useful, "≥ 1", rest.useful_on >= rest.useful),
            Measure(item, "days 2 to 7: worth with start cost / without",
                    rest.worth_on / rest.worth_off, "≥ 1", rest.worth_on >= rest.worth_off),
            Measure(item, "days 2 to 7: serving without start cost", rest.useful),
            Measure(item, "days 2 to 7: serving with it", rest.serving_on),
            Measure(item, "days 2 to 7: training with it", rest.training_on),
        ]  # fmt: skip
    return measures


def parser() -> argparse.ArgumentParser:
    """The options."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--items", default=",".join(ITEMS))
    options.add_argument(
        "--trace",
        type=Path,
        action="append",
        metavar="FILE",
        help="trace of requests; several times for several (default: those of ../shared)",
    )
    options.add_argument(
        "--idle",
        type=Path,
        default=SHARED / "summit_idle_week1.csv.gz",
        metavar="FILE",
        help="trace of idle nodes (CSV time_s,node,event; also .gz)",
    )
    options.add_argument("--seconds", type=float, default=300.0, help="of the cases without traces")
    options.add_argument("--replicas", type=int, default=1)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--lease", type=float, default=15.0, help="seconds until a node is there")
    options.add_argument(
        "--worth", type=float, default=2.0, help="of a second of serving, in seconds of training"
    )
    options.add_argument("--json", action="store_true")
    return options


def main() -> None:
    """Simulate and print."""
    arguments = parser()
    options = arguments.parse_args()
    selection = options.items.split(",")
    for item in selection:
        if item not in ITEMS:
            arguments.error(f"--items {item!r} is none of {', '.join(ITEMS)}")
    paths = options.trace or [SHARED / "llm_trace" / name for name in TRACES]
    if "traces" in selection:
        for path in paths:
            needs.existing(path, "--trace FILE", "a trace of requests")
    if "gaps" in selection:
        needs.existing(options.idle, "--idle FILE", "when nodes are idle")
    engine = cases.Engine(replicas=options.replicas)
    began, load = time.monotonic(), os.getloadavg()[0]
    measures: list[Measure] = []
    try:
        for item in selection:
            if item == "users":
                measures += users(engine, options.seconds)
            elif item == "interactions":
                measures += interactions(engine, options.seconds, options.seed)
            elif item == "adversaries":
                measures += adversaries(engine, options.seconds)
            elif item == "losses":
                measures += losses(engine)
            elif item == "traces":
                measures += traces(engine, paths, options.seed)
            else:
                measures += gap_accounts(options.idle, options.lease, options.worth)
    except TraceFileError as error:
        sys.exit(str(error))
    wall_s = time.monotonic() - began
    if options.json:
        about = {"options": vars(options), "wall_s": round(wall_s, 1), "load": round(load, 1)}
        row = {**about, "measures": [asdict(measure) for measure in measures]}
        print(json.dumps(row, indent=1, default=str))
        return
    table = Table(title=f"{wall_s:.0f} s")
    for column in ("item", "measure", "value", "target", "met"):
        table.add_column(column, justify="right" if column == "value" else "left")
    for m in measures:
        met = "" if m.met is None else "met" if m.met else "MISSED"
        table.add_row(m.item, m.measure, f"{m.value:.4g}", m.target, met)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
