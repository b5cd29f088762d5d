"""The store of one round, as a launcher sees it: served here, or reached at the node of rank 0.

Either way the processes of this node reach it at a port of their own loopback, which other users'
processes cannot use. Between nodes it goes over a connection that only the job's launchers can open
(:mod:`malletrain.launch.relay`). Decides how long connecting to a store is tried, not who is in a
round.
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
_OPEN = (
    "malletrain launcher: this kernel signs no TCP segments (no MD5, as under FIPS), so other "
    "users of this node can reach the store of the round. Give leases whole nodes."
)


def _keys(job: str, generation: int) -> RoundKeys:
    return RoundKeys(job_secret(), f"{job}/{generation}")


class ServedStore:
    """The store of a round, in this process."""

    def __init__(self, job: str, generation: int, host: str) -> None:
        """Serve it.

        Args:
            job, generation: of the round.
            host: of this node for the others.

        Raises:
            OSError: There is no port for it.
            ValueError: This process does not know the job's secret.
        """
        keys = _keys(job, generation)
        listeners = listener_pair()
        if not listeners[1].enforced:
            print(_OPEN, flush=True)
        inside = listeners[1].duplicate()
        self._relay = ServingRelay(listeners, keys, host)
        self.host = host
        self.port = self._relay.port
        """Where the launchers of other nodes call."""
        self.local_port = self._relay.local_port
        """Where the processes of this node call."""
        # Its own client comes in by the user listener, too: hence one port number for both.
        self.store: TCPStore | None = None
        try:
            self.store = TCPStore(
                USER_ADDRESS,
                self.local_port,
                is_master=True,
                wait_for_workers=False,
                timeout=TIMEOUT,
                master_listen_fd=inside,
            )
        except RuntimeError:
            self._relay.close()
            raise

    def close(self) -> None:
        """The round is over; the store ends with its last user."""
        self.store = None
        self._relay.close()


class ReachedStore:
    """The store of a round at another node."""

    def __init__(self, job: str, generation: int, host: str, port: int) -> None:
        """Begin to connect; processes that call meanwhile wait.

        Args:
            job, generation: of the round.
            host, port: what the node of rank 0 announced.

        Raises:
            ValueError: This process does not know the job's secret.
        """
        self._relay = CallingRelay(_keys(job, generation), host, port)
        self.local_port = self._relay.local_port
        """Where the processes of this node call."""
        self.store: TCPStore | None = None

    @property
    def connected(self) -> bool:
        """Whether the other node's launcher has let this one in."""
        return self._relay.connected

    @property
    def trouble(self) -> str:
        """Why it is not connected."""
        return "it has gone again" if self._relay.over else self._relay.trouble

    @property
    def over(self) -> bool:
        """Whether it has gone again."""
        return self._relay.over

    def fileno(self) -> int:
        """Can be read once there is a connection, or will be none any more."""
        return self._relay.fileno()

    def close(self) -> None:
        """The round is over."""
        self.store = None
        self._relay.close()


class StoreClient(threading.Thread):
    """A client of a store behind a port of this node, made in a thread that can be left behind.

    TCPStore's constructor cannot be interrupted: when the store goes between the connection and its
    first answer, as that of a node which is taken does, it tries again until its time limit.
    :meth:`fileno` can be read when the attempt is over.
    """

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True, name="store-connection")
        self._port = port
        self._mine, self._its = socket.socketpair()
        self.store: TCPStore | None = None
        self.error: Exception | None = None
        self.over = False
        self.start()

    def fileno(self) -> int:
        return self._mine.fileno()

    def run(self) -> None:
        try:
            self.store = TCPStore(
                USER_ADDRESS, self._port, is_master=False, wait_for_workers=False, timeout=TIMEOUT
            )
        except (OSError, RuntimeError) as error:
            self.error = error
        self.over = True
        self._its.close()
