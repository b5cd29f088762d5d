"""Writes and reads fields in NetCDF with CF metadata (CF-1.11): the results of ``sample`` and
``assimilate``.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windsr import WindsrError, __version__


@dataclass(frozen=True)
class SampledFields:
    """Fine fields made by a model.

    Args:
        members: [time, member, y, x] m/s.
        terrain: [y, x] m.
        times: [time] datetime64[s], UTC.
        y, x: m.
        low: [time, y/factor, x/factor] m/s, the coarse fields.
        truth: [time, y, x] m/s; None if it is not known.
        mask: [time, y, x] 0..1, of the observations.
        notes: global attributes.
        height: height of the wind above ground, m.
        has_terrain: whether ``terrain`` is known; if not, it is 0 everywhere.
    """

    members: NDArray[np.float32]
    terrain: NDArray[np.float32]
    times: NDArray[np.datetime64]
    y: NDArray[np.floating]
    x: NDArray[np.floating]
    low: NDArray[np.float32]
    truth: NDArray[np.float32] | None = None
    mask: NDArray[np.float32] | None = None
    notes: dict[str, Any] = field(default_factory=dict)
    height: float = 10.0
    has_terrain: bool = True

    @property
    def mean(self) -> NDArray[np.float32]:
        """The members' mean, [time, y, x] m/s."""
        mean: NDArray[np.float32] = self.members.mean(axis=1)
        return mean


_WIND = {"standard_name": "wind_speed", "units": "m s-1", "coordinates": "height"}


def write(path: Path, result: SampledFields, did: str) -> None:
    """Write ``result``, completely or not at all. ``did``: the operation, for the history."""
    import xarray

    axes = ("time", "realization", "y", "x")
    plain = ("time", "y", "x")
    low = np.asarray(result.low)
    factor = len(result.y) // low.shape[1]

    def coarse(axis: NDArray[np.floating], count: int) -> NDArray[np.float64]:
        middle: NDArray[np.float64] = axis[: count * factor].reshape(count, factor).mean(axis=1)
        return middle

    variables: dict[str, Any] = {
        "wind_speed": (
            axes,
            result.members,
            {**_WIND, "long_name": f"{result.height:g} m wind speed, super-resolved"},
        ),
        "wind_speed_mean": (plain, result.mean, {**_WIND, "cell_methods": "realization: mean"}),
        "wind_speed_low": (
            ("time", "y_low", "x_low"),
            low,
            {**_WIND, "cell_methods": "y_low: x_low: mean", "long_name": "coarse input"},
        ),
    }
    if result.has_terrain:
        ground = {"standard_name": "surface_altitude", "units": "m"}
        variables["terrain"] = (("y", "x"), result.terrain, ground)
    if result.members.shape[1] > 1:
        spread = result.members.std(axis=1, ddof=1)
        variables["wind_speed_spread"] = (
            plain,
            spread,
            {**_WIND, "cell_methods": "realization: standard_deviation"},
        )
    if result.truth is not None:
        variables["wind_speed_truth"] = (
            plain,
            result.truth,
            {**_WIND, "long_name": "the fine field itself"},
        )
    if result.mask is not None:
        variables["observation_weight"] = (
            plain,
            result.mask,
            {"units": "1", "long_name": "weight of observations in the composite"},
        )
    dataset = xarray.Dataset(
        variables,
        coords={
            "time": (
                "time",
                result.times.astype("datetime64[ns]"),
                {"standard_name": "time", "axis": "T"},
            ),
            "realization": (
                "realization",
                np.arange(result.members.shape[1]),
                {"standard_name": "realization", "units": "1"},
            ),
            "y": (
                "y",
                result.y,
                {"standard_name": "projection_y_coordinate", "units": "m", "axis": "Y"},
            ),
            "x": (
                "x",
                result.x,
                {"standard_name": "projection_x_coordinate", "units": "m", "axis": "X"},
            ),
            "y_low": (
                "y_low",
                coarse(result.y, low.shape[1]),
                {"standard_name": "projection_y_coordinate", "units": "m"},
            ),
            "x_low": (
                "x_low",
                coarse(result.x, low.shape[2]),
                {"standard_name": "projection_x_coordinate", "units": "m"},
            ),
            "height": (
                (),
                result.height,
                {"standard_name": "height", "units": "m", "positive": "up", "axis": "Z"},
            ),
        },
        attrs={
            "Conventions": "CF-1.11",
            "title": "Super-resolved wind speed",
            "history": f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} windsr "
            f"{__version__}: {did}",
            **{key: value for key, value in result.notes.items() if value is not None},
        },
    )
    for variable in dataset.variables.values():
        variable.encoding.pop("coordinates", None)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    squeeze: dict[str, Any] = {name: {"zlib": True, "complevel": 4} for name in variables}
    squeeze["time"] = {"units": "seconds since 1970-01-01", "dtype": "int64"}
    try:
        dataset.to_netcdf(part, engine="h5netcdf", encoding=squeeze)
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise WindsrError(f"{path} cannot be written: {error}") from error


def read(path: Path) -> SampledFields:
    """Read a file of :func:`write`. Raises WindsrError."""
    import xarray

    if not path.is_file():
        raise WindsrError(f"There is no file {path}; 'windsr sample' writes one.")
    try:
        with xarray.open_dataset(path, engine="h5netcdf") as dataset:
            dataset.load()
            variables = {
                "members": "wind_speed",
                "y": "y",
                "x": "x",
                "low": "wind_speed_low",
            }
            optional = {"truth": "wind_speed_truth", "mask": "observation_weight"}
            arrays = {key: dataset[name].to_numpy() for key, name in variables.items()}
            arrays |= {
                key: dataset[name].to_numpy() for key, name in optional.items() if name in dataset
            }
            has_terrain = "terrain" in dataset
            arrays["terrain"] = (
                dataset["terrain"].to_numpy()
                if has_terrain
                else np.zeros(arrays["members"].shape[-2:], np.float32)
            )
            notes = {
                k: v
                for k, v in dataset.attrs.items()
                if k not in ("Conventions", "title", "history")
            }
            return SampledFields(
                times=dataset["time"].to_numpy().astype("datetime64[s]"),
                notes=notes,
                height=float(dataset["height"]),
                has_terrain=has_terrain,
                **arrays,
            )
    except (OSError, KeyError, ValueError) as error:
        raise WindsrError(f"{path} is not a file that 'windsr sample' wrote: {error}") from error
