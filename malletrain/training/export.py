"""A model's weights out of a snapshot, in one file that every library reads.

Decides which of a snapshot's objects is the model, and gathers its shards. It needs neither a GPU
nor a process group, only memory for the weights.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from malletrain.training import choice, shard_files, snapshot_file
from malletrain.training.sharded_state import MARK
from malletrain.training.snapshot_file import SnapshotError

_LOOK_BACK = 99
"""Snapshots before the newest that are looked at when it is damaged."""


@dataclass(frozen=True)
class Weights:
    """The weights of one model."""

    name: str
    """What the script calls it."""
    tensors: dict[str, Any]
    """By their names in the module."""
    saved: str
    """When the snapshot was, as text."""

    @property
    def bytes(self) -> int:
        """Their size."""
        return sum(t.numel() * t.element_size() for t in self.tensors.values())


def read_weights(path: str, name: str = "") -> Weights:
    """The weights of the model ``name`` in the newest good snapshot at ``path``.

    Args:
        path: of the snapshot.
        name: what the script calls the model; without it the only one, or the one called "model".

    Raises:
        SnapshotError: when there is no good snapshot, or no such model in it.
    """
    bad: dict[str, str] = {}
    while True:
        payload, file = choice.newest(path, _LOOK_BACK, lambda *_: None, bad)
        if payload is None:
            raise SnapshotError(f"There is no snapshot {path}.")
        if not payload.get(shard_files.KEY):
            break
        try:
            shard_files.check_sums(payload, file)
            break
        except SnapshotError as error:
            bad[file] = str(error)
    chosen = _chosen(payload["objects"], name, file)
    tensors = {key: value for key, value in payload["objects"][chosen].items() if _is_tensor(value)}
    if payload.get(shard_files.KEY):
        tensors = _gathered(shard_files.reader(payload, file), tensors)
    return Weights(chosen, tensors, choice.clock(payload.get("time")))


def _is_tensor(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor) or (isinstance(value, dict) and MARK in value)


def _chosen(objects: dict[str, Any], name: str, file: str) -> str:
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


def _gathered(reader: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    """``tensors`` with those that lie in the shards read whole."""
    import torch

    shapes = shard_files.shapes(reader)
    marked = {k: v[MARK] for k, v in tensors.items() if isinstance(v, dict)}
    rooms = {key: torch.empty(shapes[key][0], dtype=shapes[key][1]) for key in set(marked.values())}
    shard_files.read(reader, rooms)
    return {**tensors, **{key: rooms[mark] for key, mark in marked.items()}}


def write_safetensors(weights: Weights, out: str) -> None:
    """Write ``weights`` to the file ``out``, which is whole or not there at all.

    Raises:
        SnapshotError: when the library safetensors is absent.
        OSError: the disk's reason.
    """
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise SnapshotError(
            "Weights are exported with the library safetensors, which is not installed here. "
            "Install it: pip install safetensors."
        ) from error
    seen: set[int] = set()
    own: dict[str, Any] = {}
    for key, tensor in weights.tensors.items():
        tensor = tensor.contiguous()
        shared = tensor.untyped_storage().data_ptr() in seen  # tied weights: one file has each
        seen.add(tensor.untyped_storage().data_ptr())
        own[key] = tensor.clone() if shared else tensor
    temporary = f"{out}.tmp-{os.getpid()}"
    try:
        save_file(own, temporary, metadata={"format": "pt"})
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, out)
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)
    snapshot_file.sync_folder(os.path.dirname(out))
