"""The command line: ``windsr train|sample|assimilate|evaluate|plot|synthetic``. Errors are
sentences.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np

from windsr import WindsrError, __version__
from windsr.data_options import (
    data_options,
    fields_of,
    radius_of,
    radius_options,
    reading_of,
    split_of,
)
from windsr.presets import PRESETS, preset_of

METHOD_NAMES = ("windsr", "windsr-edm", "unet", "srcnn", "esrgan")


def say(text: str) -> None:
    """Print a line for the job's log immediately."""
    print(text, flush=True)


@click.group()
@click.version_option(__version__)
def cli() -> None:
    """Diffusion super-resolution of wind speed, as malleable jobs of MalleTrain."""


@cli.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--method", type=click.Choice(METHOD_NAMES), default="windsr", show_default=True)
@click.option("--preset", type=click.Choice(list(PRESETS)), default="gpu", show_default=True)
@click.option(
    "--terrain/--no-terrain",
    default=True,
    show_default=True,
    help="Whether the model sees the terrain. Without, no terrain is needed.",
)
@click.option(
    "--steps", type=click.IntRange(1), help="Steps of the optimizer. Default: the preset's."
)
@click.option(
    "--batch", type=click.IntRange(1), help="Samples a step over all nodes. Default: the preset's."
)
@click.option(
    "--precision", type=click.Choice(["fp32", "bf16", "fp16"]), help="Default: the preset's."
)
@click.option(
    "--mean",
    type=click.Path(path_type=Path),
    help="For windsr-edm: model.safetensors of the regression (--method unet) that it builds on.",
)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option(
    "--snapshot-every", type=click.FloatRange(0), default=60.0, show_default=True, metavar="S"
)
@click.option(
    "--workers",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Processes that load data, on each node.",
)
@click.option(
    "--threads",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Threads of each process on a CPU.",
)
@click.option(
    "--step-delay",
    type=click.FloatRange(0),
    default=0.0,
    metavar="S",
    help="Sleep in every step, to stretch a demo.",
)
@data_options
def train(folder: Path, **options: Any) -> None:
    """Train a model in FOLDER, which all nodes share. Continues an interrupted training.

    On nodes that come and go: malletrain submit --nodes 1:8 jobscripts/windsr/job.py train FOLDER
    …, with --live or without.
    """
    from windsr.train import TrainingRun
    from windsr.train import train as run

    changes = {key: options[key] for key in ("batch", "precision") if options[key] is not None}
    preset = dataclasses.replace(preset_of(options["preset"]), **changes)
    fields, _ = split_of(options, needs_terrain=options["terrain"])
    settings = {
        key: options[key]
        for key in (
            "terrain",
            "seed",
            "steps",
            "snapshot_every",
            "workers",
            "threads",
            "step_delay",
            "mean",
        )
    }
    run(TrainingRun(options["method"], preset, folder, **settings), fields, say)


@cli.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--model",
    type=click.Path(path_type=Path),
    required=True,
    help="model.safetensors of a training.",
)
@click.option(
    "--part",
    type=click.Choice(["test", "train", "all"]),
    default="test",
    show_default=True,
    help="Which days.",
)
@click.option(
    "--coarse",
    type=click.Path(path_type=Path),
    help="Coarse fields over the terrain of --data; default: its block means.",
)
@click.option(
    "--members",
    type=click.IntRange(1),
    default=4,
    show_default=True,
    help="Members of the ensemble.",
)
@click.option(
    "--sample-steps", type=click.IntRange(1), help="Denoising steps. Default: the preset's."
)
@click.option(
    "--scheduler", type=click.Choice(["ddim", "ddpm", "dpm"]), default="ddim", show_default=True
)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option(
    "--overlap",
    type=click.IntRange(0),
    help="Pixels that neighbouring patches share. Default: a quarter of a patch.",
)
@click.option(
    "--halo",
    type=click.IntRange(0),
    help="Pixels at the rim of a patch that are thrown away. Default: a sixteenth of a patch.",
)
@click.option(
    "--observations",
    type=click.Path(path_type=Path),
    help="CSV (time, y, x, wind_speed) brought into what the model sees.",
)
@radius_options
@click.option(
    "--per-step",
    type=click.IntRange(1),
    default=4,
    show_default=True,
    help="Patches a node takes from the queue at once.",
)
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True)
@click.option(
    "--patch-delay",
    type=click.FloatRange(0),
    default=0.0,
    metavar="S",
    help="Sleep for every patch, to stretch a demo.",
)
@data_options
def sample(folder: Path, **options: Any) -> None:
    """Draw fine fields in FOLDER, which all nodes share: a queue of patches, each made exactly
    once, then samples.nc.
    """
    from windsr import checkpoint, queue, readers
    from windsr.methods import Draw

    method, facts = checkpoint.load(options["model"])
    factor, needs_terrain = method.preset.factor, method.terrain
    if options["coarse"] is not None:
        # over the terrain of the fine fields, whatever their own file has
        reading = dataclasses.replace(reading_of(options, False), spacing=None, terrain=None)
        fine = fields_of(options, needs_terrain)
        inputs = queue.from_coarse(readers.read(options["coarse"], reading), fine, factor)
    elif options["part"] == "all":
        inputs = queue.from_fine(fields_of(options, needs_terrain), factor)
    else:
        train_part, test_part = split_of(options, needs_terrain)
        inputs = queue.from_fine(test_part if options["part"] == "test" else train_part, factor)
    for note in _differences(facts, inputs, options["part"]):
        say(f"note: {note}")
    if options["observations"] is not None:
        inputs, sentence = queue.observed(
            inputs, options["observations"], method, *radius_of(options)
        )
        say(sentence)
    draw = Draw(options["members"], options["sample_steps"], options["seed"], options["scheduler"])
    rest = {key: options[key] for key in ("overlap", "halo", "per_step", "threads", "patch_delay")}
    queue.sample(queue.Sampling(folder, draw, **rest), inputs, method, str(options["model"]), say)


def _differences(facts: dict[str, Any], inputs: Any, part: str) -> Iterator[str]:
    """Yield sentences about what makes samples of a model other than its training suggests.

    Args:
        facts: those of the model.
        inputs: the fields.
        part: which days of the data they are, as the option says.
    """
    trained_at = float(facts.get("height", inputs.height))
    if trained_at != inputs.height:
        yield (
            f"the model was trained on wind at {trained_at:g} m, and these fields are at "
            f"{inputs.height:g} m"
        )
    spacing = float(np.diff(inputs.x).mean())
    trained_every = float(facts.get("spacing", spacing))
    if not np.isclose(trained_every, spacing, rtol=0.01):
        yield (
            f"the model was trained on points every {trained_every:g} m, and these fields have "
            f"one every {spacing:g} m"
        )
    days = set(map(str, np.unique(inputs.times.astype("datetime64[D]"))))
    trained_days = sorted(days & set(str(facts.get("days", "")).split(",")))
    if trained_days and inputs.truth is not None and part != "train":
        yield (
            f"the model was trained on {len(trained_days)} of these {len(days)} days "
            f"({', '.join(trained_days[:3])}{', …' if len(trained_days) > 3 else ''}): scores of "
            "these are no test (train and sample with the same --test-day)"
        )


@cli.command()
@click.argument("samples", type=click.Path(path_type=Path))
@click.argument("observations", type=click.Path(path_type=Path))
@click.argument("result", type=click.Path(path_type=Path))
@radius_options
@click.option(
    "--how",
    type=click.Choice(["paste", "innovations"]),
    default="paste",
    show_default=True,
    help="Paste what was observed, or spread what it finds wrong.",
)
def assimilate(samples: Path, observations: Path, result: Path, **options: Any) -> None:
    """Bring OBSERVATIONS (CSV: time, y, x, wind_speed) into finished SAMPLES; writes RESULT
    (NetCDF). WindSR's own way is 'windsr sample --observations': into what the model sees.
    """
    from windsr import output
    from windsr.assimilate import assimilate as paste
    from windsr.assimilate import read_observations, spread_innovations

    fixed, thresholds = radius_of(options)
    bring_in = paste if options["how"] == "paste" else spread_innovations
    finished = output.read(samples)
    members, masks = (
        finished.members.copy(),
        np.zeros((len(finished.times), *finished.terrain.shape), np.float32),
    )
    radii: list[float] = []
    for field, group in read_observations(
        observations, finished.times, finished.y, finished.x
    ).items():
        members[field], masks[field], own = bring_in(
            finished.members[field], finished.terrain, group, fixed, thresholds
        )
        radii += own
    radius = options["radius"]
    notes = {**finished.notes, "observations": str(observations), "impact_radius": radius}
    output.write(
        result,
        dataclasses.replace(finished, members=members, mask=masks, notes=notes),
        f"{len(radii)} observations, radius {radius}",
    )
    mean = f", mean radius {np.mean(radii):.2f} pixels" if radii else ""
    say(
        f"brought {len(radii)} observations into {len(finished.times)} fields{mean}; wrote {result}"
    )


@cli.command()
@click.argument("samples", type=click.Path(path_type=Path), nargs=-1, required=True)
@click.option(
    "--json",
    "json_file",
    type=click.Path(path_type=Path),
    help="Write everything there, distributions too.",
)
def evaluate(samples: tuple[Path, ...], json_file: Path | None) -> None:
    """Scores of one or more SAMPLES against the truth in them, with bicubic interpolation beside
    them.
    """
    from windsr import compare

    table = compare.table_of(samples)
    for line in compare.lines_of(table):
        say(line)
    for name, entry in table["cdfs"].items():
        say(
            f"{name}: largest distance to the true distribution "
            + ", ".join(f"{k} {v:.3f}" for k, v in entry["distance"].items())
        )
    if json_file:
        json_file.write_text(json.dumps(table, indent=1))


@cli.command()
@click.argument("samples", type=click.Path(path_type=Path), nargs=-1, required=True)
@click.option(
    "--out", type=click.Path(path_type=Path), required=True, help="Folder for the pictures."
)
@click.option(
    "--field",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Number of the field that is drawn.",
)
def plot(samples: tuple[Path, ...], out: Path, field: int) -> None:
    """Pictures: fields of each of SAMPLES, and, where the truth is known, bias maps and
    distributions by class of terrain.
    """
    from windsr import compare, pictures

    results = compare.named(samples)
    for name, result in results.items():
        if field >= len(result.times):
            raise WindsrError(
                f"{name} has {len(result.times)} fields; --field {field} is none of them (they "
                "count from 0)."
            )
        say(f"wrote {pictures.fields(out / f'fields-{name}.png', result, field)}")
    if all(result.truth is not None for result in results.values()):
        first = next(iter(results.values()))
        both = {
            "bicubic": dataclasses.replace(first, members=compare.interpolated(first)),
            **results,
        }
        say(f"wrote {pictures.bias(out / 'bias.png', both)}")
        cdfs = compare.table_of(samples)["cdfs"]
        say(f"wrote {pictures.distributions(out / 'cdf.png', cdfs, first.height)}")


@cli.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--days", type=click.IntRange(1), default=4, show_default=True)
@click.option(
    "--hours", type=click.IntRange(1, 24), default=8, show_default=True, help="Fields a day."
)
@click.option("--size", type=click.IntRange(8), default=128, show_default=True)
@click.option(
    "--spacing", type=click.FloatRange(1.0), default=2000.0, show_default=True, help="Metres."
)
@click.option(
    "--relief",
    type=click.FloatRange(0.0),
    default=250.0,
    show_default=True,
    help="Metres, standard deviation.",
)
@click.option("--seed", type=int, default=0, show_default=True)
def synthetic(file: Path, **options: Any) -> None:
    """Write synthetic fields (spectral terrain, mass-consistent flow) to FILE (NetCDF), to look at
    or to train on.
    """
    import xarray

    from windsr.synthetic import generate

    fields = generate(**options)
    dataset = xarray.Dataset(
        {
            "wind_speed": (
                ("time", "y", "x"),
                fields.wind,
                {"standard_name": "wind_speed", "units": "m s-1"},
            ),
            "terrain": (
                ("y", "x"),
                fields.terrain,
                {"standard_name": "surface_altitude", "units": "m"},
            ),
        },
        coords={
            "time": fields.times.astype("datetime64[ns]"),
            "y": ("y", fields.y, {"units": "m", "standard_name": "projection_y_coordinate"}),
            "x": ("x", fields.x, {"units": "m", "standard_name": "projection_x_coordinate"}),
        },
        attrs={"Conventions": "CF-1.11", "source": fields.source},
    )
    try:
        dataset.to_netcdf(file, engine="h5netcdf")
    except OSError as error:
        raise WindsrError(f"{file} cannot be written: {error}") from error
    times, rows, columns = fields.wind.shape
    say(f"wrote {times} fields of {rows} × {columns} points to {file}")


def main(arguments: list[str] | None = None) -> None:
    """Run the command line. Errors that the user can correct are printed as a sentence, with exit
    status 1.
    """
    from malletrain.elastic import ElasticError, SnapshotError, StateError

    try:
        cli.main(args=arguments, prog_name="windsr", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except click.Abort:
        sys.exit(130)
    except (WindsrError, ElasticError, SnapshotError, StateError) as error:
        sys.exit(f"windsr: {error}")
    except ValueError as error:
        if not str(error).startswith("ElasticSampler"):
            raise
        sys.exit(f"windsr: {error}")
    except OSError as error:
        sys.exit(f"windsr: {error.strerror or error}: {error.filename or ''}")
