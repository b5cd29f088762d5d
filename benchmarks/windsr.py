"""WindSR beside bicubic interpolation, SRCNN and ESRGAN; observations brought in with several
radii; training on changing nodes.

    python -m benchmarks.windsr --preset cpu --out FOLDER [--data FILE] [--only tables,trace]

Three parts. (1) PSNR and SSIM on held-out days of every method over several seeds, as table 6.2 of
the WindSR paper. (2) MAE and RMSE after sparse observations were brought in, with impact radii of
2, 4, 6 pixels and the dynamic one, as table 6.3. Observations are true values at random pixels;
errors are taken at all other pixels. T1 and T2 are chosen on the training days. (3) One of the
trainings of part 1 again as a job of MalleTrain on the embedded cluster, whose nodes come and go by
a trace: its scores beside those of the undisturbed seeds.

What is finished is kept in FOLDER and not done again. Without --data the fields are synthetic.
Needs ``jobscripts/windsr``, which is found beside this folder.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

HOME = Path(__file__).resolve().parents[1] / "jobscripts" / "windsr"
sys.path.insert(0, str(HOME))


@dataclass(frozen=True)
class Plan:
    """What a preset of this benchmark does. ``steps`` by method; ``stations``: share of the pixels
    that are observed.
    """

    preset: str
    steps: dict[str, int]
    seeds: int
    members: int
    stations: float
    processes: int
    trace_s: float
    trace_nodes: int


PLANS = {
    "cpu": Plan("cpu", {"windsr": 600, "srcnn": 600, "esrgan": 400}, 3, 4, 0.005, 2, 240.0, 3),
    "gpu": Plan(
        "gpu", {"windsr": 20_000, "srcnn": 20_000, "esrgan": 20_000}, 3, 16, 0.005, 1, 600.0, 4
    ),
    "tiny": Plan("tiny", {"windsr": 8, "srcnn": 8, "esrgan": 4}, 2, 2, 0.02, 1, 20.0, 2),
}
ROWS = (
    ("bicubic", False),
    ("srcnn", False),
    ("esrgan", False),
    ("windsr", False),
    ("windsr", True),
    ("srcnn", True),
)
"""(method, terrain): the paper's, and SRCNN with terrain, so that the gain by terrain and that by
diffusion can be told apart.
"""
PAPER_PSNR = {
    ("srcnn", False): 27.34,
    ("esrgan", False): 28.16,
    ("windsr", False): 31.69,
    ("windsr", True): 32.83,
}
RADII: tuple[float | None, ...] = (2, 4, 6, None)
T1_TRIED, T2_TRIED = (10.0, 30.0, 100.0, 1e9), (0.25, 0.5, 1.0, 1e9)


@dataclass(frozen=True)
class Setting:
    """Where everything is."""

    plan: Plan
    out: Path
    data: Path | None

    def fields(self) -> tuple[Any, Any]:
        """(train, test) by day."""
        from windsr import readers, synthetic
        from windsr.fields import split_by_day

        return split_by_day(
            readers.read(self.data)
            if self.data
            else synthetic.generate(size=64 if self.plan.preset == "tiny" else 200)
        )

    def folder(self, method: str, terrain: bool, seed: int) -> Path:
        """Of one training."""
        return self.out / f"{method}-{'terrain' if terrain else 'plain'}-{seed}"


def _patches(fields: Any, preset: Any) -> tuple[Any, Any, Any]:
    """(low [n, 1, h, w], truth [n, H, W], terrain [n, 1, H, W]): the fields cut into patches side
    by side.
    """
    import numpy as np
    import torch
    from windsr.grids import Tile, block_mean

    size = preset.patch
    rows, columns = (range(0, length - size + 1, size) for length in fields.terrain.shape)
    cut = [Tile(row, column, size).slices for row in rows for column in columns]
    truth = np.stack([wind[where] for wind in fields.wind for where in cut])
    terrain = np.stack([fields.terrain[where] for _ in fields.wind for where in cut])
    return (
        block_mean(torch.from_numpy(truth[:, None]), preset.factor),
        truth,
        torch.from_numpy(terrain[:, None]),
    )


def unit(setting: Setting, method: str, terrain: bool, seed: int) -> dict[str, Any]:
    """Train (unless done) and score one method with one seed; the result is kept beside the
    model.
    """
    import torch
    from windsr import checkpoint, methods, patches, presets, train

    folder = setting.folder(method, terrain, seed)
    kept = folder / "scores.json"
    if kept.exists():
        return json.loads(kept.read_text())  # type: ignore[no-any-return]
    torch.set_num_threads(1)
    preset = presets.preset_of(setting.plan.preset)
    training_days, held_out = setting.fields()
    began, cpu = time.time(), time.process_time()
    if method == "bicubic":
        made = methods.make(
            method, preset, patches.scales_of(training_days, preset.factor), terrain
        )
    else:
        run = train.Training(
            method,
            preset,
            folder,
            terrain,
            seed,
            steps=setting.plan.steps[method],
            snapshot_every=120.0,
        )
        made, _ = checkpoint.load(train.train(run, training_days, lambda text: None))
    trained_s, trained_cpu = time.time() - began, time.process_time() - cpu
    row: dict[str, Any] = {
        "method": method,
        "terrain": terrain,
        "seed": seed,
        "load": os.getloadavg()[0],
    }
    row |= {"train_s": trained_s, "train_cpu_s": trained_cpu}
    row |= _score(made, held_out, setting.plan.members, seed, keep=folder)
    folder.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(row, indent=1))
    return row


def _score(
    made: Any, held_out: Any, members: int, seed: int, keep: Path | None = None
) -> dict[str, Any]:
    import numpy as np
    from windsr import evaluate, methods

    low, truth, terrain = _patches(held_out, made.preset)
    began = time.process_time()
    device = "cuda" if _cuda() else "cpu"
    for net in made.nets.values():
        net.to(device)
    found = (
        made.predict(
            low.to(device), terrain.to(device), range(len(low)), methods.Draw(members, seed=seed)
        )
        .cpu()
        .numpy()
    )
    took = time.process_time() - began
    row = dict(evaluate.scores(truth, found, made.scales.wind_max))
    row["sample_cpu_s"] = took
    curves = evaluate.cdfs({"truth": truth, made.name: found[:, 0]}, terrain[:, 0].numpy())
    row["cdf_distance"] = {name: entry["distance"][made.name] for name, entry in curves.items()}
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        np.save(keep / "held_out.npy", found)
    return row


def _cuda() -> bool:
    import torch

    return torch.cuda.is_available()


# --- part 2 ---


def observe(truth: Any, share: float, seed: int) -> list[Any]:
    """Observations of one patch: the true wind at random pixels."""
    import numpy as np
    from windsr.assimilate import Observation

    rng = np.random.default_rng(seed)
    count = max(1, round(share * truth.size))
    pixels = rng.choice(truth.size, count, replace=False)
    return [
        Observation(int(p // truth.shape[1]), int(p % truth.shape[1]), float(truth.flat[p]))
        for p in pixels
    ]


def _errors(truth: Any, found: Any, stations: list[list[Any]]) -> dict[str, float]:
    """MAE and RMSE at all pixels without a station, and at those within 6 pixels of one."""
    import numpy as np
    from windsr.assimilate import LARGEST, soft_mask

    near = np.stack([soft_mask(truth[0].shape, s, [LARGEST] * len(s))[0] > 0 for s in stations])
    for field, own in enumerate(stations):
        for o in own:
            near[field, o.row, o.column] = False
    elsewhere = np.ones(truth.shape, bool)
    for field, own in enumerate(stations):
        elsewhere[field, [o.row for o in own], [o.column for o in own]] = False
    error = found - truth
    return {
        "mae": float(np.abs(error[elsewhere]).mean()),
        "rmse": float(np.sqrt((error[elsewhere] ** 2).mean())),
        "mae_near": float(np.abs(error[near]).mean()),
        "rmse_near": float(np.sqrt((error[near] ** 2).mean())),
    }


def assimilation(setting: Setting, seed: int) -> dict[str, Any]:
    """Errors without and with observations, by radius, of the model with terrain of one seed."""
    import numpy as np
    import torch
    from windsr import checkpoint, methods
    from windsr.assimilate import Thresholds, assimilate, impact_radius, soft_mask

    kept = setting.folder("windsr", True, seed) / "assimilation.json"
    if kept.exists():
        return json.loads(kept.read_text())  # type: ignore[no-any-return]
    torch.set_num_threads(1)
    made, _ = checkpoint.load(setting.folder("windsr", True, seed) / "model.safetensors")
    training_days, held_out = setting.fields()
    draw = methods.Draw(setting.plan.members, seed=seed)

    def first_guess(fields: Any) -> tuple[Any, Any, Any, Any]:
        low, truth, terrain = _patches(fields, made.preset)
        return (
            low,
            truth,
            terrain,
            made.predict(low, terrain, range(len(low)), draw).numpy().mean(axis=1),
        )

    def composed(
        guess: Any,
        terrain: Any,
        stations: list[list[Any]],
        radius: float | None,
        thresholds: Thresholds,
    ) -> tuple[Any, float]:
        done = [
            assimilate(g, t, s, radius, thresholds)
            for g, t, s in zip(guess, terrain[:, 0].numpy(), stations, strict=True)
        ]
        return np.stack([d[0] for d in done]), float(np.mean([r for d in done for r in d[2]]))

    # T1 and T2 on a few fields of the training days, spread over them.
    few = training_days.at(np.linspace(0, len(training_days.times) - 1, 4).astype(int))
    _, truth, terrain, guess = first_guess(few)
    stations = [observe(t, setting.plan.stations, 1000 * seed + k) for k, t in enumerate(truth)]
    tried = {
        (t1, t2): _errors(
            truth, composed(guess, terrain, stations, None, Thresholds(t1, t2))[0], stations
        )["rmse"]
        for t1 in T1_TRIED
        for t2 in T2_TRIED
    }
    best = Thresholds(*min(tried, key=lambda pair: tried[pair]))

    drawn_before = (
        setting.folder("windsr", True, seed) / "held_out.npy"
    )  # the same patches, members and seed, from part 1
    if drawn_before.exists():
        low, truth, terrain = _patches(held_out, made.preset)
        guess = np.load(drawn_before).mean(axis=1)
    else:
        low, truth, terrain, guess = first_guess(held_out)
    stations = [observe(t, setting.plan.stations, 2000 * seed + k) for k, t in enumerate(truth)]
    rows: dict[str, Any] = {"none": _errors(truth, guess, stations)}
    for radius in RADII:
        found, mean = composed(guess, terrain, stations, radius, best)
        rows["dynamic" if radius is None else f"{radius:g}"] = {
            **_errors(truth, found, stations),
            "mean_radius": mean,
        }
    # The same dynamic mask held fast while the noise is taken away, instead of afterwards.
    masks = [
        soft_mask(g.shape, s, [impact_radius(t, g, o.row, o.column, best) for o in s])
        for g, t, s in zip(guess, terrain[:, 0].numpy(), stations, strict=True)
    ]
    held = methods.Held(
        *(torch.from_numpy(np.stack([m[k] for m in masks])[:, None]) for k in (0, 1))
    )
    drawn = made.predict(low, terrain, range(len(low)), draw, held=held).numpy().mean(axis=1)
    rows["dynamic, while denoising"] = _errors(truth, drawn, stations)
    result = {
        "seed": seed,
        "t1": best.terrain,
        "t2": best.wind,
        "stations": sum(map(len, stations)),
        "patches": len(truth),
        "rows": rows,
    }
    kept.write_text(json.dumps(result, indent=1))
    return result


# --- part 3 ---


def on_trace(setting: Setting, live: bool, trace_file: Path | None) -> dict[str, Any]:
    """The training of WindSR with terrain and seed 0 as a job on nodes that come and go; scored
    like the others.
    """
    from windsr import checkpoint

    from benchmarks.windsr_trace import train_on_trace

    folder = setting.out / f"trace-{'live' if live else 'restart'}"
    kept = folder / "scores.json"
    if kept.exists():
        return json.loads(kept.read_text())  # type: ignore[no-any-return]
    plan = setting.plan
    arguments = [
        "train",
        str(folder / "run"),
        "--preset",
        plan.preset,
        "--steps",
        str(plan.steps["windsr"]),
        "--seed",
        "0",
    ]
    arguments += ["--snapshot-every", "10"]
    arguments += (
        ["--data", str(setting.data)]
        if setting.data
        else ["--synthetic-size", "64" if plan.preset == "tiny" else "200"]
    )
    began = time.time()
    lived = train_on_trace(
        folder, HOME / "job.py", arguments, plan.trace_nodes, plan.trace_s, live, trace_file
    )
    made, facts = checkpoint.load(folder / "run" / "model.safetensors")
    row = {
        "mode": "live" if live else "restart",
        "steps": facts["steps"],
        "wall_s": time.time() - began,
        "load": os.getloadavg()[0],
        **lived,
    }
    row |= _score(made, setting.fields()[1], plan.members, 0)
    kept.write_text(json.dumps(row, indent=1))
    return row


# --- tables ---


def spread(values: Sequence[float], digits: int) -> str:
    """``mean ± standard deviation`` over the seeds."""
    mean = statistics.fmean(values)
    return (
        f"{mean:.{digits}f}"
        if len(values) < 2
        else f"{mean:.{digits}f} ± {statistics.stdev(values):.{digits}f}"
    )


def tables(
    rows: list[dict[str, Any]], observed: list[dict[str, Any]], traced: list[dict[str, Any]]
) -> str:
    """All three tables as text in Markdown."""
    lines = [
        "| method | PSNR, dB | SSIM | RMSE, m/s | CRPS, m/s | PSNR of one member | paper's PSNR |",
        "|---|---|---|---|---|---|---|",
    ]
    for method, terrain in ROWS:
        own = [row for row in rows if (row["method"], row["terrain"]) == (method, terrain)]
        if not own:
            continue
        single = [row.get("psnr_member") for row in own]
        cells = [
            spread([row[key] for row in own], digits)
            for key, digits in (("psnr", 2), ("ssim", 3), ("rmse", 3), ("crps", 3))
        ]
        cells.append(
            spread([float(v) for v in single if v is not None], 2)
            if single[0] is not None
            else "same"
        )
        cells.append(str(PAPER_PSNR.get((method, terrain), "-")))
        lines.append(f"| {method}{', terrain' if terrain else ''} | " + " | ".join(cells) + " |")
    if observed:
        lines += [
            "",
            "| radius, pixels | MAE, m/s | RMSE, m/s | MAE near stations | RMSE near stations | "
            "mean radius |",
        ]
        lines.append("|---|---|---|---|---|---|")
        for name in observed[0]["rows"]:
            own = [result["rows"][name] for result in observed]
            cells = [
                spread([o[key] for o in own], 4) for key in ("mae", "rmse", "mae_near", "rmse_near")
            ]
            cells.append(
                spread([o["mean_radius"] for o in own], 2) if "mean_radius" in own[0] else "-"
            )
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
        lines.append(
            "\nT1, T2 by seed: " + ", ".join(f"{o['t1']:g} m, {o['t2']:g} m/s" for o in observed)
        )
    if traced:
        seeds = [row for row in rows if (row["method"], row["terrain"]) == ("windsr", True)]
        lines += [
            "",
            "| training | PSNR, dB | SSIM | RMSE, m/s | rescales | preempted |",
            "|---|---|---|---|---|---|",
        ]
        for row in seeds:
            lines.append(
                f"| undisturbed, seed {row['seed']} | {row['psnr']:.3f} | {row['ssim']:.4f} | "
                f"{row['rmse']:.4f} | 0 | 0 |"
            )
        for row in traced:
            name = f"on the trace, {row['mode']}, seed 0"
            lines.append(
                f"| {name} | {row['psnr']:.3f} | {row['ssim']:.4f} | {row['rmse']:.4f} | "
                f"{row['rescales']} | {row['lost']} |"
            )
    return "\n".join(lines)


def _attempt(work: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    return work(*arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is not done yet and print the tables; everything goes to FOLDER/windsr.json too."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", choices=PLANS, default="cpu")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--data",
        type=Path,
        help="fine fields with terrain, such as ../shared/data/wind_mogreps_uk/*.nc",
    )
    parser.add_argument(
        "--only", default="tables,trace", help="tables, trace, or both with a comma"
    )
    parser.add_argument("--seeds", type=int, help="default: the preset's")
    parser.add_argument("--modes", default="live,restart", help="of the training on the trace")
    parser.add_argument(
        "--processes", type=int, help="trainings at the same time; default: the preset's"
    )
    parser.add_argument(
        "--trace",
        type=Path,
        help="a trace of nodes to replay; default: a synthetic one with Summit's lengths of gaps",
    )
    options = parser.parse_args(arguments)
    chosen = PLANS[options.preset]
    setting = Setting(
        replace(chosen, seeds=options.seeds or chosen.seeds),
        options.out.resolve(),
        options.data and options.data.resolve(),
    )
    plan = setting.plan
    setting.out.mkdir(parents=True, exist_ok=True)
    began, load = time.time(), os.getloadavg()
    rows: list[dict[str, Any]] = []
    observed: list[dict[str, Any]] = []
    if "tables" in options.only:
        # Seed by seed, so that a run cut short has whole tables of fewer seeds; bicubic has no
        # seed.
        todo = [(m, t, s) for s in range(plan.seeds) for m, t in ROWS if m != "bicubic" or s == 0]
        with ProcessPoolExecutor(
            options.processes or plan.processes, multiprocessing.get_context("spawn")
        ) as pool:
            made = {pool.submit(_attempt, unit, setting, *what): what for what in todo}
            for done in as_completed(made):
                row = done.result()
                rows.append(row)
                print(
                    f"{time.time() - began:.0f} s: {made[done]} {row['psnr']:.2f} dB",
                    file=sys.stderr,
                    flush=True,
                )
            observed = list(
                pool.map(
                    _attempt, [assimilation] * plan.seeds, [setting] * plan.seeds, range(plan.seeds)
                )
            )
    tabled = time.time() - began
    traced = (
        [
            on_trace(setting, live, options.trace)
            for live in (m == "live" for m in options.modes.split(","))
        ]
        if "trace" in options.only
        else []
    )
    result = {
        "plan": asdict(plan),
        "data": str(options.data and options.data.name),
        "tables_s": tabled,
        "wall_s": time.time() - began,
        "load_before": load,
        "load_after": os.getloadavg(),
        "rows": rows,
        "assimilation": observed,
        "trace": traced,
    }
    (setting.out / "windsr.json").write_text(json.dumps(result, indent=1))
    print(tables(rows, observed, traced))
    print(
        f"\n{result['wall_s']:.0f} s in all, load {load[0]:.1f} before and "
        f"{os.getloadavg()[0]:.1f} after"
    )


if __name__ == "__main__":
    main()
