"""Keeps the hot samples of the clients in the memory of a node, with :class:`malletrain.DataCache`.

A DataCache never evicts. The hot samples of a client are therefore a DataCache of their own, and
when other samples become hot, the client gets a new one. Samples that stay hot are copied from
memory, and the others were just read, so this reads nothing from the data set. If the memory of the
node is used up, the client that trained longest ago loses its samples.

The losses and uses of the samples are stored in the same folder, so both are lost with the lease. A
client that trains on another node starts without them there.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import re
import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedcase.hot_samples import hot_samples
from malletrain import DataCache
from malletrain.protocol import env

_HOT, _USES = ".hot.json", ".uses.npy"
CHANGE_SHARE = 0.1
"""Part of the hot samples that must change before they are replaced in memory."""
_PAGE = 4096
_OVERHEAD = 256
"""Maximum memory of a sample in the cache in addition to its pickled size, bytes."""


@dataclass
class ReadAccount:
    """Numbers of reads, by where the samples were read."""

    hits: int = 0
    """Reads from memory."""
    source_reads: int = 0

    def add(self, other: ReadAccount) -> None:
        """Add the reads of another account."""
        self.hits += other.hits
        self.source_reads += other.source_reads


class NodeCache:
    """The hot samples of all clients on this node.

    Args:
        name: name of the training; two trainings on one node must have different names.
        memory: memory for the samples, bytes; 0: nothing is cached.
        share: part of the samples of a client that may be hot, 0 to 1.
        folder: folder for losses and uses. Default: that of the node's samples.
    """

    def __init__(
        self, name: str, memory: int, share: float = 0.1, folder: Path | None = None
    ) -> None:
        self.memory, self.share = memory, share
        self._name = re.sub(r"[^A-Za-z0-9_.-]", "_", name)
        self.folder = folder or _private_folder()
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def client(self, client: int, dataset: Any) -> ClientCache:
        """Return the samples of a client. ``dataset``: the client's data set."""
        return ClientCache(self, client, dataset)

    def cached(self) -> frozenset[int]:
        """Return the clients whose hot samples are in memory."""
        return frozenset(self._by_age())

    def used(self) -> int:
        """Return the memory that their samples take, bytes."""
        return sum(self.facts_of(path).get("bytes", 0) for path in self._by_age().values())

    def make_room(self, needed: int, keep: int) -> bool:
        """Discard the samples of the clients that trained longest ago until ``needed`` bytes are
        free. Return whether they are free. ``keep``: a client whose samples stay.
        """
        others = {client: path for client, path in self._by_age().items() if client != keep}
        used = sum(self.facts_of(path).get("bytes", 0) for path in others.values())
        for client, path in others.items():
            if used + needed <= self.memory:
                break
            used -= self.facts_of(path).get("bytes", 0)
            self._discard(client, path)
        return bool(used + needed <= self.memory)

    def path(self, client: int) -> Path:
        """Return the file that says which samples of a client are in memory."""
        return self.folder / f"fedcase-{self._name}-{client}{_HOT}"

    def uses_path(self, client: int) -> Path:
        """Return the file with the losses and uses of the samples of a client."""
        return self.folder / f"fedcase-{self._name}-{client}{_USES}"

    def store_name(self, client: int, generation: int) -> str:
        """Return the name of a DataCache."""
        return f"fedcase-{self._name}-{client}-{generation}"

    def _by_age(self) -> dict[int, Path]:
        """Clients with samples in memory, the one that trained longest ago first."""
        clients: list[tuple[int, int, Path]] = []
        for path in self.folder.glob(f"fedcase-{self._name}-*{_HOT}"):
            number = path.name.removesuffix(_HOT).rpartition("-")[2]
            with contextlib.suppress(OSError):
                if number.isdecimal() and self.facts_of(path).get("hot"):
                    clients.append((path.stat().st_mtime_ns, int(number), path))
        return {client: path for _, client, path in sorted(clients)}

    @staticmethod
    def facts_of(path: Path) -> dict[str, Any]:
        """Return the content of the file of a client; empty if there is none."""
        try:
            facts = json.loads(path.read_text())
        except (OSError, ValueError):
            return {}
        return facts if isinstance(facts, dict) else {}

    def _discard(self, client: int, path: Path) -> None:
        DataCache.discard(self.store_name(client, self.facts_of(path).get("generation", 0)))
        with contextlib.suppress(OSError):
            path.unlink()


class _HotSamples:
    """The hot samples of a client as a data set."""

    def __init__(self, dataset: Any, hot: Sequence[int], account: ReadAccount) -> None:
        self._dataset, self._hot, self._account = dataset, hot, account
        self.values: dict[int, Any] = {}
        """Samples that need not be read from the source."""

    def __len__(self) -> int:
        return len(self._hot)

    def __getitem__(self, index: int) -> Any:
        sample = self._hot[index]
        if sample in self.values:
            return self.values[sample]
        self._account.source_reads += 1
        return self._dataset[sample]


class ClientCache:
    """The samples of one client, hot ones from memory. Close it after the training."""

    def __init__(self, node: NodeCache, client: int, dataset: Any) -> None:
        self._node, self._client, self._dataset = node, client, dataset
        self.account = ReadAccount()
        self._losses, self._uses = self._load_uses(len(dataset))
        self._generation = 0
        self._cache: DataCache | None = None
        self._source: _HotSamples | None = None
        self.hot: list[int] = []
        """The samples that are in memory."""
        self._bytes = self._memory = 0
        facts = node.facts_of(node.path(client))
        with contextlib.suppress(KeyError, TypeError, ValueError):
            hot = [int(sample) for sample in facts["hot"]]
            if all(0 <= sample < len(dataset) for sample in hot):
                self._generation = int(facts["generation"])
                self._bytes, self._memory = int(facts["bytes"]), int(facts["memory"])
                self._open(hot)

    def _load_uses(self, count: int) -> tuple[Any, Any]:
        with contextlib.suppress(OSError, ValueError, EOFError):
            both = np.load(self._node.uses_path(self._client), allow_pickle=False)
            if both.shape == (2, count):
                return both[0], both[1]
        return np.full(count, np.nan), np.zeros(count)

    def _open(self, hot: list[int], values: dict[int, Any] | None = None) -> None:
        self.hot, self._source = [], None
        if not hot or self._memory <= 0:
            return
        source = _HotSamples(self._dataset, hot, self.account)
        source.values = values or {}
        name = self._node.store_name(self._client, self._generation)
        try:
            cache = DataCache(source, name=name, memory=self._memory, prefetch=0)
        except ValueError:  # the cache of this name has another data set
            return
        if cache.cached:
            self._cache, self._source, self.hot = cache, source, hot
        else:
            cache.close()

    def read(self, samples: Sequence[int]) -> list[Any]:
        """Return samples in their order."""
        position = {sample: index for index, sample in enumerate(self.hot)}
        values: list[Any] = []
        for sample in samples:
            if sample in position and self._cache is not None:
                before = self.account.source_reads
                values.append(self._cache[position[sample]])
                self.account.hits += self.account.source_reads == before
            else:
                self.account.source_reads += 1
                values.append(self._dataset[sample])
        return values

    def keep_hottest(
        self, samples: Sequence[int], values: Sequence[Any], losses: Sequence[float]
    ) -> None:
        """Record the losses of samples that were read, and keep the hottest samples in memory.

        Args:
            samples: their numbers.
            values: the samples.
            losses: their losses.
        """
        np.add.at(self._uses, list(samples), 1)
        self._losses[list(samples)] = losses
        fits = round(len(self._dataset) * self._node.share) if self._node.memory else 0
        at_hand = dict(zip(samples, values, strict=True))
        # Only samples that need no further read can become hot.
        candidates = np.full(len(self._losses), np.nan)
        for sample in (*at_hand, *self.hot):
            candidates[sample] = self._losses[sample]
        hottest = hot_samples(candidates, self._uses, fits)
        missing = [sample for sample in self.hot if sample in hottest and sample not in at_hand]
        at_hand.update(zip(missing, self.read(missing), strict=True))
        hot = [sample for sample in hottest if sample in at_hand]
        if len(set(hot) ^ set(self.hot)) > CHANGE_SHARE * 2 * len(hot):
            self._replace(hot, {sample: at_hand[sample] for sample in hot})
        self._save()

    def _replace(self, hot: list[int], values: dict[int, Any]) -> None:
        if self._cache is not None:
            self._cache.close()
            self._cache = None
            DataCache.discard(self._node.store_name(self._client, self._generation))
        self.hot, self._bytes = [], 0
        size = sum(len(pickle.dumps(value)) + _OVERHEAD for value in values.values())
        if not hot or not self._node.make_room(size, self._client):
            return
        # A random number: a process that was killed before it could save may have left a cache
        # under the next number.
        self._generation = secrets.randbits(48)
        # The index of a DataCache may take at most a quarter of its memory.
        self._memory = size + 4 * (2 * _PAGE + 16 * len(hot))
        self._bytes = size
        self._open(hot, values)
        if self._cache is not None:
            for index in range(len(hot)):
                self._cache[index]
        if self._source is not None:
            self._source.values = {}

    def _save(self) -> None:
        facts = {
            "hot": self.hot,
            "generation": self._generation,
            "bytes": self._bytes if self.hot else 0,
            "memory": self._memory,
        }
        uses = io.BytesIO()
        np.save(uses, np.stack([self._losses, self._uses]), allow_pickle=False)
        _replace_file(self._node.uses_path(self._client), uses.getvalue())
        _replace_file(self._node.path(self._client), json.dumps(facts).encode())

    def close(self) -> None:
        """Close the cache. Under MalleTrain the samples stay in the node's memory."""
        if self._cache is not None:
            self._cache.close()
            self._cache = None


def _replace_file(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}-{os.getpid()}-{threading.get_ident()}")
    temporary.write_bytes(content)
    os.replace(temporary, path)


def _private_folder() -> Path:
    folder = os.environ.get(env.DATA)
    return Path(folder) if folder else Path("/dev/shm") / f"fedcase-{os.geteuid()}"
