"""Sampling as a malleable job: a queue of patches on any number of nodes. Each result is made
exactly once.

The position in the queue is an :class:`malletrain.ElasticSampler` that does not shuffle. A finished
patch becomes visible as a complete file, under its own name, by a link that fails if the name
exists. A process that is killed at any moment leaves nothing or a complete result, and a patch that
is made twice leaves one. At the end of the queue, rank 0 finds the patches that were lost with a
node, makes them, and joins all to one NetCDF file. The random numbers of a patch are derived from
its number, so that the result does not depend on the node that made it, except for rounding.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader

import malletrain
import malletrain.elastic as elastic
from windsr import WindsrError, output
from windsr.assimilate import Thresholds, conditioned, read_observations
from windsr.fields import Fields
from windsr.folder_facts import agree, digest_of_arrays, digest_of_model
from windsr.grids import (
    Tile,
    blend_weight,
    block_mean,
    interpolate,
    restore_block_means,
    tiles,
)
from windsr.methods import Draw, Method, mix
from windsr.places import MAX_OFFSET_SHARE
from windsr.train import device_here
from windsr.whole import coarse, cut

PATCHES, SNAPSHOT, FACTS, RESULT = "patches", "queue.snap", "queue.json", "samples.nc"


@dataclass(frozen=True)
class Inputs:
    """The fields to sample: coarse wind [time, h, w] m/s over fine terrain [H, W] m.

    ``truth``: the fine wind if it is known. ``base``: [time, H, W] m/s, the input of the model in
    place of the interpolated coarse wind, with observations in it; ``mask``: their mask.
    ``height``: height of the wind above ground, m. ``has_terrain``: whether the terrain is known.
    """

    low: NDArray[np.float32]
    terrain: NDArray[np.float32]
    times: NDArray[np.datetime64]
    y: NDArray[np.floating]
    x: NDArray[np.floating]
    source: str
    truth: NDArray[np.float32] | None = None
    base: NDArray[np.float32] | None = None
    mask: NDArray[np.float32] | None = None
    height: float = 10.0
    has_terrain: bool = True


def from_fine(fields: Fields, factor: int) -> Inputs:
    """Return the block means of fine fields, with these as the truth. Incomplete coarse cells at
    the far rim are removed.
    """
    own = cut(fields, factor)
    low = coarse(own, factor)[:, 0].numpy()
    return Inputs(
        low,
        own.terrain,
        own.times,
        own.y,
        own.x,
        own.source,
        own.wind,
        height=own.height,
        has_terrain=own.has_terrain,
    )


def from_coarse(coarse: Fields, fine: Fields, factor: int) -> Inputs:
    """Return coarse fields over the terrain of ``fine``, whose wind is ignored. Raises WindsrError
    if the grids do not fit.
    """
    rows, columns = coarse.terrain.shape
    if (rows * factor, columns * factor) != fine.terrain.shape or not np.isclose(
        coarse.spacing, factor * fine.spacing, rtol=0.01
    ):
        raise WindsrError(
            f"{coarse.source} has {rows} × {columns} points every {coarse.spacing:g} m; for "
            f"this model and {fine.source} "
            f"({fine.terrain.shape[0]} × {fine.terrain.shape[1]}, {fine.spacing:g} m) they must "
            f"be {factor} times fewer and wider."
        )
    if coarse.located and fine.located:
        for axis, own, fine_axis in (("y", coarse.y, fine.y), ("x", coarse.x, fine.x)):
            off = np.abs(own - fine_axis.reshape(-1, factor).mean(axis=1)).max()
            if off > MAX_OFFSET_SHARE * coarse.spacing:
                raise WindsrError(
                    f"{coarse.source} is elsewhere than {fine.source}: its cells are up to "
                    f"{off / 1000:.3g} km in {axis} from the middle of the {factor} × {factor} "
                    "points that they should cover. Cut both to one area."
                )
    return Inputs(
        coarse.wind,
        fine.terrain,
        coarse.times,
        fine.y,
        fine.x,
        coarse.source,
        height=coarse.height,
        has_terrain=fine.has_terrain,
    )


def observed(
    inputs: Inputs,
    table: Path,
    method: Method,
    radius: float | None,
    thresholds: Thresholds,
) -> tuple[Inputs, str]:
    """Return ``inputs`` with the observations of a table in the interpolated fields, as input of
    the model, and a sentence about it. Raises WindsrError.
    """
    preset = method.preset
    low = torch.from_numpy(np.ascontiguousarray(inputs.low[:, None]))
    plain = interpolate(low, preset.factor, preset.constrained)[:, 0].clamp_min(0).numpy()
    by_field = read_observations(table, inputs.times, inputs.y, inputs.x)
    base, mask, radii = conditioned(plain, inputs.terrain, by_field, radius, thresholds)
    mean = f", mean radius {np.mean(radii):.2f} pixels" if radii else ""
    sentence = f"brought {len(radii)} observations into the input of the model{mean}"
    return replace(inputs, base=base, mask=mask), sentence


@dataclass(frozen=True)
class Sampling:
    """One sampling. ``folder``: gets the patches and the result; all nodes share it. ``overlap``:
    pixels that neighbouring patches share; ``halo``: pixels at the rim of a patch that are
    discarded. ``per_step``: number of patches that a node makes per step. ``patch_delay``: pause
    per patch, seconds, to stretch a test or a demo.
    """

    folder: Path
    draw: Draw = field(default_factory=Draw)
    overlap: int | None = None
    halo: int | None = None
    per_step: int = 4
    snapshot_every: float = 30.0
    threads: int = 1
    patch_delay: float = 0.0


class PatchQueue:
    """The patches of one sampling and the places of their results."""

    def __init__(self, sampling: Sampling, inputs: Inputs, method: Method, model_name: str) -> None:
        self.sampling, self.inputs, self.method = sampling, inputs, method
        size, factor = method.preset.patch, method.preset.factor
        self.overlap = (
            sampling.overlap if sampling.overlap is not None else size // 4 // factor * factor
        )
        self.halo = min(size // 16, self.overlap // 4) if sampling.halo is None else sampling.halo
        if not 0 <= 2 * self.halo <= self.overlap:
            raise WindsrError(
                f"A halo of {self.halo} pixels does not fit an overlap of {self.overlap}: both "
                "neighbours throw theirs away; give at most half the overlap."
            )
        self.tiles = tiles(
            inputs.terrain.shape[0], inputs.terrain.shape[1], size, factor, self.overlap
        )
        self.items: list[tuple[int, Tile]] = [
            (k, tile) for k in range(len(inputs.times)) for tile in self.tiles
        ]
        if not self.items:
            raise WindsrError(f"{inputs.source}: no field to super-resolve.")
        self.facts = {
            "model": model_name,
            "weights": digest_of_model(method),
            "input": digest_of_arrays(inputs.low, inputs.terrain, inputs.base),
            "draw": [
                sampling.draw.members,
                sampling.draw.steps,
                sampling.draw.seed,
                sampling.draw.scheduler,
            ],
            "patches": len(self.items),
            "overlap": self.overlap,
            "height": inputs.height,
        }
        (sampling.folder / PATCHES).mkdir(parents=True, exist_ok=True)
        agree(sampling.folder / FACTS, self.facts, "patches of another sampling")

    def file(self, number: int) -> Path:
        """Return the file for the result of a patch, [members, size, size] m/s."""
        return self.sampling.folder / PATCHES / f"{number:07d}.npy"

    def missing(self) -> list[int]:
        """Return the patches without a result."""
        return [number for number in range(len(self.items)) if not self.file(number).exists()]

    def make(self, numbers: Sequence[int]) -> int:
        """Make these patches except those with a result. Return the number of results that this
        process wrote.
        """
        todo = [number for number in numbers if not self.file(number).exists()]
        if not todo:
            return 0
        size, factor = self.method.preset.patch, self.method.preset.factor
        device = device_here()
        low, terrain, base = [], [], []
        for number in todo:
            k, tile = self.items[number]
            row, column, side = tile.row // factor, tile.column // factor, size // factor
            low.append(self.inputs.low[k, row : row + side, column : column + side])
            terrain.append(self.inputs.terrain[tile.slices])
            if (seen := self.seen(k)) is not None:
                base.append(seen[tile.slices])
        on = [torch.from_numpy(np.stack(part)[:, None]).to(device) for part in (low, terrain)]
        noise = []
        for number in todo:
            k, tile = self.items[number]
            rows, columns = tile.slices
            noise.append(self.noise(k)[:, rows, columns])
        results = (
            self.method.predict(
                on[0],
                on[1],
                todo,
                self.sampling.draw,
                noise=torch.stack(noise),
                base=torch.from_numpy(np.stack(base)[:, None]).to(device) if base else None,
            )
            .cpu()
            .numpy()
        )
        return sum(
            self.keep(number, members) for number, members in zip(todo, results, strict=True)
        )

    @lru_cache(maxsize=2)  # noqa: B019
    def seen(self, field: int) -> NDArray[np.float32] | None:
        """Return the fine field from which the patches of one time start, [H, W] m/s: with
        observations, or interpolated as a whole, so that the rim of a patch includes its
        surroundings. None if block means are not restored: the interpolation would change the input
        of a patch.
        """
        preset = self.method.preset
        if self.inputs.base is not None:
            own: NDArray[np.float32] = self.inputs.base[field]
            return own
        if not preset.constrained:
            return None
        low = torch.from_numpy(np.ascontiguousarray(self.inputs.low[field]))[None, None]
        interpolated: NDArray[np.float32] = interpolate(low, preset.factor, True)[0, 0].numpy()
        return interpolated

    @lru_cache(maxsize=2)  # noqa: B019
    def noise(self, field: int) -> torch.Tensor:
        """Return the first noise of the members of one time, [members, H, W]. Neighbouring patches
        use parts of it, so that they agree where they overlap, and a member is one coherent field.
        """
        rows, columns = self.inputs.terrain.shape
        parts = []
        for member in range(self.sampling.draw.members):
            generator = torch.Generator().manual_seed(
                mix(self.sampling.draw.seed, "field", field, member)
            )
            parts.append(torch.randn((rows, columns), generator=generator))
        return torch.stack(parts)

    def keep(self, number: int, members: NDArray[np.float32]) -> bool:
        """Write the result of a patch, completely and once. Return False if another process was
        first.
        """
        path = self.file(number)
        part = path.with_name(f".{path.stem}.{os.uname().nodename}.{os.getpid()}")
        with part.open("wb") as file:
            np.save(file, members)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(part, path)
        except FileExistsError:
            return False
        finally:
            part.unlink()
        return True

    def joined(self) -> NDArray[np.float32]:
        """Return all patches as [time, member, H, W] m/s, weighted where they overlap."""
        shape = self.inputs.terrain.shape
        members = np.load(self.file(0)).shape[0]
        sums = np.zeros((len(self.inputs.times), members, *shape))
        weights = np.zeros(shape)
        for tile in self.tiles:
            weights[tile.slices] += self.weight(tile)
        for number, (k, tile) in enumerate(self.items):
            rows, columns = tile.slices
            sums[k, :, rows, columns] += np.load(self.file(number)) * self.weight(tile)
        fields = torch.from_numpy((sums / weights).astype(np.float32))
        if self.method.preset.constrained:
            # the block means of each patch are exact, but not where patches overlap
            factor = self.method.preset.factor
            base = self.inputs.base
            low = torch.from_numpy(self.inputs.low)[:, None]
            if base is not None:
                low = block_mean(torch.from_numpy(base)[:, None], factor)
            fields = torch.stack(
                [
                    restore_block_means(one[:, None], mean[None], factor)[:, 0]
                    for one, mean in zip(fields, low, strict=True)
                ]
            )
        return fields.numpy()

    def weight(self, tile: Tile) -> NDArray[np.float64]:
        """Return the weight of a patch's pixels where patches overlap, [size, size]."""
        rows, columns = (
            n // self.method.preset.factor * self.method.preset.factor
            for n in self.inputs.terrain.shape
        )
        rim = (
            tile.row == 0,
            tile.row + tile.size == rows,
            tile.column == 0,
            tile.column + tile.size == columns,
        )
        return blend_weight(tile.size, self.overlap, self.halo, rim)


def sample(
    sampling: Sampling,
    inputs: Inputs,
    method: Method,
    model_name: str,
    say: Callable[[str], None] = print,
) -> Path:
    """Process the queue, alone, under torchrun or under MalleTrain. Return the path of the result,
    which rank 0 writes.

    Raises:
        WindsrError: the folder belongs to another sampling, or the fields are too small.
    """
    torch.set_num_threads(sampling.threads)
    queue = PatchQueue(sampling, inputs, method, model_name)
    device = device_here()
    for net in (*method.nets.values(), *method.frozen.values()):
        net.to(device).eval()
    at_most = elastic.max_world()
    per_step = max(1, min(sampling.per_step, len(queue.items) // at_most))
    # Each node takes a position in each step. Positions beyond the last patch are empty, so that a
    # job with more nodes than patches ends like any other.
    places = max(len(queue.items), at_most)
    sampler = malletrain.ElasticSampler(places, batch_size=per_step, shuffle=False)
    run = elastic.Run(
        sampler=sampler,
        device=device,
        snapshot=sampling.folder / SNAPSHOT,
        snapshot_every_s=sampling.snapshot_every,
    )
    if run.rank == 0:
        say(
            f"sampling {len(queue.items)} patches on {run.world_size} worker(s), "
            f"{len(queue.missing())} of them still to be made"
        )
        if at_most > len(queue.items):
            say(
                f"the job may have {at_most} nodes and has {len(queue.items)} patches: more nodes "
                "than patches have nothing to do"
            )
    loader: DataLoader[int] = DataLoader(
        range(places),  # type: ignore[arg-type]
        batch_sampler=sampler,
        collate_fn=list,
    )
    for _ in sampler.epochs(1):
        for numbers in run.batches(loader):
            with run.step():
                queue.make([number for number in numbers if number < len(queue.items)])
                if sampling.patch_delay:
                    time.sleep(sampling.patch_delay * len(numbers))
    run.save()
    path = sampling.folder / RESULT
    if run.rank == 0:
        lost = queue.missing()
        if lost:
            say(f"{len(lost)} patches were lost with a node and are made now")
        for k in range(0, len(lost), per_step):
            queue.make(lost[k : k + per_step])
        notes = {
            "model": model_name,
            "source": inputs.source,
            "seed": sampling.draw.seed,
            "members": sampling.draw.members,
        }
        result = output.SampledFields(
            queue.joined(),
            inputs.terrain,
            inputs.times,
            inputs.y,
            inputs.x,
            inputs.low,
            inputs.truth,
            inputs.mask,
            notes,
            inputs.height,
            inputs.has_terrain,
        )
        output.write(path, result, f"{method.name}, {sampling.draw.members} member(s)")
        say(f"wrote {path}")
    return path
