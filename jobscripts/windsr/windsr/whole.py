"""Super-resolves whole fields in one piece, without patches and tiles. A field is cut to whole
coarse cells.

A patch that is made fine separately lacks its surroundings, which costs more accuracy than most
methods gain. A field that is too large for one piece goes through :mod:`windsr.queue`, whose tiles
have a halo.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from windsr import WindsrError
from windsr.fields import Fields
from windsr.grids import block_mean
from windsr.method import Draw, Method


def cut(fields: Fields, factor: int) -> Fields:
    """Return the fields without the last rows and columns that do not fill a coarse cell. Raises
    WindsrError if nothing remains.
    """
    rows, columns = (n // factor * factor for n in fields.terrain.shape)
    if not rows or not columns:
        raise WindsrError(
            f"{fields.source}: {fields.terrain.shape[0]} × {fields.terrain.shape[1]} points hold "
            f"no coarse cell of {factor} × {factor}."
        )
    return replace(
        fields,
        wind=np.ascontiguousarray(fields.wind[:, :rows, :columns]),
        terrain=np.ascontiguousarray(fields.terrain[:rows, :columns]),
        y=fields.y[:rows],
        x=fields.x[:columns],
    )


def coarse(fields: Fields, factor: int) -> torch.Tensor:
    """Return the block means of fields of whole cells (:func:`cut`), [n, 1, h, w] m/s."""
    return block_mean(torch.from_numpy(fields.wind[:, None]), factor)


def make_whole(
    method: Method,
    low: torch.Tensor,
    terrain: NDArray[np.floating],
    draw: Draw,
    base: torch.Tensor | None = None,
    **more: object,
) -> NDArray[np.float32]:
    """Return fine fields, [n, members, H, W] m/s, each made in one piece from a coarse field [n, 1,
    h, w]. ``base`` and ``more``: see :meth:`Method.predict`.
    """
    device = next((p.device for net in method.nets.values() for p in net.parameters()), None)
    ground = torch.from_numpy(np.ascontiguousarray(terrain))[None, None].expand(
        len(low), -1, -1, -1
    )
    speeds = method.predict(
        low.to(device),
        ground.to(device),
        range(len(low)),
        draw,
        base=None if base is None else base.to(device),
        **more,  # type: ignore[arg-type]
    )
    fields: NDArray[np.float32] = speeds.cpu().numpy().astype(np.float32)
    return fields
