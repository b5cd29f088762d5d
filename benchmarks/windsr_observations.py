"""Part 2 of :mod:`benchmarks.windsr`: a forecast as the background, the analysis as the truth and
as what stations measure.

For each day that has an analysis, the models were trained without that day; backgrounds are
members of the day's forecast ensemble, made coarse. Errors are taken at all pixels without a
station. Thresholds of the dynamic radius are chosen on the other days.
"""

from __future__ import annotations

import json
from typing import Any

from benchmarks.windsr_scores import keep_json, trained
from benchmarks.windsr_setting import ASSIMILATED, Setting

RADII: tuple[float, ...] = (2, 4, 6, 12, 24, 48)
CAPS = {"dynamic, at most 6": 6, "dynamic": None}
T1_TRIED, T2_TRIED = (30.0, 100.0, 1e9), (0.5, 1.0, 2.0)
WAYS = ("condition", "paste", "innovations")


def analyses(setting: Setting) -> dict[str, tuple[Any, Any]]:
    """Return day → (backgrounds, analysis), cut to whole cells. The file's ``member`` is −1 for an
    analysis; without such a variable it is the last field of each day.
    """
    import numpy as np
    import xarray
    from windsr.presets import preset_of
    from windsr.whole import cut

    fields = cut(setting.fields(), preset_of(setting.plan.preset).factor)
    last = np.array([k == np.flatnonzero(fields.days == d)[-1] for k, d in enumerate(fields.days)])
    if setting.data:
        with xarray.open_dataset(setting.data) as dataset:
            if "member" in dataset and dataset["member"].shape == (len(fields.times),):
                last = dataset["member"].to_numpy() == -1
    results = {}
    for day in np.unique(fields.days[last]):
        own = np.flatnonzero((fields.days == day) & ~last)
        few = own[np.linspace(0, len(own) - 1, min(setting.plan.backgrounds, len(own))).astype(int)]
        results[str(day)] = (fields.at(few), fields.at((fields.days == day) & last))
    return results


def observe(truth: Any, share: float, seed: int) -> list[Any]:
    """Return observations of one field: the true wind at random pixels."""
    import numpy as np
    from windsr.assimilate import WindObservation

    rng = np.random.default_rng(seed)
    count = max(1, round(share * truth.size))
    pixels = rng.choice(truth.size, count, replace=False)
    return [
        WindObservation(int(p // truth.shape[1]), int(p % truth.shape[1]), float(truth.flat[p]))
        for p in pixels
    ]


def _errors(truth: Any, estimate: Any, stations: list[list[Any]]) -> dict[str, float]:
    """Return MAE and RMSE of the fields [n, H, W] at all pixels without a station."""
    import numpy as np

    elsewhere = np.ones(estimate.shape, bool)
    for field, own in enumerate(stations):
        elsewhere[field, [o.row for o in own], [o.column for o in own]] = False
    error = (estimate - truth)[elsewhere]
    return {"mae": float(np.abs(error).mean()), "rmse": float(np.sqrt((error**2).mean()))}


def _thresholds(setting: Setting, day: str, way: str, cap: int | None) -> Any:
    """Return T1 and T2 with the smallest error of the interpolated background on the other days."""
    import numpy as np
    from windsr.assimilate import Thresholds, assimilate, spread_innovations

    bring = spread_innovations if way == "innovations" else assimilate
    others = [pair for other, pair in analyses(setting).items() if other != day]
    made, _ = trained(setting, "bicubic", day, 0)
    tried = {}
    for t1 in T1_TRIED:
        for t2 in T2_TRIED:
            squares = []
            for number, (backgrounds, analysis) in enumerate(others):
                guess = _interpolated(made, backgrounds.at([0]))[0]
                stations = observe(analysis.wind[0], setting.plan.stations, 7000 + number)
                estimate, _, _ = bring(
                    guess, analysis.terrain, stations, None, Thresholds(t1, t2, cap)
                )
                squares.append(_errors(analysis.wind, estimate[None], [stations])["rmse"] ** 2)
            tried[t1, t2] = float(np.mean(squares))
    return Thresholds(*min(tried, key=lambda pair: tried[pair]), cap)


def _interpolated(made: Any, fields: Any) -> Any:
    from windsr import grids, whole

    low = whole.coarse(fields, made.preset.factor)
    constrained = made.preset.constrained
    return grids.interpolate(low, made.preset.factor, constrained)[:, 0].clamp_min(0).numpy()


def thresholds_of(setting: Setting, day: str) -> dict[str, list[float]]:
    """Return T1 and T2 by way and maximum of the dynamic radius, chosen without ``day``. They are
    stored.
    """
    from windsr.assimilate import T1_M, T2_MS

    if not setting.plan.choose:
        ways = [f"{way}, {label}" for way in ("paste", "innovations") for label in CAPS]
        return {way: [T1_M, T2_MS] for way in ways}
    path = setting.out / f"thresholds-{day}.json"
    if path.exists():
        return json.loads(path.read_text())
    results = {}
    for way in ("paste", "innovations"):
        for label, cap in CAPS.items():
            best = _thresholds(setting, day, way, cap)
            results[f"{way}, {label}"] = [best.terrain, best.wind]
    return keep_json(path, results)


def assimilation(setting: Setting, day: str, seed: int) -> dict[str, Any]:
    """Return errors of every method without and with the observations of one day, by way and
    radius.
    """
    chosen = thresholds_of(setting, day)
    rows = {}
    for name in ASSIMILATED:
        if name in setting.plan.rows:
            rows[name] = _row(setting, name, day, seed, chosen)
    return {
        "day": day,
        "seed": seed,
        "backgrounds": len(analyses(setting)[day][0].times),
        "thresholds": chosen,
        "rows": rows,
    }


def _row(
    setting: Setting, name: str, day: str, seed: int, chosen: dict[str, list[float]]
) -> dict[str, Any]:
    """Return the errors of one method by way and radius."""
    path = setting.out / f"assimilation-{name}-{day}-{seed}.json"
    if path.exists():
        return json.loads(path.read_text())
    import numpy as np
    import torch
    from windsr import methods, whole
    from windsr.assimilate import Thresholds, assimilate, conditioned, spread_innovations

    torch.set_num_threads(1)
    backgrounds, analysis = analyses(setting)[day]
    stations = [
        observe(analysis.wind[0], setting.plan.stations, 1000 * seed + k)
        for k in range(len(backgrounds.times))
    ]
    radii: dict[str, float | None] = {f"{r:g}": r for r in RADII} | dict.fromkeys(CAPS)
    made, _ = trained(setting, name, day, seed)
    low = whole.coarse(backgrounds, made.preset.factor)
    draws = made.name == "windsr-edm"
    draw = methods.Draw(setting.plan.drawn if draws else 1, seed=seed)

    def fine(base: Any = None, how: Any = draw, **more: Any) -> Any:
        estimate = whole.make_whole(made, low, backgrounds.terrain, how, base=base, **more)
        return estimate.mean(axis=1)

    first = fine()
    own: dict[str, Any] = {"none": {"none": _errors(analysis.wind, first, stations)}}
    interpolated = _interpolated(made, backgrounds)
    for way in WAYS:
        own[way] = {}
        for label, radius in radii.items():
            thresholds = None
            if radius is None:
                of = "paste" if way == "condition" else way
                terrain, wind = chosen[f"{of}, {label}"]
                thresholds = Thresholds(terrain, wind, CAPS[label])
            if way == "condition":
                composite, _, used = conditioned(
                    interpolated,
                    backgrounds.terrain,
                    dict(enumerate(stations)),
                    radius,
                    thresholds,
                )
                estimate = fine(torch.from_numpy(composite[:, None]))
            else:
                bring = assimilate if way == "paste" else spread_innovations
                done = [
                    bring(f, backgrounds.terrain, s, radius, thresholds)
                    for f, s in zip(first, stations, strict=True)
                ]
                estimate = np.stack([d[0] for d in done])
                used = [r for d in done for r in d[2]]
            own[way][label] = {
                **_errors(analysis.wind, estimate, stations),
                "mean_radius": float(np.mean(used)),
            }
    if draws:
        mask, values = np.zeros((2, *first.shape), np.float32)
        for k, near in enumerate(stations):
            for o in near:
                mask[k, o.row, o.column], values[k, o.row, o.column] = 1, o.value
        pull = methods.Guidance(*(torch.from_numpy(a[:, None]) for a in (mask, values)))
        free = methods.Draw(draw.members, seed=seed, constrain=False)
        estimate = fine(how=free, guidance=pull)
        own["score-based"] = {"none": _errors(analysis.wind, estimate, stations)}
    return keep_json(path, own)
