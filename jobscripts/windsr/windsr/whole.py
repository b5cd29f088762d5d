"""Whole fields instead of isolated patches: cut to whole coarse cells, made fine in one piece.

A patch that is made fine by itself lacks what is around it, which costs more than most methods
gain. A field that is too large for one piece goes through :mod:`windsr.queue`, whose tiles have a
halo.
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
    """Without the last rows and columns that do not fill a coarse cell. Raises WindsrError when
    nothing is left.
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
    """[n, 1, h, w] m/s, the block means of fields that are whole cells (:func:`cut`)."""
    return block_mean(torch.from_numpy(fields.wind[:, None]), factor)


def make_whole(
    method: Method,
    low: torch.Tensor,
    terrain: NDArray[np.floating],
    draw: Draw,
    base: torch.Tensor | None = None,
    **more: object,
) -> NDArray[np.float32]:
    """[n, members, H, W] m/s, every coarse field [n, 1, h, w] in one piece. ``base`` and ``more``:
    as :meth:`Method.predict` takes them.
    """
    device = next((p.device for net in method.nets.values() for p in net.parameters()), None)
    ground = torch.from_numpy(np.ascontiguousarray(terrain))[None, None].expand(
        len(low), -1, -1, -1
    )
    made = method.predict(
        low.to(device),
        ground.to(device),
        range(len(low)),
        draw,
        base=None if base is None else base.to(device),
        **more,  # type: ignore[arg-type]
    )
    fields: NDArray[np.float32] = made.cpu().numpy().astype(np.float32)
    return fields
