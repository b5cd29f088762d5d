"""Exports a model's weights from a snapshot to one safetensors file.

Decides which of a snapshot's objects is the model, and gathers its shards. Needs neither a GPU nor
a process group, only memory for the weights.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from malletrain.training import disk_tier, shard_files, snapshot_file
from malletrain.training.sharded_state import MARK
from malletrain.training.snapshot_file import SnapshotError

_MAX_EARLIER = 99
"""Maximum number of earlier snapshots to try if the newest is damaged."""


@dataclass(frozen=True)
class Weights:
    """The weights of one model."""

    name: str
    """Name of the model in the script."""
    tensors: dict[str, Any]
    """Tensors by their names in the module."""
    saved: str
    """Time of the snapshot, as text."""

    @property
    def bytes(self) -> int:
        """Size of the tensors, bytes."""
        return sum(t.numel() * t.element_size() for t in self.tensors.values())


def read_weights(path: str, name: str = "") -> Weights:
    """Read the weights of a model from the newest good snapshot at ``path``.

    Args:
        path: path of the snapshot.
        name: name of the model in the script. Default: "model", or the only model.

    Raises:
        SnapshotError: there is no good snapshot, or no such model in it.
    """
    bad: dict[str, str] = {}
    while True:
        payload, file = disk_tier.newest(path, _MAX_EARLIER, lambda *_: None, bad)
        if payload is None:
            raise SnapshotError(f"There is no snapshot {path}.")
        if not payload.get(shard_files.KEY):
            break
        try:
            shard_files.check_sums(payload, file)
            break
        except SnapshotError as error:
            bad[file] = str(error)
    chosen = _model_name(payload["objects"], name, file)
    tensors = {key: value for key, value in payload["objects"][chosen].items() if _is_tensor(value)}
    if payload.get(shard_files.KEY):
        tensors = _gather(shard_files.reader(payload, file), tensors)
    return Weights(chosen, tensors, disk_tier.local_time_text(payload.get("time")))


def _is_tensor(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor) or (isinstance(value, dict) and MARK in value)


def _model_name(objects: dict[str, Any], name: str, file: str) -> str:
    models = [
        each
        for each, state in objects.items()
        if isinstance(state, dict) and any(map(_is_tensor, state.values()))
    ]
    if name:
        if name not in models:
            raise SnapshotError(
                f"Snapshot {file} has no model {name!r}; it has {', '.join(models) or 'none'}."
            )
        return name
    if "model" in models:
        return "model"
    if len(models) != 1:
        raise SnapshotError(
            f"Snapshot {file} has {len(models) or 'no'} models"
            + (f" ({', '.join(models)}). Say which one with --object." if models else ".")
        )
    return models[0]


def _gather(reader: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    """Return ``tensors`` with the sharded ones read in full."""
    import torch

    shapes = shard_files.shapes(reader)
    shard_keys = {k: v[MARK] for k, v in tensors.items() if isinstance(v, dict)}
    buffers = {
        key: torch.empty(shapes[key][0], dtype=shapes[key][1]) for key in set(shard_keys.values())
    }
    shard_files.read(reader, buffers)
    return {**tensors, **{key: buffers[mark] for key, mark in shard_keys.items()}}


def write_safetensors(weights: Weights, out: str) -> None:
    """Write ``weights`` to the file ``out``, atomically.

    Raises:
        SnapshotError: the library safetensors is not installed.
        OSError: the disk's error.
    """
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise SnapshotError(
            "Weights are exported with the library safetensors, which is not installed here. "
            "Install it: pip install safetensors."
        ) from error
    seen_storages: set[int] = set()
    copies: dict[str, Any] = {}
    for key, tensor in weights.tensors.items():
        tensor = tensor.contiguous()
        # tied weights: the file stores each separately
        shared = tensor.untyped_storage().data_ptr() in seen_storages
        seen_storages.add(tensor.untyped_storage().data_ptr())
        copies[key] = tensor.clone() if shared else tensor
    temporary = f"{out}.tmp-{os.getpid()}"
    try:
        save_file(copies, temporary, metadata={"format": "pt"})
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, out)
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)
    snapshot_file.sync_folder(os.path.dirname(out))
