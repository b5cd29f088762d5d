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


_COUNTS_RECORDS = {"SkipExamplesIterable": "skip", "TakeExamplesIterable": "take"}
"""Parts of a dataset that count records over all shards, by class, with the method that adds each.
"""
_MIN_RANDOM_ENTROPY = 1 << 64
"""Minimum entropy of a generator that counts as not seeded. numpy draws 128 random bits for a
generator without a seed.
"""


def hub_shards(dataset: Any) -> tuple[range, Callable[..., Iterator[Any]]]:
    """Return (shards, read) of a Hugging Face dataset in streaming mode, for
    ``ElasticStream(*hub_shards(dataset), …)``.

    Raises:
        TypeError: ``dataset`` is not a streaming dataset, or has no shards.
        ValueError: its shards together are not its records, or not the same ones on every rank: it
            is divided by rank (``split_dataset_by_node``), shuffled or interleaved without a seed,
            or cut by ``skip()`` or ``take()``.
    """
    shards = HubShards(dataset)
    if not shards.count or not callable(getattr(dataset, "shard", None)):
        raise TypeError(
            f"hub_shards takes a dataset of load_dataset(…, streaming=True), not a "
            f"{type(dataset).__name__}. For one that has a length use ElasticSampler."
        )
    _check_shards(dataset, shards.count)
    return range(shards.count), shards


def _check_shards(dataset: Any, count: int) -> None:
    """Raise ValueError if the ``count`` shards of ``dataset`` are not all its records, the same on
    every rank. The library has no public method that says so.
    """
    if getattr(dataset, "_distributed", None) is not None:
        raise ValueError(
            "hub_shards takes the whole dataset, and this one is divided by rank: ElasticStream "
            "divides it again, and most records would never be trained on. Leave out "
            "split_dataset_by_node()."
        )
    old_shuffling = getattr(dataset, "_shuffling", None)  # in older versions of datasets
    parts = _parts_of(getattr(dataset, "_ex_iterable", None))
    if any(_has_no_seed(part) for part in (old_shuffling, *parts)):
        raise ValueError(
            "hub_shards takes a dataset that every process reads in the same order, and this one "
            "is shuffled or interleaved without a seed: each process draws its own order, and "
            "records would be lost and repeated. Pass a seed below 2**64: "
            "dataset.shuffle(seed=0, …), interleave_datasets(…, seed=0)."
        )
    cut_by = sorted({_COUNTS_RECORDS.get(type(part).__name__, "") for part in parts} - {""})
    if cut_by and count > 1:
        method = cut_by[0]
        raise ValueError(
            f"hub_shards reads each of the {count} shards on its own, and .{method}() would "
            f"{method} records of every shard, not the first records of the dataset. Divide the "
            "shards instead: ElasticStream(shards[1:], read, …) trains on all but the first "
            "shard, and dataset.shard(num_shards=dataset.num_shards, index=0) is the first."
        )


def _parts_of(iterable: Any) -> list[Any]:
    """Return ``iterable`` of a dataset and the ones that it reads from."""
    if iterable is None:
        return []
    inner = [getattr(iterable, "ex_iterable", None), *getattr(iterable, "ex_iterables", ())]
    return [iterable, *(part for each in inner for part in _parts_of(each))]


def _has_no_seed(part: Any) -> bool:
    """Return whether ``part`` of a dataset draws from a generator that was made without a seed."""
    bits = getattr(getattr(part, "generator", None), "bit_generator", None)
    sequence = getattr(bits, "seed_seq", getattr(bits, "_seed_seq", None))
    entropy = getattr(sequence, "entropy", None)
    return isinstance(entropy, int) and entropy >= _MIN_RANDOM_ENTROPY
