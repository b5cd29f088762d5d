"""The virtual nodes of ``benchmarks/datacache.py``. Each has a process that reads its share of the
batches like one of the contenders, and one that serves its samples, like a launcher.
"""

from __future__ import annotations

import gc
import io
import multiprocessing
import os
import random
import signal
import tarfile
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from benchmarks.datacache_source import IMAGE_BYTES, SHARD, SourceClient
from malletrain import DataCache, ElasticSampler
from malletrain.datacache.members import members_file, write_members
from malletrain.datacache.packing import ALIGN, pack
from malletrain.datacache.serving import SampleService
from malletrain.datacache.store import HEADER_BYTES, private_data_folder
from malletrain.protocol import env

SECRET = b"datacache benchmark"
JOB = "benchmark"
Sample = tuple[Any, int, int]
"""Image, label, number."""


@dataclass(frozen=True)
class BenchmarkSetting:
    """Common settings of all contenders."""

    samples: int
    batch: int
    """Samples per step over all nodes."""
    step_s: float
    """Duration of a step without reading, seconds."""
    fraction: float
    """Part of the data for which a node has memory."""
    port: int
    """Port of the server with the files."""
    folder: Path
    """Folder in shared memory for the stores."""
    max_nodes: int = 4


@dataclass(frozen=True)
class Segment:
    """A part of an epoch that the nodes read together."""

    epoch: int
    position: int
    steps: int
    rank: int
    world: int


@dataclass
class SegmentReport:
    """The result of one node in a segment."""

    seconds: float = 0.0
    samples: list[int] = field(default_factory=list)
    hits: int = 0
    reads: int = 0


def as_sample(file: bytes, number: int) -> Sample:
    """Return the sample of a file."""
    pixels = torch.frombuffer(bytearray(file[:IMAGE_BYTES]), dtype=torch.uint8).reshape(28, 28)
    return pixels, file[IMAGE_BYTES], number


class PlainFiles:
    """A data set of single files, which are read each time."""

    def __init__(self, setting: BenchmarkSetting) -> None:
        self._setting, self._client = setting, SourceClient(setting.port)
        self.hits = self.reads = 0

    def __len__(self) -> int:
        return self._setting.samples

    def __getitem__(self, number: int) -> Sample:
        self.reads += 1
        return as_sample(self._client.get(b"G", number), number)


class LocalCache(PlainFiles):
    """The same with a cache in the process. ``evicts``: whether it is LRU; if not, the first
    samples stay.
    """

    def __init__(self, setting: BenchmarkSetting, evicts: bool) -> None:
        super().__init__(setting)
        self._capacity, self._evicts = round(setting.fraction * setting.samples), evicts
        self._files: OrderedDict[int, bytes] = OrderedDict()
        self.admitted: frozenset[int] | None = None
        """Numbers of the cached samples; None: any may be cached."""

    def __getitem__(self, number: int) -> Sample:
        self.reads += 1
        file = self._files.get(number)
        if file is None:
            file = self._client.get(b"G", number)
            admitted = self.admitted is None or number in self.admitted
            if admitted and (self._evicts or len(self._files) < self._capacity):
                self._files[number] = file
            if len(self._files) > self._capacity:
                self._files.popitem(last=False)
        else:
            self.hits += 1
            self._files.move_to_end(number)
        return as_sample(file, number)


class AllInMemory(PlainFiles):
    """All files in the memory of the process: the upper bound."""

    def __init__(self, setting: BenchmarkSetting) -> None:
        super().__init__(setting)
        self._files = [b""] * setting.samples

    def fill(self) -> None:
        """Read everything before the measurement."""
        for shard in range(-(-len(self) // SHARD)):
            for number, file in files_of(self._client.get(b"T", shard)):
                self._files[number] = file

    def __getitem__(self, number: int) -> Sample:
        self.reads += 1
        self.hits += 1
        return as_sample(self._files[number], number)


def files_of(shard: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the number and the content of each file of a tar."""
    with tarfile.open(fileobj=io.BytesIO(shard)) as tar:
        for info in tar:
            member = tar.extractfile(info)
            assert member is not None
            yield int(info.name[:6]), member.read()


class Contender:
    """How one node reads. ``batches``: yields the node's batches of a segment."""

    def __init__(self, setting: BenchmarkSetting, dataset: Any, sampler: ElasticSampler) -> None:
        self._setting, self.dataset, self.sampler = setting, dataset, sampler

    def batches(self, segment: Segment) -> Iterator[list[int]]:
        """Yield the numbers of the samples of each batch, once they are read."""
        self.sampler.resize(segment.rank, segment.world)
        self.sampler.set_position(segment.epoch, segment.position)
        for steps, (_, _, numbers) in enumerate(
            DataLoader(self.dataset, batch_sampler=self.sampler), 1
        ):
            yield numbers.tolist()
            self.sampler.advance()
            if steps == segment.steps:
                return

    def counts(self) -> tuple[int, int]:
        """Return the hits and the reads so far."""
        return self.dataset.hits, self.dataset.reads


class CachedContender(Contender):
    """DataCache."""

    def counts(self) -> tuple[int, int]:
        counts = self.dataset.counts()
        return counts.node_hits + counts.peer_hits, counts.reads


class TarContender(Contender):
    """Tar shards, dealt to the nodes in each epoch and shuffled within the node's buffer, as
    WebDataset reads them.
    """

    def batches(self, segment: Segment) -> Iterator[list[int]]:
        shards = list(range(-(-self._setting.samples // SHARD)))
        random.Random(segment.epoch).shuffle(shards)
        client, buffer = SourceClient(self._setting.port), []
        for shard in shards[segment.rank :: segment.world]:
            buffer += [as_sample(f, n) for n, f in files_of(client.get(b"T", shard))]
        random.Random(segment.epoch * 100 + segment.rank).shuffle(buffer)
        each = self._setting.batch // segment.world
        for start in range(0, len(buffer), each):
            batch = buffer[start : start + each]
            torch.stack([image for image, _, _ in batch])
            self.dataset.reads += len(batch)
            yield [number for _, _, number in batch]


class RepeatingContender(Contender):
    """A model of SHADE's released code: each cached sample is drawn three times in an epoch, and
    the rest of the draws are samples that are not cached.
    """

    def batches(self, segment: Segment) -> Iterator[list[int]]:
        count = self._setting.samples // segment.world
        capacity = min(round(self._setting.fraction * self._setting.samples), count // 3)
        rng = random.Random(segment.epoch * 100 + segment.rank)
        own = random.Random(segment.rank).sample(range(self._setting.samples), capacity)
        self.dataset.admitted = frozenset(own)
        others = list(set(range(self._setting.samples)) - set(own))
        draws = own * 3 + rng.sample(others, min(len(others), count - 3 * len(own)))
        rng.shuffle(draws)
        each = self._setting.batch // segment.world
        for start in range(0, len(draws), each):
            batch = [self.dataset[number] for number in draws[start : start + each]]
            torch.stack([image for image, _, _ in batch])
            yield [number for _, _, number in batch]


def memory_of(setting: BenchmarkSetting) -> int:
    """Return the size of a store that has ``fraction`` of the data, bytes."""
    packed = len(pack((torch.zeros(28, 28, dtype=torch.uint8), 9, setting.samples - 1)))
    index = -(-(HEADER_BYTES + 16 * setting.samples) // HEADER_BYTES) * HEADER_BYTES
    each = -(-packed // ALIGN) * ALIGN
    return index + round(setting.fraction * setting.samples) * each


def make(name: str, setting: BenchmarkSetting) -> Contender:
    """Return a contender at its start on a node."""
    sampler = ElasticSampler(
        setting.samples,
        global_batch_size=setting.batch,
        rank=0,
        world_size=1,
        max_world_size=setting.max_nodes,
    )
    plain = PlainFiles(setting)
    if name == "DataCache":
        cache = DataCache(plain, name="fashion", sampler=sampler, memory=memory_of(setting))
        assert cache.cached
        return CachedContender(setting, cache, sampler)
    if name == "all in memory":
        filled = AllInMemory(setting)
        filled.fill()
        return Contender(setting, filled, sampler)
    makers: dict[str, Callable[[], Contender]] = {
        "plain": lambda: Contender(setting, plain, sampler),
        "LRU": lambda: Contender(setting, LocalCache(setting, True), sampler),
        "never evict": lambda: Contender(setting, LocalCache(setting, False), sampler),
        "tar shards": lambda: TarContender(setting, plain, sampler),
        "SHADE's policy": lambda: RepeatingContender(setting, LocalCache(setting, False), sampler),
    }
    return makers[name]()


class VirtualNode:
    """One node: two processes and a folder."""

    def __init__(self, name: str, contender: str, setting: BenchmarkSetting) -> None:
        fork = multiprocessing.get_context("fork")
        self.name = name
        self.folder = private_data_folder(setting.folder / name)
        self._address, their_address = fork.Pipe()
        self._service = fork.Process(target=_serve, args=(self.folder, their_address), daemon=True)
        self._service.start()
        self.address: str = self._address.recv()
        self._pipe, theirs = fork.Pipe()
        self._reader = fork.Process(
            target=_read, args=(name, contender, setting, self.folder, theirs), daemon=True
        )
        self._reader.start()

    def ready(self) -> None:
        """Wait until the node can read."""
        assert self._pipe.recv() == "ready"

    def announce(self, addresses: dict[str, str]) -> None:
        """Store the nodes of the round, as the launcher does."""
        write_members(members_file(self.folder, JOB), addresses)

    def begin(self, segment: Segment) -> None:
        """Let the node read a segment."""
        self._pipe.send(segment)

    def report(self) -> SegmentReport:
        """Wait for the end of the segment."""
        report = self._pipe.recv()
        assert isinstance(report, SegmentReport)
        return report

    def kill_service(self) -> None:
        """Kill the process that serves its samples."""
        assert self._service.pid is not None
        os.kill(self._service.pid, signal.SIGKILL)
        self._service.join()

    def end_job(self) -> None:
        """End the processes of the job. The memory of the node stays."""
        for process in (self._service, self._reader):
            process.kill()
            process.join()

    def kill(self) -> None:
        """Kill everything of the node (kill -9), and lose its memory."""
        self.end_job()
        for path in self.folder.iterdir():
            path.unlink()
        self.folder.rmdir()


def _serve(folder: Path, pipe: Any) -> None:
    service = SampleService(folder, SECRET, "127.0.0.1")
    pipe.send(service.address)
    signal.pause()


def _read(name: str, contender: str, setting: BenchmarkSetting, folder: Path, pipe: Any) -> None:
    torch.set_num_threads(1)
    # A full garbage collection would copy the memory that is shared with the parent: 0.1 s, once,
    # within the epochs of the contender that happens to allocate enough objects.
    gc.freeze()
    os.environ.update(
        {
            env.DATA: str(folder),
            env.NODE: name,
            env.JOB: JOB,
            env.JOB_KEY: SECRET.hex(),
        }
    )
    made = make(contender, setting)
    pipe.send("ready")
    while True:
        segment = pipe.recv()
        report = SegmentReport()
        hits, reads = made.counts()
        began = time.perf_counter()
        for numbers in made.batches(segment):
            time.sleep(setting.step_s)
            report.samples += numbers
        report.seconds = time.perf_counter() - began
        now_hits, now_reads = made.counts()
        report.hits, report.reads = now_hits - hits, now_reads - reads
        pipe.send(report)
