"""``malletrain.DataCache``: the data set that a DataLoader reads, with its samples in the memory of
the nodes.

Decides when a data set is not cached (the user gets the reason, and the training continues without
a cache), and when samples are fetched in advance. :mod:`malletrain.datacache.reader` decides where
a sample is read.

Samples of the next batches are fetched from other nodes in a thread, before the training loop needs
them. The thread never reads the data set, because a data set need not be thread-safe. Loader
workers have no such thread: DataLoader has each of them read whole batches ahead.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from malletrain.datacache.counts import COUNT_NAMES, SLOTS, ReadCounts, SharedCounts
from malletrain.datacache.members import Members, members_file
from malletrain.datacache.packing import CannotPackError, pack
from malletrain.datacache.reader import SamplePeers, SampleReader
from malletrain.datacache.serving import data_key
from malletrain.datacache.store import (
    DataCacheRefusalError,
    DataSetIdentity,
    NodeStore,
    OtherDataSetError,
    attach,
    check_sum,
    file_name,
    private_data_folder,
    remove_unused,
    size_reason,
)
from malletrain.memory.folder import SHARED_MEMORY, bound
from malletrain.protocol import env
from malletrain.protocol.sizes import share_or_size, shown
from malletrain.protocol.worker_channel import DataCacheFacts
from malletrain.training import rng
from malletrain.training.report import send, tell
from malletrain.training.sampler import ElasticSampler

DEFAULT_MEMORY = "25%"
REPORT_INTERVAL_S = 2.0
"""Time between two reports of the counts to the agent, seconds."""
MAX_NAME = 200
CHECKED_SAMPLES, CHECK_S = 8, 1.0
"""How many samples are read twice before a data set is first cached on a node, to see whether they
are the same each time, and after how long no further one is, seconds.
"""


class DataCache:
    """A map-style data set whose samples stay in the memory of the job's nodes from their first
    read: ``DataLoader(DataCache(data, sampler=sampler, name="imagenet"), batch_sampler=sampler)``.

    A sample that is not in memory is read from ``dataset``. The result is the same as without the
    cache, whatever happens to a node; ``malletrain show`` says how much was read from where.

    Samples are tensors, arrays, PIL images, numbers, texts and bytes, in tuples, named tuples,
    lists and dicts. They are cached as ``dataset`` returns them: random augmentations belong into
    ``transform``.

    Args:
        dataset: the data set, with ``__len__`` and ``__getitem__``. ``dataset[i]`` must be the same
            each time.
        name: name of the data. All processes of a user on a node that use a name share its samples.
        sampler: the job's ElasticSampler, whose order says which samples are needed next. None:
            nothing is fetched in advance.
        memory: memory of each node for the samples: a part of the lease's memory, such as
            ``"25%"``, or a size, such as ``"8G"``. Default: that of ``submit --data-memory``, else
            25 %.
        transform: function that is applied to each sample after the cache, such as random
            augmentations.
        prefetch: number of batches for which samples are fetched from other nodes in advance, in a
            process without loader workers. 0: none.

    Raises:
        TypeError: ``dataset`` has no length or no indices, or ``sampler`` is an ElasticStream.
        ValueError: ``memory`` is not a size, ``name`` is empty, ``sampler`` has another number of
            samples, or the cache of this name has a data set of another length.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        name: str,
        sampler: Any = None,
        memory: str | int | None = None,
        transform: Callable[[Any], Any] | None = None,
        prefetch: int = 4,
    ) -> None:
        self._dataset, self._transform = dataset, transform
        self._length = _checked_length(dataset, name, sampler)
        self._sampler = sampler if isinstance(sampler, ElasticSampler) else None
        self._prefetch = prefetch
        self._job_key = os.environ.get(env.JOB_KEY, "")
        self._node = os.environ.get(env.NODE, "localhost")
        self._identity = DataSetIdentity(name, self._length, 0)
        self._folder: Path | None = None
        self._store: NodeStore | None = None
        self._counts: SharedCounts | None = None
        self._open(memory)
        self._main_process = os.getpid()
        self._begin_process()
        if self._counts is not None:
            _Reporter(self)

    def _open(self, memory: str | int | None) -> None:
        """Attach the store, or tell the user why there is none."""
        if memory is None:
            memory = os.environ.get(env.DATA_MEMORY) or DEFAULT_MEMORY
        slot = os.environ.get(env.SLOT_MEMORY_MB, "")
        max_bytes = share_or_size(memory, bound(1.0, int(slot) << 20 if slot.isdecimal() else None))
        began = time.monotonic()
        try:
            first = check_sum(0, pack(self._dataset[0]))
        except CannotPackError as error:
            self._say_uncached(
                f"its samples cannot be packed: {error}. Samples are tensors, arrays, images of "
                "PIL, numbers, texts and bytes, in tuples, named tuples, lists and dicts. Let the "
                "data set return these, and make other objects in DataCache(transform=...)."
            )
            return
        read_s = time.monotonic() - began
        name = self._identity.name
        self._identity = DataSetIdentity(name, self._length, first)
        try:
            folder = private_data_folder(data_folder())
            varying = None
            if not (folder / file_name(name)).exists():
                # Only one process of a node reads them, and all are to draw the same numbers later.
                with rng.preserved():
                    varying = self._varying_sample(first, read_s)
            if varying is not None:
                self._say_uncached(
                    f"sample {varying} differs when it is read again. If the data set applies "
                    "random augmentations, move them to DataCache(transform=...)."
                )
                return
            store = attach(folder, self._identity, max_bytes)
        except OtherDataSetError:
            raise
        except DataCacheRefusalError as refusal:
            self._say_uncached(str(refusal))
            return
        except OSError as error:
            self._say_uncached(f"the node's shared memory cannot be used ({error}).")
            return
        if store.first != first:
            store.close()
            self._say_uncached(
                f"sample 0 differs from the one that the cache of the name {name!r} has. Either "
                "this is another data set: give it another name. Or the data set itself applies "
                "random augmentations: move them to DataCache(transform=...)."
            )
            return
        if store.size < max_bytes:
            tell(
                f"The data cache {name!r} has {shown(store.size)} of this node's memory instead of "
                f"{shown(max_bytes)}: samples that do not fit are read from the data set each "
                f"time. {size_reason(folder, max_bytes)}",
                once=f"data cache {name} is smaller",
            )
        self._folder, self._store = folder, store
        self._counts = SharedCounts(folder)
        atexit.register(_at_exit, weakref.ref(self), os.getpid())

    def _varying_sample(self, first: int, read_s: float) -> int | None:
        """Return a sample that is not the same each time, of a few at the beginning: augmentations
        that are made once and kept are none. None if there is none.

        Args:
            first: check sum of sample 0.
            read_s: how long its first read took, seconds.
        """
        deadline = time.monotonic() + CHECK_S - read_s
        for sample in range(min(CHECKED_SAMPLES, self._length)):
            if time.monotonic() > deadline:
                return None
            try:
                before = first if sample == 0 else check_sum(sample, pack(self._dataset[sample]))
                if check_sum(sample, pack(self._dataset[sample])) != before:
                    return sample
            except Exception:  # what the sample's reader sees; it is not needed here
                return None
        return None

    def _say_uncached(self, reason: str) -> None:
        tell(f"The data set {self._identity.name!r} is read without a cache: {reason}")

    def _begin_process(self) -> None:
        """Prepare the reads of this process."""
        self._process = os.getpid()
        self._reader: SampleReader | None = None
        self._prefetcher: SamplePrefetcher | None = None
        self._slot = 0
        if self._store is None:
            return
        self._reader = self._new_reader()
        worker, is_main = _loader_worker(), self._process == self._main_process
        if worker is not None and not is_main:
            # A full garbage collection writes into every object. It would copy all memory that this
            # worker shares with the training process.
            gc.freeze()
        self._slot = 1 + worker if worker is not None else 0 if is_main else SLOTS - 1
        if self._sampler is not None and is_main and self._prefetch > 0 and self._job_key:
            reader = self._new_reader()
            self._prefetcher = SamplePrefetcher(
                lambda samples: reader.fetch(reader.not_here(samples))
            )

    def _new_reader(self) -> SampleReader:
        assert self._store is not None
        assert self._folder is not None
        job = os.environ.get(env.JOB, "")
        members = Members(members_file(self._folder, job) if job else None, self._node)
        peers = None
        if self._job_key:
            peers = SamplePeers(data_key(bytes.fromhex(self._job_key)), self._identity)
        return SampleReader(
            self._dataset, self._store, members, peers, lambda text, key: tell(text, once=key)
        )

    # --- what a DataLoader needs ---

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return the samples of a batch."""
        samples = [self._checked(int(index)) for index in indices]
        if os.getpid() != self._process:
            self._begin_process()
        if self._reader is None or self._counts is None:
            many = getattr(self._dataset, "__getitems__", None)
            values = many(samples) if callable(many) else [self._dataset[s] for s in samples]
        else:
            staged = None
            if self._prefetcher is not None and self._sampler is not None:
                staged = self._prefetcher.take(self._reader.not_here(samples))
                ahead = self._sampler.unread_batches(self._prefetch)
                self._prefetcher.plan([batch.samples for batch in ahead])
            values, counts = self._reader.read(samples, staged)
            self._counts.add(self._slot, counts)
        return values if self._transform is None else [self._transform(value) for value in values]

    def _checked(self, index: int) -> int:
        if not -self._length <= index < self._length:
            raise IndexError(f"There is no sample {index} in a data set of {self._length} samples.")
        return index % self._length

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._dataset, name)

    # --- what others see ---

    @property
    def cached(self) -> bool:
        """Whether samples are kept in memory. If not, the user was told the reason."""
        return self._store is not None

    @property
    def prefetches_nothing(self) -> bool:
        """Whether no sample is being fetched in advance."""
        return self._prefetcher is None or self._prefetcher.idle

    def counts(self) -> ReadCounts:
        """Return the reads of this rank so far, its loader workers included."""
        return ReadCounts() if self._counts is None else self._counts.total()

    def _source_readers(self) -> int:
        return 1 if self._counts is None else self._counts.source_readers()

    def facts(self) -> dict[str, Any] | None:
        """Return the fields of DataCacheFacts, which ``malletrain show`` prints; None if nothing is
        cached.
        """
        store = self._store
        if store is None:
            return None
        counts, present = self.counts(), store.count()
        packed = counts.reads - counts.unpacked
        mean = (counts.hit_bytes + counts.source_bytes) / packed if packed > 0 else 0.0
        slot = os.environ.get(env.SLOT_MEMORY_MB, "")
        coverage = None if self._sampler is None else self._sampler.coverage
        return {
            "name": self._identity.name,
            "node": self._node,
            **dict(zip(COUNT_NAMES, counts.values, strict=True)),
            "source_us": counts.source_us // max(1, self._source_readers()),
            "samples": self._length,
            "present": present,
            "data_bytes": round(mean * self._length),
            "memory_bytes": store.capacity,
            "node_bytes": bound(1.0, int(slot) << 20 if slot.isdecimal() else None),
            "coverage": coverage,
        }

    def close(self) -> None:
        """End the prefetch thread and close the store. The samples stay for other processes."""
        if self._prefetcher is not None and self._process == os.getpid():
            self._prefetcher.close()
        self._prefetcher = self._reader = None
        store, counts, self._store, self._counts = self._store, self._counts, None, None
        if counts is not None:
            counts.close()
        if store is not None:
            path = store.path
            store.close()
            if not os.environ.get(env.DATA):  # nobody else would remove it
                remove_unused(path)

    @staticmethod
    def discard(name: str) -> bool:
        """Remove the samples of the data set ``name`` from this node's memory. Return whether they
        were removed: they are not if a process uses them, or if there are none.
        """
        return remove_unused(data_folder() / file_name(name))

    # --- pickling, for loader workers that are spawned ---

    def __getstate__(self) -> dict[str, Any]:
        # The data set, and the path of its samples. A worker does not prefetch.
        return {
            **self.__dict__,
            "_sampler": None,
            "_store": None if self._store is None else self._store.path,
            "_reader": None,
            "_prefetcher": None,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        path = state["_store"]
        self.__dict__.update(state)
        self._store = None if path is None else NodeStore.open_existing(path)
        self._begin_process()


def _checked_length(dataset: Any, name: str, sampler: Any) -> int:
    if not name or len(name) > MAX_NAME:
        raise ValueError(f"DataCache needs a name of 1 to {MAX_NAME} characters for the data.")
    if type(sampler).__name__ == "ElasticStream":
        raise TypeError(
            "DataCache caches data sets with indices. An ElasticStream reads shards one after "
            "another; the page 'Training data in memory' says how to cache whole shards."
        )
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise TypeError(
            f"DataCache needs a data set with indices and a length; a {type(dataset).__name__} "
            "has none."
        )
    length = len(dataset)
    if length < 1:
        raise ValueError(f"The data set {name!r} has no samples.")
    if isinstance(sampler, ElasticSampler) and sampler.num_samples != length:
        raise ValueError(
            f"The sampler is for {sampler.num_samples} samples, but the data set {name!r} has "
            f"{length}."
        )
    return length


def data_folder() -> Path:
    """Return the folder of this user's stores on this node: that of the agent, or one of the user's
    own outside MalleTrain.
    """
    folder = os.environ.get(env.DATA)
    return Path(folder) if folder else SHARED_MEMORY / f"malletrain-data-{os.geteuid()}"


def _loader_worker() -> int | None:
    """Return the number of this loader worker; None in another process."""
    module = sys.modules.get("torch.utils.data")
    info = module.get_worker_info() if module is not None else None
    return None if info is None else int(info.id)


class _Reporter:
    """A thread that reports the counts of a cache to the agent while the cache exists."""

    def __init__(self, cache: DataCache) -> None:
        if not os.environ.get(env.SOCKET):
            return
        self._cache = weakref.ref(cache)
        threading.Thread(target=self._run, name="malletrain-data-counts", daemon=True).start()

    def _run(self) -> None:
        never, sent = threading.Event(), ReadCounts()  # the event only serves to wait
        while not never.wait(REPORT_INTERVAL_S):
            cache = self._cache()
            if cache is None or not cache.cached:
                return
            counts = cache.counts()
            if counts != sent:
                sent = counts
                report_counts(cache)
            del cache


def report_counts(cache: DataCache) -> None:
    """Send the counts of a cache to the agent."""
    facts = cache.facts()
    if facts is not None and cache.counts().reads:
        send(DataCacheFacts, **facts)


def _at_exit(reference: weakref.ref[DataCache], process: int) -> None:
    cache = reference()
    if cache is not None and os.getpid() == process:
        report_counts(cache)
        cache.close()


Fetch = Callable[[Sequence[int]], Mapping[int, Any]]
"""Fetches samples from other nodes: numbers → packed bytes of those that they have."""


class SamplePrefetcher:
    """The samples that are or will be fetched in advance.

    Args:
        fetch: fetches samples; called in the thread only.
    """

    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch
        self._changed = threading.Condition()
        self._plan: list[tuple[int, ...]] = []
        """Batches that are not requested yet, the next one first."""
        self._in_flight: frozenset[int] = frozenset()
        self._staged: dict[int, Any] = {}
        self._absent: set[int] = set()
        """Samples of the plan that no other node has."""
        self._closed = False
        self._thread: threading.Thread | None = None

    def plan(self, batches: Sequence[tuple[int, ...]]) -> None:
        """Fetch the samples of ``batches``, in this order. What was fetched for other batches is
        dropped.
        """
        with self._changed:
            planned = {sample for batch in batches for sample in batch}
            self._staged = {s: data for s, data in self._staged.items() if s in planned}
            self._absent &= planned
            done = self._staged.keys() | self._absent | self._in_flight
            unknown = (tuple(s for s in batch if s not in done) for batch in batches)
            self._plan = [batch for batch in unknown if batch]
            self._changed.notify_all()
            if self._thread is None and self._plan:
                self._thread = threading.Thread(
                    target=self._run, name="malletrain-prefetch", daemon=True
                )
                self._thread.start()

    def take(self, samples: Sequence[int]) -> dict[int, Any]:
        """Return the samples that are fetched, and wait for those that are being fetched. Samples
        that are only planned are left to the caller.
        """
        with self._changed:
            needed = set(samples)
            self._plan = [
                batch
                for batch in (tuple(s for s in b if s not in needed) for b in self._plan)
                if batch
            ]
            while self._in_flight & needed and not self._closed:
                self._changed.wait()
            return {s: self._staged.pop(s) for s in needed if s in self._staged}

    @property
    def idle(self) -> bool:
        """Whether all of the plan has been fetched."""
        return not self._plan and not self._in_flight

    def close(self) -> None:
        """End the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._plan and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                batch = self._plan.pop(0)
                self._in_flight = frozenset(batch)
            samples: Mapping[int, Any] = {}
            try:
                samples = self._fetch(batch)
            finally:
                with self._changed:
                    self._staged.update(samples)
                    self._absent.update(s for s in batch if s not in samples)
                    self._in_flight = frozenset()
                    self._changed.notify_all()
