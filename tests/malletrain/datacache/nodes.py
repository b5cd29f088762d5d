"""Virtual nodes of one job in one process: each has a store, a service and an environment."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from malletrain.datacache.cache import DataCache
from malletrain.datacache.members import members_file, write_members
from malletrain.datacache.serving import SampleService
from malletrain.datacache.store import private_data_folder
from malletrain.protocol import env

SECRET = b"the secret of a job"


class Images:
    """A data set of small images that counts its reads. Sample 0 is read once by each DataCache."""

    def __init__(self, length: int = 200) -> None:
        self.length = length
        self.reads: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[object, int]:
        self.reads.append(index)
        return image(index), index

    def read(self) -> list[int]:
        """The samples that were read since the last call."""
        reads, self.reads = self.reads, []
        return reads


def image(index: int) -> object:
    """The image of a sample."""
    import torch

    pixels = np.random.default_rng(index).integers(0, 256, (28, 28), dtype=np.uint8)
    return torch.from_numpy(pixels)


class Job:
    """The nodes of a job and their addresses."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, secret: bytes = SECRET):
        self._base, self._monkeypatch, self.secret = tmp_path, monkeypatch, secret
        self.services: dict[str, SampleService] = {}
        self._open = contextlib.ExitStack()

    def folder(self, node: str) -> Path:
        """The folder of a node's stores."""
        return private_data_folder(self._base / node)

    def add(self, *nodes: str) -> None:
        """Let nodes join, and tell all."""
        for node in nodes:
            self.services[node] = SampleService(self.folder(node), self.secret, "127.0.0.1")
        self.announce()

    def lose(self, node: str, announce: bool = True) -> None:
        """Lose a node, with its memory."""
        self.services.pop(node).close()
        for path in self.folder(node).iterdir():
            path.unlink()
        if announce:
            self.announce()

    def announce(self) -> None:
        """Write the members of the newest round on every node."""
        addresses = {node: service.address for node, service in self.services.items()}
        for node in addresses:
            write_members(members_file(self.folder(node), "job-1"), addresses)

    def cache(self, node: str, dataset: Images, **options: object) -> DataCache:
        """The data set as a worker on ``node`` has it."""
        variables = {
            env.DATA: str(self.folder(node)),
            env.NODE: node,
            env.JOB: "job-1",
            env.JOB_KEY: self.secret.hex(),
        }
        with self._monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            arguments = {"name": "images", "memory": "4M", **options}
            made = DataCache(dataset, **arguments)  # type: ignore[arg-type]
            dataset.read()
        self._open.callback(made.close)
        return made

    def close(self) -> None:
        """Close everything."""
        self._open.close()
        for service in self.services.values():
            service.close()


@contextlib.contextmanager
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    """A job without nodes."""
    made = Job(tmp_path, monkeypatch)
    try:
        yield made
    finally:
        made.close()
