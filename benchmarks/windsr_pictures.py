"""Pictures of :mod:`benchmarks.windsr`: a forecast made fine with and without stations, beside the
analysis, as figures 6.5 to 6.7 of the WindSR paper: fields, bias by place, distributions.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.windsr_observations import analyses, observe
from benchmarks.windsr_scores import trained
from benchmarks.windsr_setting import ASSIMILATED, Setting

RADIUS = 24.0
"""Radius of all stations, pixels."""


def pictures(setting: Setting) -> list[Path]:
    """Draw the last day with an analysis, made fine by the last of the plan's methods with
    assimilation. Return the files.
    """
    import numpy as np
    import torch
    from windsr import evaluate, grids, methods, pictures, whole
    from windsr.assimilate import conditioned
    from windsr.output import SampledFields

    torch.set_num_threads(1)
    day = [day for day in analyses(setting) if day in setting.days()][-1]
    backgrounds, analysis = analyses(setting)[day]
    shown = [name for name in ASSIMILATED if name in setting.plan.rows][-1]
    made, _ = trained(setting, shown, day, 0)
    factor = made.preset.factor
    low = whole.coarse(backgrounds, factor)
    truth = np.repeat(analysis.wind, len(low), axis=0)
    stations = [observe(truth[k], setting.plan.stations, k) for k in range(len(low))]
    plain = grids.interpolate(low, factor, made.preset.constrained)[:, 0].clamp_min(0).numpy()
    composite, masks, _ = conditioned(plain, analysis.terrain, dict(enumerate(stations)), RADIUS)
    draw = methods.Draw(setting.plan.drawn)
    results = {}
    for name, base, mask in (
        ("without stations", None, None),
        ("with stations", torch.from_numpy(composite[:, None]), masks),
    ):
        estimate = whole.make_whole(made, low, analysis.terrain, draw, base=base)
        results[name] = SampledFields(
            estimate, analysis.terrain, backgrounds.times, analysis.y, analysis.x,
            low[:, 0].numpy(), truth, mask,
        )  # fmt: skip
    folder = setting.out / "pictures"
    files = [
        pictures.fields(folder / f"windsr-{name.split()[0]}.png", result, 0)
        for name, result in results.items()
    ]
    files.append(pictures.bias(folder / "windsr-bias.png", results))
    curves = {"truth": truth, **{name: r.members[:, 0] for name, r in results.items()}}
    files.append(
        pictures.distributions(folder / "windsr-cdf.png", evaluate.cdfs(curves, analysis.terrain))
    )
    return files
