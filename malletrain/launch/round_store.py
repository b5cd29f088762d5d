"""The store of one round, as a launcher sees it: served here, or reached at the node of rank 0.

In both cases the processes of this node reach it at a port of their loopback, which other users'
processes cannot use. Nodes are connected by a connection that only the job's launchers can open
(:mod:`malletrain.launch.relay`). Decides how long connecting to a store is tried, not which nodes
are in a round.
"""

from __future__ import annotations

import socket
import threading
from datetime import timedelta

from torch.distributed import TCPStore

from malletrain.launch.listeners import USER_ADDRESS, listener_pair
from malletrain.launch.relay import CallingRelay, RoundKeys, ServingRelay
from malletrain.protocol.job_keys import job_secret as job_secret

TIMEOUT = timedelta(seconds=300)
_UNPROTECTED = (
    "malletrain launcher: this kernel signs no TCP segments (no MD5, as under FIPS), so other "
    "users of this node can reach the store of the round. Give leases whole nodes."
)


def _keys(job: str, generation: int) -> RoundKeys:
    return RoundKeys(job_secret(), f"{job}/{generation}")


class ServedStore:
    """The store of a round, in this process."""

    def __init__(self, job: str, generation: int, host: str) -> None:
        """Serve the store.

        Args:
            job: id of the job.
            generation: number of the round.
            host: address of this node for other nodes.

        Raises:
            OSError: no port can be opened.
            ValueError: this process does not have the job's secret.
        """
        keys = _keys(job, generation)
        listeners = listener_pair()
        if not listeners[1].enforced:
            print(_UNPROTECTED, flush=True)
        listen_fd = listeners[1].duplicate()
        self._relay = ServingRelay(listeners, keys, host)
        self.host = host
        self.port = self._relay.port
        """Port to which the launchers of other nodes connect."""
        self.local_port = self._relay.local_port
        """Loopback port to which the processes of this node connect."""
        # TCPStore's own client connects to the same port number as its server, but through the user
        # listener. So both listeners have one port number.
        self.store: TCPStore | None = None
        try:
            self.store = TCPStore(
                USER_ADDRESS,
                self.local_port,
                is_master=True,
                wait_for_workers=False,
                timeout=TIMEOUT,
                master_listen_fd=listen_fd,
            )
        except RuntimeError:
            self._relay.close()
            raise

    def close(self) -> None:
        """Close the store. It ends with its last user."""
        self.store = None
        self._relay.close()


class ReachedStore:
    """The store of a round at another node."""

    def __init__(self, job: str, generation: int, host: str, port: int) -> None:
        """Start to connect. Processes that connect before that is done wait.

        Args:
            job: id of the job.
            generation: number of the round.
            host: address of the store, from the node of rank 0.
            port: its port.

        Raises:
            ValueError: this process does not have the job's secret.
        """
        self._relay = CallingRelay(_keys(job, generation), host, port)
        self.local_port = self._relay.local_port
        """Loopback port to which the processes of this node connect."""
        self.store: TCPStore | None = None
        """Client of the store; None until one is made."""

    @property
    def connected(self) -> bool:
        """Whether the other node's launcher has accepted the connection."""
        return self._relay.connected

    @property
    def trouble(self) -> str:
        """Reason why it is not connected."""
        return "it has closed the connection" if self._relay.over else self._relay.trouble

    @property
    def over(self) -> bool:
        """Whether the connection has been closed again."""
        return self._relay.over

    def fileno(self) -> int:
        """Returns a file descriptor that becomes readable when the store is connected, or lost."""
        return self._relay.fileno()

    def close(self) -> None:
        """Close the connection."""
        self.store = None
        self._relay.close()


class StoreClient(threading.Thread):
    """A client of a store behind a port of this node, made in a thread that can be abandoned.

    TCPStore's constructor cannot be interrupted. If the store is lost between the connection and
    its first response, as with a node that is preempted, it tries again until its timeout.
    :meth:`fileno` becomes readable when the attempt has ended.
    """

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True, name="store-connection")
        self._port = port
        self._readable_end, self._writable_end = socket.socketpair()
        self.store: TCPStore | None = None
        """The client; None until the attempt has succeeded."""
        self.error: Exception | None = None
        """Error of the attempt; None if it has not failed."""
        self.over = False
        """Whether the attempt has ended."""
        self.start()

    def fileno(self) -> int:
        return self._readable_end.fileno()

    def run(self) -> None:
        try:
            self.store = TCPStore(
                USER_ADDRESS, self._port, is_master=False, wait_for_workers=False, timeout=TIMEOUT
            )
        except (OSError, RuntimeError) as error:
            self.error = error
        self.over = True
        self._writable_end.close()
