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

from malletrain.training.ranks import rank_and_world
from malletrain.training.report import tell


def tar_records(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """Yield the records of a WebDataset tar file, such as ``{"__key__": "a/0001", "jpg": b"…",
    "cls": b"7"}``. A record is a sequence of members whose names are equal up to the first dot
    after the last slash.

    Members such as ``x.jpg x.cls x.jpg x.cls`` are several records, if these differ. Other members
    that repeat a name, as from a writer that tried again, are one record, with the last content of
    each extension.
    """
    key, members = "", list[tuple[str, bytes]]()
    with tarfile.open(path, "r|*") as archive:
        for member in archive:
            if not member.isfile():
                continue
            folder, _, base = member.name.rpartition("/")
            stem, _, extension = base.partition(".")
            if not stem or not extension:
                continue
            previous, key = key, f"{folder}/{stem}" if folder else stem
            if members and previous != key:
                yield from _records_of(previous, members)
                members = []
            content = archive.extractfile(member)
            members.append((extension.lower(), content.read() if content is not None else b""))
    if members:
        yield from _records_of(key, members)


def _records_of(key: str, members: list[tuple[str, bytes]]) -> list[dict[str, Any]]:
    """Return the records of neighbouring members of one name.

    Args:
        key: name of the members, without extension.
        members: extension and content of each.
    """
    last = dict(members)
    count = len(members) // len(last)
    if count > 1 and len(last) > 1 and [name for name, _ in members] == [*last] * count:
        copies = [dict(members[i : i + len(last)]) for i in range(0, len(members), len(last))]
        if copies[1:] != copies[:-1]:  # not a record that a writer has repeated
            return [{"__key__": key, **copy} for copy in copies]
    elif len(members) > len(last):
        tell(
            f"Several members of a tar have the name {key!r} and the same extension. They are read "
            "as one record, with the last content of each extension. If they are several records, "
            "give each a name of its own.",
            once="repeated members of a tar",
        )
    return [{"__key__": key, **last}]


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
_STOPS = {
    "first_exhausted": "ends as soon as one of the datasets has no further record in it. If the "
    "shards differ in size, more records are left out than from the whole dataset.",
    "all_exhausted": "repeats its records of one dataset until every other one is exhausted. If "
    "the shards differ in size, more records are repeated than in the whole dataset.",
}
"""Stopping strategy → end of the message's sentence "each shard …", and one more sentence.
Strategies by which each record comes once are left out.
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
    _tell_uneven_shards(dataset, shards.count)
    return range(shards.count), shards


def _tell_uneven_shards(dataset: Any, count: int) -> None:
    """Tell the user if the shards of interleaved datasets may have fewer or more records than the
    whole. With shards of equal sizes they do not, so this is no error.
    """
    parts = _parts_of(getattr(dataset, "_ex_iterable", None))
    for strategy in sorted({getattr(part, "stopping_strategy", None) or "" for part in parts}):
        if strategy in _STOPS and count > 1 and rank_and_world()[0] == 0:
            tell(
                f"hub_shards reads each of the {count} shards of interleaved datasets on its own. "
                f"With stopping_strategy={strategy!r} each shard {_STOPS[strategy]} With "
                "'all_exhausted_without_replacement' each record comes once.",
                once=f"interleaved {strategy}",
            )


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
