"""What the results in a folder are made of, in a JSON file beside them, so that no other training
or sampling continues them.

Decides only whether two are the same. Who calls it decides what counts.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from windsr import WindsrError
from windsr.method import Method


def record(path: Path, facts: Mapping[str, Any]) -> None:
    """Write the facts of new work, and replace those of earlier work."""
    os.replace(_written(path, facts), path)


def agree(path: Path, facts: Mapping[str, Any], holds: str) -> None:
    """Check that a folder belongs to this work, or write its facts if it has none. A fact that an
    earlier version did not record counts as the same.

    Args:
        path: file of the facts.
        facts: those of this work, by name.
        holds: what the folder has, for the message.

    Raises:
        WindsrError: the folder belongs to other work; the message names the facts that differ.
    """
    part = _written(path, facts)
    try:
        os.link(part, path)
    except FileExistsError:
        same = json.loads(json.dumps(facts))
        recorded = {**same, **json.loads(path.read_text())}
        if recorded != same:
            other = ", ".join(key for key in same if recorded[key] != same[key])
            raise WindsrError(
                f"{path.parent} holds {holds} (other {other}); give another folder, or remove that "
                "one."
            ) from None
    finally:
        part.unlink()


def _written(path: Path, facts: Mapping[str, Any]) -> Path:
    part = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}")
    part.write_text(json.dumps(facts))
    return part


def digest_of_arrays(*arrays: NDArray[Any] | None) -> str:
    """Return a digest of the values of arrays; None has no values."""
    total = hashlib.sha256()
    for array in arrays:
        if array is not None:
            total.update(np.ascontiguousarray(array))
    return total.hexdigest()[:16]


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
