"""Records from which fields and model the results in a folder are made, and refuses that another
training or sampling continues them. The record is a JSON file beside the results.

Decides only whether two are the same. Who calls it decides what counts.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from windsr import WindsrError
from windsr.fields import Fields
from windsr.method import Method

MAX_DIFFERENCE = 1e-3
"""Maximum relative difference of two equal numbers: means of winds that were brought to another
grid differ between kinds of CPUs.
"""
NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
"""Errors of file systems without hard links."""


def record(path: Path, facts: Mapping[str, Any]) -> None:
    """Write the facts of new work, and replace those of earlier work."""
    os.replace(_written(path, facts), path)


def agree(path: Path, facts: Mapping[str, Any], holds: str) -> None:
    """Check that a folder belongs to this work, or write its facts if it has none. A fact that an
    earlier version did not record counts as the same, as do numbers that differ by rounding.

    Args:
        path: file of the facts.
        facts: those of this work, by name.
        holds: what the folder has, for the message.

    Raises:
        WindsrError: the folder belongs to other work; the message names the facts that differ.
    """
    if not path.exists() and _is_first(path, facts):
        return
    same, recorded = json.loads(json.dumps(facts)), json.loads(path.read_text())
    other = [k for k in same if k in recorded and not _are_equal(same[k], recorded[k])]
    if other:
        raise WindsrError(
            f"{path.parent} holds {holds} (other {', '.join(other)}); give another folder, or "
            "remove that one."
        )


def _is_first(path: Path, facts: Mapping[str, Any]) -> bool:
    """Write the facts, unless another process just has. Return whether they were written."""
    part = _written(path, facts)
    try:
        os.link(part, path)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        os.replace(part, path)
        return True
    finally:
        part.unlink(missing_ok=True)
    return True


def _are_equal(one: Any, other: Any) -> bool:
    """Return whether two values from JSON are equal, up to :data:`MAX_DIFFERENCE` of numbers with a
    fraction.
    """
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_are_equal(one[k], other[k]) for k in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_are_equal, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=MAX_DIFFERENCE, abs_tol=1e-6)
    return bool(one == other)


def _written(path: Path, facts: Mapping[str, Any]) -> Path:
    part = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}")
    part.write_text(json.dumps(facts))
    return part


def digest_of_arrays(*arrays: NDArray[Any] | None) -> str:
    """Return a digest of the values of arrays; None has no values."""
    total = hashlib.sha256()
    for array in arrays:
        if array is not None:
            total.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return total.hexdigest()[:16]


def facts_of_fields(fields: Fields, with_terrain: bool) -> dict[str, Any]:
    """Return what tells fields from others, on any kind of CPU: their times and their grid, and
    mean and standard deviation (that of a field, on average) of the wind in m/s and the terrain in
    m.
    """
    deviations = [field.std(dtype=np.float64) for field in fields.wind]
    heights = fields.terrain.astype(np.float64)
    return {
        "times": digest_of_arrays(fields.times.astype("datetime64[s]").astype(np.int64)),
        "shape": list(fields.wind.shape),
        "spacing": fields.spacing,
        "wind": [float(fields.wind.mean(dtype=np.float64)), float(np.mean(deviations))],
        "terrain": [float(heights.mean()), float(heights.std())] if with_terrain else None,
    }


def digest_of_nets(nets: Mapping[str, nn.Module]) -> str:
    """Return a digest of the weights of networks, by name."""
    total = hashlib.sha256()
    for name, net in sorted(nets.items()):
        for key, tensor in net.state_dict().items():
            total.update(f"{name}.{key}".encode())
            total.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return total.hexdigest()[:16]


def digest_of_model(method: Method) -> str:
    """Return a digest of what a trained method predicts with: its network, those that it builds
    on, and its scales.
    """
    net = {"net": method.nets["net"]} if "net" in method.nets else {}
    scales = np.array(list(method.scales.to_dict().values()))
    return digest_of_nets({**net, **method.frozen}) + digest_of_arrays(scales)
