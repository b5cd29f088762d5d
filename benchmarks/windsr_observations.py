"""Part 2 of :mod:`benchmarks.windsr`: errors after sparse observations were brought in."""

from __future__ import annotations

import json
from typing import Any

from benchmarks.windsr_scores import cut_patches
from benchmarks.windsr_setting import Setting

RADII: tuple[float | None, ...] = (2, 4, 6, None)
T1_TRIED, T2_TRIED = (10.0, 30.0, 100.0, 1e9), (0.25, 0.5, 1.0, 1e9)


def observe(truth: Any, share: float, seed: int) -> list[Any]:
    """Observations of one patch: the true wind at random pixels."""
    import numpy as np
    from windsr.assimilate import WindObservation

    rng = np.random.default_rng(seed)
    count = max(1, round(share * truth.size))
    pixels = rng.choice(truth.size, count, replace=False)
    return [
        WindObservation(int(p // truth.shape[1]), int(p % truth.shape[1]), float(truth.flat[p]))
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
        return json.loads(kept.read_text())
    torch.set_num_threads(1)
    made, _ = checkpoint.load(setting.folder("windsr", True, seed) / "model.safetensors")
    training_days, held_out = setting.fields()
    draw = methods.Draw(setting.plan.members, seed=seed)

    def first_guess(fields: Any) -> tuple[Any, Any, Any, Any]:
        low, truth, terrain = cut_patches(fields, made.preset)
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
        low, truth, terrain = cut_patches(held_out, made.preset)
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
    held = methods.HeldPixels(
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
