"""Pictures of fields, biases and distributions, as PNG files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windsr.output import SampledFields

WIND_MAP, TERRAIN_MAP, BIAS_MAP = "viridis", "gist_earth", "RdBu_r"


def _new(rows: int, columns: int, width: float = 3.1, height: float = 3.0) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(
        rows, columns, figsize=(width * columns, height * rows), layout="constrained", squeeze=False
    )


def _done(figure: Any, path: Path) -> Path:
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path


def _panel(
    axes: Any, values: NDArray[np.floating], title: str, extent: tuple[float, ...], **how: Any
) -> Any:
    drawn = axes.imshow(values, origin="lower", extent=extent, interpolation="nearest", **how)
    axes.set_title(title, fontsize=9)
    axes.tick_params(labelsize=7)
    return drawn


def _extent(result: SampledFields) -> tuple[float, ...]:
    half = float(np.diff(result.x).mean()) / 2
    return tuple(
        v / 1000
        for v in (result.x[0] - half, result.x[-1] + half, result.y[0] - half, result.y[-1] + half)
    )


def fields(path: Path, result: SampledFields, number: int) -> Path:
    """Draw the fields at time ``number``. Upper row: coarse input, fine fields, the truth if it is
    known; lower row: terrain, error, spread of the members.
    """
    extent = _extent(result)
    several = result.members.shape[1] > 1
    wind: list[tuple[str, NDArray[np.floating]]] = [("coarse input", result.low[number])]
    wind.append(("mean of the members" if several else "super-resolved", result.mean[number]))
    if several:
        wind.append(("one member", result.members[number, 0]))
    if result.truth is not None:
        wind.append(("truth", result.truth[number]))
    below: list[tuple[str, NDArray[np.floating], str, dict[str, Any]]] = []
    if result.has_terrain:
        below.append(("terrain", result.terrain, "m", {"cmap": TERRAIN_MAP}))
    if result.truth is not None:
        error = result.mean[number] - result.truth[number]
        most = float(np.quantile(np.abs(error), 0.995))
        below.append(
            (
                f"{'mean' if several else wind[1][0]} − truth",
                error,
                "m/s",
                {"cmap": BIAS_MAP, "vmin": -most, "vmax": most},
            )
        )
    if several:
        spread = result.members[number].std(axis=0, ddof=1)
        below.append(
            (
                "spread of the members",
                spread,
                "m/s",
                {"cmap": "magma", "vmin": 0, "vmax": float(np.quantile(spread, 0.995))},
            )
        )
    low = min(float(v.min()) for _, v in wind)
    high = max(float(v.max()) for _, v in wind)
    figure, axes = _new(2, max(len(wind), len(below)), height=2.5)
    for k, (title, values) in enumerate(wind):
        drawn = _panel(axes[0, k], values, title, extent, cmap=WIND_MAP, vmin=low, vmax=high)
        figure.colorbar(drawn, ax=axes[0, k], shrink=0.8, label="m/s")
    for k, (title, values, unit, how) in enumerate(below):
        figure.colorbar(
            _panel(axes[1, k], values, title, extent, **how), ax=axes[1, k], shrink=0.8, label=unit
        )
    for unused in (*axes[0, len(wind) :], *axes[1, len(below) :]):
        unused.set_axis_off()
    axes[0, 0].set_ylabel("km")
    axes[1, 0].set_ylabel("km")
    when = np.datetime_as_string(result.times[number], unit="m")
    figure.suptitle(f"Wind at {result.height:g} m, {when} UTC", fontsize=10)
    return _done(figure, path)


def bias(path: Path, made: Mapping[str, SampledFields]) -> Path:
    """Draw the mean error by place of each result; red: too much wind."""
    maps = {
        name: (r.mean - r.truth).mean(axis=0) for name, r in made.items() if r.truth is not None
    }
    largest = max(float(np.quantile(np.abs(m), 0.995)) for m in maps.values())
    figure, axes = _new(1, len(maps))
    for k, (name, values) in enumerate(maps.items()):
        drawn = _panel(axes[0, k], values, f"{name}: mean {values.mean():+.3f} "
                                           "m/s", _extent(made[name]), cmap=BIAS_MAP,
                       vmin=-largest, vmax=largest)  # fmt: skip
    figure.colorbar(drawn, ax=axes[0].tolist(), shrink=0.75, label="made − truth, m/s")
    axes[0, 0].set_ylabel("km")
    return _done(figure, path)


def distributions(
    path: Path, classes: Mapping[str, Mapping[str, Any]], height: float = 10.0
) -> Path:
    """Draw the distribution of wind at ``height`` m by class of terrain, as returned by
    :func:`windsr.evaluate.cdfs`.
    """
    figure, axes = _new(1, len(classes))
    for k, (name, entry) in enumerate(classes.items()):
        panel = axes[0, k]
        for key in (key for key in entry if key not in ("at", "share", "distance")):
            distance = entry.get("distance", {}).get(key)
            label = key if distance is None else f"{key} (off by {distance:.3f})"
            panel.plot(
                entry["at"],
                entry[key],
                label=label,
                color="black" if key == "truth" else None,
                lw=2 if key == "truth" else 1.2,
            )
        panel.set_title(f"{name}, {entry['share']:.0%} of places", fontsize=9)
        panel.set_xlabel(f"{height:g} m wind, m/s", fontsize=8)
        panel.tick_params(labelsize=7)
        panel.grid(alpha=0.3)
        panel.legend(fontsize=6.5, loc="lower right")
    axes[0, 0].set_ylabel("share not above", fontsize=8)
    return _done(figure, path)
