"""The dissertation's Figures 3.3 and 3.12: what a rescale costs by model, and how models scale.

    python -m benchmarks.figures 3.3 [--model shufflenet resnet18 AlexNet] [--mode live restart]
    python -m benchmarks.figures 3.12 --curves dnn_scaling_summit.csv

* ``3.3`` puts a training of each model's size (its parameters in single precision, as torchvision
  states them) through the product's own rescales (:mod:`benchmarks.rescale`) on this machine's
  processors: what of the cost is the state and the processes. **Needs GPUs** for the rest of the
  dissertation's figure: loading kernels, the accelerator's memory, NCCL. Takes minutes.
* ``3.12`` shows curves that were measured elsewhere: throughput over that on one node, and the part
  of perfect scaling that is left.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from allocator import ScalingCurve
from benchmarks.pictures import COLOURS, finish
from malletrain.sim.workload_files import read_curves

MEGABYTES = {
    "shufflenet": 9.1,
    "mobilenet": 14.0,
    "mnasnet1": 17.5,
    "DenseNet": 31.9,
    "resnet18": 46.8,
    "AlexNet": 244.4,
    "vgg16": 553.4,
}
"""Size in single precision: shufflenet_v2_x1_0, mobilenet_v2, mnasnet1_0, densenet121, resnet18,
alexnet, vgg16.
"""


def rescale_cost(args: argparse.Namespace) -> None:
    """Make Figure 3.3."""
    sizes = {name: MEGABYTES[name] for name in args.model}
    command = [sys.executable, "-m", "benchmarks.rescale", "--json"]
    command += [
        "--mode",
        *args.mode,
        "--nodes",
        str(args.ranks),
        "--repeats",
        str(args.repeats or 1),
    ]
    command += ["--model-mb", *(f"{mb:g}" for mb in sizes.values())]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    output = json.loads(done.stdout)
    names = {mb: name for name, mb in sizes.items()}
    rows = [{"model": names[row["model_mb"]], **row} for row in output["rows"]]
    if args.json:
        print(json.dumps({"figure": "3.3", "machine": output["machine"], "rows": rows}))
    else:
        print("| model | MB | mode | event | pause, s |\n|---|---|---|---|---|")
        for row in rows:
            cells = (row["model"], row["model_mb"], row["mode"], row["event"], row["pause_s"])
            print("| " + " | ".join(map(str, cells)) + " |")
        print(f"Load average before: {output['machine']['load_before']:.1f}")
    draw_cost(rows, args.out / "fig3-3.png")


def draw_cost(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw bars by model, those of growing, shrinking and starting beside each other."""
    from matplotlib.figure import Figure

    models = list(dict.fromkeys(row["model"] for row in rows))
    modes = list(dict.fromkeys(row["mode"] for row in rows))
    events = ("grow-1", "shrink-1", "first-start")
    picture = Figure(figsize=(6.4, 3.2), dpi=100, layout="constrained")
    for axes, mode in zip(picture.subplots(1, len(modes), squeeze=False)[0], modes, strict=True):
        for k, event in enumerate(events):
            heights = [
                next(
                    row["pause_s"]
                    for row in rows
                    if (row["model"], row["mode"], row["event"]) == (model, mode, event)
                )
                for model in models
            ]
            at = [i + 0.27 * (k - 1) for i in range(len(models))]
            bars = axes.bar(at, heights, 0.27, color=COLOURS[k], label=event.replace("-", " "))
            axes.bar_label(bars, [f"{h:.2g}" for h in heights], fontsize=7, padding=1)
        axes.set_xticks(range(len(models)), [f"{m}\n{MEGABYTES[m]:.0f} MB" for m in models])
        axes.tick_params(axis="x", labelsize=8)
        axes.set_title(f"{mode} mode", fontsize=9)
        axes.margins(y=0.12)
    picture.axes[0].set_ylabel("nothing is trained for, s", fontsize=9)
    picture.axes[0].legend(frameon=False, fontsize=8)
    finish(picture, path)


def efficiency(curve: ScalingCurve, nodes: int) -> float:
    """Return the efficiency relative to one node."""
    return curve.at(nodes) / (nodes * curve.at(1))


def scaling(args: argparse.Namespace) -> None:
    """Make Figure 3.12."""
    from matplotlib.figure import Figure

    curves = read_curves(args.curves)
    sizes = sorted({n for curve in curves.values() for n, _ in curve.points})
    rows = [
        {
            "model": name,
            "one": round(curve.at(1), 1),
            **{str(n): round(efficiency(curve, n), 3) for n in sizes if n > 1},
            "concave": concave(curve),
        }
        for name, curve in curves.items()
    ]
    if args.json:
        print(json.dumps({"figure": "3.12", "rows": rows}))
    else:
        print("| " + " | ".join(rows[0]) + " |\n|" + "---|" * len(rows[0]))
        for row in rows:
            print("| " + " | ".join(str(value) for value in row.values()) + " |")
    picture = Figure(figsize=(7.2, 3.4), dpi=100, layout="constrained")
    left_axes, right = picture.subplots(1, 2)
    for k, (name, curve) in enumerate(sorted(curves.items())):
        style = {"marker": "os^v"[k % 4], "markersize": 4, "linewidth": 1.1}
        style["color"] = [*COLOURS, "#666666"][k % (len(COLOURS) + 1)]
        at = [n for n, _ in curve.points]
        left_axes.plot(at, [curve.at(n) / curve.at(1) for n in at], label=name, **style)
        right.plot(at, [efficiency(curve, n) for n in at], **style)
    left_axes.plot(sizes, sizes, color="black", linewidth=0.8, linestyle=":", label="perfect")
    for axes in (left_axes, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, map(str, sizes))
        axes.minorticks_off()
        axes.set_xlabel("nodes")
    left_axes.set_yscale("log", base=2)
    left_axes.set_yticks(sizes, map(str, sizes))
    left_axes.set_ylabel("throughput over that of one node")
    left_axes.legend(frameon=False, fontsize=7)
    right.set(ylabel="part of perfect scaling", ylim=(0, None))
    finish(picture, args.out / "fig3-12.png")


def concave(curve: ScalingCurve) -> bool:
    """Return whether no node adds more than the one before it."""
    points = [(0, 0.0), *curve.points]
    slopes = [
        (points[k + 1][1] - points[k][1]) / (points[k + 1][0] - points[k][0])
        for k in range(len(points) - 1)
    ]
    return all(slopes[k + 1] <= slopes[k] * (1 + 1e-9) for k in range(len(slopes) - 1))
