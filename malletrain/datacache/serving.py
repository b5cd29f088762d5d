"""Serves the samples in a node's memory to the other nodes of the job, and stores samples of this
node that the others have read. Runs in a thread of the launcher, which outlives the workers.

Until the first connection there is only a port and a sleeping thread, because most jobs have no
data cache. Decides nothing: the other node learns which samples are absent or damaged, and whether
the store is full.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import threading
from collections.abc import Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from malletrain.datacache.store import DataSetIdentity, NodeStore, check_sum, file_name
from malletrain.protocol.host_listener import listening
from malletrain.streams.server import StreamServer

PROTOCOL = "malletrain data cache"
MAX_BATCH_BYTES = 64 << 20
"""Maximum size of the samples in one answer. The client asks again for those that are missing."""

log = logging.getLogger(__name__)


def data_key(secret: bytes) -> bytes:
    """Return the key of a job's data caches. ``secret``: the job's secret."""
    return hmac.digest(secret, PROTOCOL.encode(), "sha256")


class SampleRequests:
    """Answers the requests of other nodes from the stores in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stores: dict[str, NodeStore] = {}

    def get(
        self, name: str, length: int, first: int, samples: Sequence[int]
    ) -> tuple[dict[str, Any], list[Any]]:
        """Return the samples that are here, up to MAX_BATCH_BYTES.

        Args:
            name, length, first: the data set (:class:`DataSetIdentity`).
            samples: numbers of the samples.

        Returns:
            The numbers, sizes and check sums of the samples that follow, whether the store is full,
            and whether more of ``samples`` may be here; and the packed samples.
        """
        store = self._store(DataSetIdentity(name, length, first))
        present: list[int] = []
        sums: list[int] = []
        bodies: list[Any] = []
        size = 0
        for sample in samples:
            one = store.find(sample) if store is not None else None
            if one is None:
                continue
            size += len(one[0])
            if bodies and size > MAX_BATCH_BYTES:
                break
            present.append(sample)
            bodies.append(one[0])
            sums.append(one[1])
        head = {
            "samples": present,
            "sizes": [len(body) for body in bodies],
            "sums": sums,
            "full": store is None or store.full,
            "more": size > MAX_BATCH_BYTES,
        }
        return head, bodies

    def put(
        self,
        name: str,
        length: int,
        first: int,
        samples: Sequence[int],
        sizes: Sequence[int],
        sums: Sequence[int],
        body: Any = b"",
    ) -> dict[str, Any]:
        """Store samples that another node has read.

        Args:
            name, length, first: the data set.
            samples, sizes, sums: number, size and check sum of each.
            body: their bytes, one after another.

        Returns:
            Whether the store is full.
        """
        store = self._store(DataSetIdentity(name, length, first))
        view, at = memoryview(body), 0
        for sample, size, total in zip(samples, sizes, sums, strict=True):
            data = view[at : at + size]
            at += size
            if store is not None and len(data) == size and check_sum(sample, data) == total:
                store.put(sample, data, total)
        return {"full": store is None or store.full}

    def _store(self, data: DataSetIdentity) -> NodeStore | None:
        store = self._stores.get(data.name)
        if store is None:
            store = NodeStore.open_existing(self._folder / file_name(data.name))
            if store is None:
                return None
            self._stores[data.name] = store
        same = (store.length, store.first) == (data.length, data.first)
        return store if same else None

    def close(self) -> None:
        """Close the stores."""
        for store in self._stores.values():
            store.close()
        self._stores.clear()


class SampleService:
    """The service of one job on this node.

    Args:
        folder: folder of the stores.
        secret: secret of the job; only clients with this secret can connect.
        host: address of this node for the other nodes.

    Raises:
        OSError: no port is available.
    """

    def __init__(self, folder: Path, secret: bytes, host: str) -> None:
        self._folder, self._key = folder, data_key(secret)
        self._listener = listening(host)
        port = self._listener.getsockname()[1]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        """Address for the other nodes, as ``host:port``."""
        self._stop, self._stopped = os.pipe2(os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="malletrain-samples", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving; the samples stay. A second call does nothing."""
        if self._stopped >= 0:
            os.close(self._stopped)
            self._stopped = -1
            self._thread.join()

    def _run(self) -> None:
        try:
            if self._stop not in wait([self._stop, self._listener]):
                asyncio.run(self._serve())
        except OSError as error:  # the other nodes read these samples from the data set
            log.warning("samples of the data cache are not served to other nodes: %s", error)
        finally:
            os.close(self._stop)
            self._listener.close()

    async def _serve(self) -> None:
        """Serve until :meth:`close`."""
        requests = SampleRequests(self._folder)
        server = StreamServer(
            {"get": requests.get, "put": requests.put},
            self._key,
            PROTOCOL,
            listener=self._listener,
        )
        stopped = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(self._stop, stopped.set)
        await stopped.wait()
        loop.remove_reader(self._stop)
        server.close()
        requests.close()
