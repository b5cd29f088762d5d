"""The data caches of a node, as the launcher of a job has them: it serves their samples to the
other nodes, and writes down the nodes of each round for the workers.

Decides nothing. A job trains without it, as on a node without shared memory.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from malletrain.datacache.members import members_file, write_members
from malletrain.datacache.serving import SampleService
from malletrain.protocol import env
from malletrain.protocol.job_keys import job_secret
from malletrain.protocol.launcher_channel import LaunchOrder
from malletrain.protocol.messages import Round

log = logging.getLogger(__name__)


class NodeSamples:
    """The service of one job on this node, and the file with its members.

    Args:
        folder: folder of the node's data caches.
        secret: secret of the job.
        job: id of the job.
        host: address of this node for the other nodes.

    Raises:
        OSError: no port is available.
    """

    def __init__(self, folder: Path, secret: bytes, job: str, host: str) -> None:
        self._path = members_file(folder, job)
        self._service = SampleService(folder, secret, host)
        self.address = self._service.address
        """Address at which it serves samples."""

    def enter(self, message: Round) -> None:
        """Write down the members of a round that this node enters."""
        try:
            write_members(self._path, {peer.node: peer.address for peer in message.members})
        except OSError as error:  # the node is on its own
            log.warning("the list of the nodes of the round cannot be written: %s", error)
            self._path.unlink(missing_ok=True)

    def close(self) -> None:
        """Stop serving. The samples stay for the next job."""
        self._path.unlink(missing_ok=True)
        self._service.close()


def node_samples(order: LaunchOrder) -> NodeSamples | None:
    """Return the samples of this node; None if there is no folder for them, or no port."""
    folder = os.environ.get(env.DATA, "")
    if not os.path.isdir(folder):
        return None
    try:
        return NodeSamples(Path(folder), job_secret(), order.job, order.host)
    except (OSError, ValueError) as error:  # the job also runs without
        print(
            f"malletrain launcher: this node serves no samples to other nodes: {error}", flush=True
        )
        return None
