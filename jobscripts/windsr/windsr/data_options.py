"""Options of the command line for the fine fields and for the radius of observations, and their
meaning.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from windsr import WindsrError


def data_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that select the fine fields, for ``train`` and ``sample``."""
    for option in reversed(
        (
            click.option(
                "--data",
                type=click.Path(path_type=Path),
                help="Fine fields: NetCDF, WRF, WIND Toolkit, HRRR. Default: synthetic.",
            ),
            click.option(
                "--synthetic-days",
                type=click.IntRange(2),
                default=4,
                show_default=True,
                help="Days of synthetic fields.",
            ),
            click.option(
                "--synthetic-size",
                type=click.IntRange(16),
                default=128,
                show_default=True,
                help="Points a side of them.",
            ),
            click.option(
                "--data-seed",
                type=int,
                default=0,
                show_default=True,
                help="Seed of synthetic fields.",
            ),
            click.option(
                "--spacing",
                type=click.FloatRange(1.0),
                help="Metres between points of the model's grid; regrids.",
            ),
            click.option(
                "--height",
                type=int,
                default=10,
                show_default=True,
                help="Metres above ground of the wind that is read.",
            ),
            click.option(
                "--units", help="Units of the wind where the file says none, or unknown ones."
            ),
            click.option(
                "--terrain-file",
                type=click.Path(path_type=Path),
                help="NetCDF with the terrain at the points of --data, in any order.",
            ),
            click.option(
                "--test-day",
                multiple=True,
                metavar="DATE",
                help="Day held out for the test; several. Default: the last quarter.",
            ),
        )
    ):
        command = option(command)
    return command


def split_of(options: dict[str, Any], needs_terrain: bool = True) -> tuple[Any, Any]:
    """Return the (train, test) fields that the data options select."""
    from windsr.fields import split_by_day

    return split_by_day(fields_of(options, needs_terrain), options["test_day"])


def fields_of(options: dict[str, Any], needs_terrain: bool) -> Any:
    """Return all fields that the data options select. ``needs_terrain``: whether a file without
    terrain is refused.
    """
    from windsr import readers, synthetic

    if options["data"] is None:
        return synthetic.generate(
            days=options["synthetic_days"],
            size=options["synthetic_size"],
            seed=options["data_seed"],
        )
    return readers.read(options["data"], reading_of(options, needs_terrain))


def reading_of(options: dict[str, Any], needs_terrain: bool = True) -> Any:
    """Return the options for reading the files."""
    from windsr.readers import Options

    return Options(
        options["spacing"],
        options["height"],
        options["units"],
        options["terrain_file"],
        needs_terrain,
    )


def radius_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options for the radius of observations, for ``sample`` and ``assimilate``."""
    for option in reversed(
        (
            click.option(
                "--radius",
                default="dynamic",
                show_default=True,
                metavar="dynamic|PIXELS",
                help="Impact radius of an observation.",
            ),
            click.option(
                "--t1",
                type=click.FloatRange(0),
                help="Dynamic: grows below this deviation of terrain, m. Default: 30.",
            ),
            click.option(
                "--t2",
                type=click.FloatRange(0),
                help="Dynamic: grows below this deviation of wind, m/s. Default: 0.5.",
            ),
            click.option(
                "--largest",
                type=click.IntRange(0),
                default=6,
                show_default=True,
                metavar="PIXELS",
                help="Dynamic: grows no farther; 0: as far as the field goes.",
            ),
        )
    ):
        command = option(command)
    return command


def radius_of(options: dict[str, Any]) -> tuple[float | None, Any]:
    """Return (fixed radius in pixels or None, thresholds of the dynamic one). Raises
    WindsrError.
    """
    from windsr.assimilate import T1_M, T2_MS, Thresholds

    radius = options["radius"]
    try:
        fixed = None if radius == "dynamic" else float(radius)
    except ValueError:
        raise WindsrError(
            f"--radius takes 'dynamic' or a number of pixels, not {radius!r}."
        ) from None
    if fixed is not None and not 0 <= fixed <= 1000:
        raise WindsrError(f"--radius must be from 0 to 1000 pixels, not {radius}.")
    t1 = T1_M if options["t1"] is None else options["t1"]
    t2 = T2_MS if options["t2"] is None else options["t2"]
    return fixed, Thresholds(t1, t2, options["largest"] or None)
