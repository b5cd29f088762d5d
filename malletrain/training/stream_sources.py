"""Readers of common shard formats for :class:`malletrain.ElasticStream`: WebDataset tar files, text
files, and Hugging Face ``datasets`` in streaming mode.

Defines the record of each format. Does not decide which rank reads a shard. Standard library only.
"""

from __future__ import annotations

import gzip
import os
import tarfile
from collections.abc import Callable, Iterator
from typing import Any


def tar_records(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """Yield the records of a WebDataset tar file, such as ``{"__key__": "a/0001", "jpg": b"…",
    "cls": b"7"}``. A record is a sequence of members whose names are equal up to the first dot
    after the last slash.
    """
    record: dict[str, Any] = {}
    with tarfile.open(path, "r|*") as archive:
        for member in archive:
            if not member.isfile():
                continue
            folder, _, base = member.name.rpartition("/")
            stem, _, extension = base.partition(".")
            if not stem or not extension:
                continue
            key = f"{folder}/{stem}" if folder else stem
            if record and record["__key__"] != key:
                yield record
                record = {}
            record["__key__"] = key
            content = archive.extractfile(member)
            record[extension.lower()] = content.read() if content is not None else b""
    if record:
        yield record


def line_records(path: str | os.PathLike[str]) -> Iterator[str]:
    """Yield the lines of a text file (for example JSON lines) without line ends; ``.gz`` files are
    decompressed.
    """
    open_text: Any = gzip.open if os.fspath(path).endswith(".gz") else open
    with open_text(path, "rt", encoding="utf-8") as file:
        for line in file:
            yield line.rstrip("\n")


class HubShards:
    """Reads a Hugging Face ``IterableDataset`` by shards; see :func:`hub_shards`."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self.count = int(getattr(dataset, "num_shards", 0) or getattr(dataset, "n_shards", 0))

    def __call__(self, shard: int, start: int = 0) -> Iterator[Any]:
        """Return the records of a shard from number ``start`` on."""
        shard_dataset = self._dataset.shard(num_shards=self.count, index=shard)
        return iter(shard_dataset.skip(start) if start else shard_dataset)


def hub_shards(dataset: Any) -> tuple[range, Callable[..., Iterator[Any]]]:
    """Return (shards, read) of a Hugging Face dataset in streaming mode, for
    ``ElasticStream(*hub_shards(dataset), …)``.

    Raises:
        TypeError: ``dataset`` is not a streaming dataset, or has no shards.
    """
    shards = HubShards(dataset)
    if not shards.count or not callable(getattr(dataset, "shard", None)):
        raise TypeError(
            f"hub_shards takes a dataset of load_dataset(…, streaming=True), not a "
            f"{type(dataset).__name__}. For one that has a length use ElasticSampler."
        )
    return range(shards.count), shards
