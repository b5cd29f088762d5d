"""``malletrain export``: the weights of a job's snapshot in one file."""

from __future__ import annotations

import os
from pathlib import Path

import click

from malletrain.cli.common import Away, Refused, asking, state_dir_option
from malletrain.cli.completion import job_names
from malletrain.submission.snapshot_paths import snapshot_paths


@click.command()
@click.argument("job", metavar="JOB", shell_complete=job_names())
@click.option(
    "--out",
    "-o",
    type=click.Path(dir_okay=False),
    metavar="FILE",
    help="Where the weights are written.  [default: JOB.safetensors]",
)
@click.option(
    "--object",
    "name",
    default="",
    metavar="NAME",
    help="What the script calls the model in Snapshot(NAME=…).  [default: model, or the only one]",
)
@state_dir_option
def export(job: str, out: str | None, name: str, state_dir: Path | None) -> None:
    """Write the weights of JOB (id, name, or the path of a snapshot) as safetensors.

    The newest good snapshot is read, sharded or not, whatever number of ranks wrote it, while the
    job runs or later. It needs memory for the weights; neither a GPU nor a running daemon.

    \b
    Examples:
      malletrain export train
      malletrain export j3 --out weights.safetensors
      malletrain export runs/big.pt --object teacher
    """
    from malletrain.training.export import read_weights, write_safetensors
    from malletrain.training.snapshot_file import SnapshotError

    out = out or f"{os.path.basename(job).partition('.')[0]}.safetensors"
    try:
        weights = read_weights(_snapshot_of(job, state_dir), name)
        write_safetensors(weights, out)
    except SnapshotError as error:
        raise Refused(str(error)) from None
    except ImportError as error:
        raise Refused(f"Exporting needs torch on this machine: {error}.") from None
    except OSError as error:
        raise Refused(f"The weights cannot be written to {out}: {error.strerror}.") from None
    click.echo(
        f"Wrote {len(weights.tensors)} tensors of {weights.name!r}, {weights.bytes / 1e6:.1f} MB, "
        f"saved {weights.saved}, to {out}."
    )


def _snapshot_of(job: str, state_dir: Path | None) -> str:
    from malletrain.training.owner import path_of
    from malletrain.training.snapshot_file import SnapshotError

    if os.sep in job or os.path.isfile(job):
        return path_of(job)
    try:
        with asking(state_dir) as client:
            view = client.job(job)
    except (Away, Refused) as error:
        try:
            return path_of(job)  # a job of another daemon, or of one that does not run
        except SnapshotError:
            raise error from None
    spec = view.spec
    named = snapshot_paths(spec["script"], spec.get("args", ()), spec["workdir"])
    there = sorted(path for path in named if os.path.isfile(path))
    return there[0] if there else path_of(view.job.id, spec["workdir"])
