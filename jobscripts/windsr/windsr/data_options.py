"""The options of the command line that say where fine fields come from, and the fields."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click


def data_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Where fine fields come from, for train and sample alike."""
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
            click.option("--units", help="Units of the wind where the file says none."),
            click.option(
                "--terrain-file",
                type=click.Path(path_type=Path),
                help="NetCDF with the terrain, where --data has none.",
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


def split_of(options: dict[str, Any]) -> tuple[Any, Any]:
    """(train, test) fields by the data options."""
    from windsr import readers, synthetic
    from windsr.fields import split_by_day

    if options["data"] is None:
        found = synthetic.generate(
            days=options["synthetic_days"],
            size=options["synthetic_size"],
            seed=options["data_seed"],
        )
    else:
        found = readers.read(options["data"], reading_of(options))
    return split_by_day(found, options["test_day"])


def reading_of(options: dict[str, Any]) -> Any:
    """How the files of the data options are read."""
    from windsr.readers import Options

    return Options(options["spacing"], options["height"], options["units"], options["terrain_file"])
