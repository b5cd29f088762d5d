"""Readers of common shards, for :class:`malletrain.ElasticStream`: WebDataset-style tars, lines of
text, and Hugging Face ``datasets`` in streaming mode.

Decides what a record of each is; nothing about who reads it. Standard library only.
"""

from __future__ import annotations

import gzip
import os
import tarfile
from collections.abc import Callable, Iterator
from typing import Any


def tar_records(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """The records of a WebDataset-style tar: files that follow each other and share a name up to
    the first dot of its last part. ``{"__key__": "a/0001", "jpg": b"…", "cls": b"7"}``.
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
    """The lines of a text file (JSON lines, say), without their ends; ``.gz`` is unpacked."""
    opened: Any = gzip.open if os.fspath(path).endswith(".gz") else open
    with opened(path, "rt", encoding="utf-8") as file:
        for line in file:
            yield line.rstrip("\n")


class HubShards:
    """A Hugging Face ``IterableDataset`` by shards, as ``ElasticStream(*hub_shards(dataset))``."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self.count = int(getattr(dataset, "num_shards", 0) or getattr(dataset, "n_shards", 0))

    def __call__(self, shard: int, start: int = 0) -> Iterator[Any]:
        """The records of a shard from the ``start``-th."""
        part = self._dataset.shard(num_shards=self.count, index=shard)
        return iter(part.skip(start) if start else part)


def hub_shards(dataset: Any) -> tuple[range, Callable[..., Iterator[Any]]]:
    """(shards, read) of a Hugging Face dataset in streaming mode.

    Raises:
        TypeError: when it is not one, or has no shards.
    """
    shards = HubShards(dataset)
    if not shards.count or not callable(getattr(dataset, "shard", None)):
        raise TypeError(
            f"hub_shards takes a dataset of load_dataset(…, streaming=True), not a "
            f"{type(dataset).__name__}. For one that has a length use ElasticSampler."
        )
    return range(shards.count), shards
