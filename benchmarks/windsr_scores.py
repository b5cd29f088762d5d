"""Part 1 of :mod:`benchmarks.windsr`: trains a method with one day left out and scores it on whole
fields of that day.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from benchmarks.windsr_setting import ROWS, Setting


def trained(setting: Setting, name: str, day: str, seed: int) -> tuple[Any, dict[str, Any]]:
    """Return (method, its costs): trained on all days but one, or loaded if that is done."""
    import torch
    from windsr import checkpoint, methods, patches, train

    torch.set_num_threads(1)
    row = ROWS[name]
    preset, (training_days, _) = setting.preset(row), setting.fold(day)
    if row.method == "bicubic":
        scales = patches.scales_of(training_days, preset)
        return methods.make("bicubic", preset, scales, row.terrain), {}
    folder = setting.folder(name, day, seed)
    path, cost = folder / train.MODEL, folder / "cost.json"
    if not cost.exists():
        mean = None
        if row.method == "windsr-edm":
            trained(setting, "unet", day, seed)
            mean = setting.folder("unet", day, seed) / train.MODEL
        began, cpu = time.time(), time.process_time()
        run = train.TrainingRun(
            row.method,
            preset,
            folder,
            row.terrain,
            seed,
            steps=setting.steps(row),
            snapshot_every=120.0,
            mean=mean,
        )
        train.train(run, training_days, lambda text: None)
        cost.write_text(
            json.dumps(
                {
                    "train_s": time.time() - began,
                    "train_cpu_s": time.process_time() - cpu,
                    "load": os.getloadavg()[0],
                }
            )
        )
    return checkpoint.load(path)[0], json.loads(cost.read_text())


def unit(setting: Setting, name: str, day: str, seed: int) -> dict[str, Any]:
    """Train (unless done) and score one row with one day left out and one seed."""
    path = setting.folder(name, day, seed) / "scores.json"
    if path.exists():
        return json.loads(path.read_text())
    made, cost = trained(setting, name, day, seed)
    row = {"row": name, "day": day, "seed": seed, **cost}
    row |= score(made, setting, day, seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(row, indent=1))
    return row


def score(made: Any, setting: Setting, day: str, seed: int) -> dict[str, Any]:
    """Return the scores of one member, of the mean of 16 and of all, without and with restored
    block means.
    """
    import numpy as np
    import torch
    from windsr import evaluate, grids, methods, verification, whole

    _, test = setting.fold(day)
    chosen = np.linspace(0, len(test.times) - 1, min(setting.plan.fields, len(test.times)))
    test = test.at(chosen.astype(int))
    factor = made.preset.factor
    low = whole.coarse(test, factor)
    draws = hasattr(made, "losses") and made.name.startswith("windsr")
    members = setting.plan.members if draws else 1
    for net in (*made.nets.values(), *made.frozen.values()):
        net.to("cuda" if torch.cuda.is_available() else "cpu")
    began = time.process_time()
    free = whole.make_whole(
        made, low, test.terrain, methods.Draw(members, seed=seed, constrain=False)
    )
    took = time.process_time() - began
    if made.name == "bicubic":  # the preset's interpolation has restored block means already
        free = grids.bicubic(low, factor).clamp_min(0)[:, 0:1].numpy()
    exact = np.stack(
        [
            grids.restore_block_means(torch.from_numpy(f[:, None]), m[None], factor)[:, 0].numpy()
            for f, m in zip(free, low, strict=True)
        ]
    )
    result: dict[str, Any] = {"sample_cpu_s": took, "fields": len(low)}
    for name, fields in (("free", free), ("constrained", exact)):
        peak = made.scales.wind_max
        by_members = {}
        for count in sorted({1, min(16, members), members}):
            part = fields[:, :count]
            by_members[str(count)] = {
                **verification.ensemble_scores(test.wind, part, test.spacing, factor),
                "mae": float(np.abs(part.mean(axis=1, dtype=np.float64) - test.wind).mean()),
                "psnr": evaluate.psnr(test.wind, part.mean(axis=1), peak),
                "ssim": evaluate.ssim(test.wind, part.mean(axis=1), peak),
            }
        result[name] = by_members
    return result


def keep_json(path: Path, value: dict[str, Any]) -> dict[str, Any]:
    """Write a result beside its model."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1))
    return value
