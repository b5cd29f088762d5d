"""Part 1 of :mod:`benchmarks.windsr`: trains a method and scores it on held-out days."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from benchmarks.windsr_setting import Setting


def cut_patches(fields: Any, preset: Any) -> tuple[Any, Any, Any]:
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
        return json.loads(kept.read_text())
    torch.set_num_threads(1)
    preset = presets.preset_of(setting.plan.preset)
    training_days, held_out = setting.fields()
    began, cpu = time.time(), time.process_time()
    if method == "bicubic":
        made = methods.make(
            method, preset, patches.scales_of(training_days, preset.factor), terrain
        )
    else:
        run = train.TrainingRun(
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
    row |= score(made, held_out, setting.plan.members, seed, keep=folder)
    folder.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(row, indent=1))
    return row


def score(
    made: Any, held_out: Any, members: int, seed: int, keep: Path | None = None
) -> dict[str, Any]:
    import numpy as np
    from windsr import evaluate, methods

    low, truth, terrain = cut_patches(held_out, made.preset)
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
    row: dict[str, Any] = dict(evaluate.scores(truth, found, made.scales.wind_max))
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
