"""The rendezvous handler: TorchElastic asks it for the next round, and it answers what the daemon
decided.

The daemon decides who is in a round, with which ranks, and whose store it uses; the agent on this
node passes that on. So there is no last call and no vote: a round has exactly the planned members.
Every round has a fresh store in the launcher of rank 0, which avoids the stale bootstrap store of
pytorch issue 135712 and needs no setting of the user's; every node reaches it at a port of its own
loopback. A newer round makes an older one void at any moment, also while a process connects to its
store.

Nothing is decided here about membership, tries or how long to wait for a round: the agent ends a
wait that takes too long (``Error``).
"""

from __future__ import annotations

import os
import socket
import time

from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from malletrain.launch import fabric
from malletrain.launch.listeners import USER_ADDRESS
from malletrain.launch.round_store import ReachedStore, ServedStore, StoreClient, job_secret
from malletrain.protocol import env
from malletrain.protocol.fault_points import FaultPoint, reached
from malletrain.protocol.launcher_channel import (
    LauncherEnd,
    RoundInbox,
)
from malletrain.protocol.messages import (
    Alive,
    Assignment,
    Error,
    Failure,
    Phase,
    Release,
    Round,
    StoreUp,
)
from malletrain.protocol.phases import AssignmentPhase

BACKEND = "malletrain"
DEFAULT_TIMEOUT_S = 60.0


class DaemonRendezvous(RendezvousHandler):
    """Rounds of one job on this node. ``timeout_s`` bounds the first contact with the agent and the
    way to a round's store; ``keeper`` is where other nodes reach what is in this node's memory.
    """

    def __init__(
        self,
        job: str,
        endpoint: str,
        host: str,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        keeper: str = "",
    ) -> None:
        self._job = job
        self._host = host
        self._timeout_s = timeout_s
        self._keeper = keeper
        self._inbox = RoundInbox()
        self._stores: dict[int, ServedStore | ReachedStore] = {}
        self._failures: tuple[Failure, ...] = ()
        self._change_seen = False
        self._ending = 0
        """The round of which some workers have ended well."""
        self._answered = False
        self._closed = ""
        self._agent = LauncherEnd(endpoint)
        # All nodes of a job run the same number of workers, so ranks follow from the round and no
        # store is needed to agree on them. A worker's supervisor (supervisor.py) needs the
        # launcher's pid.
        os.environ["TORCH_ELASTIC_WORKER_IDENTICAL"] = "1"
        os.environ[env.LAUNCHER_PID] = str(os.getpid())

    @classmethod
    def from_parameters(cls, params: RendezvousParameters) -> DaemonRendezvous:
        """The handler for ``torchrun --rdzv-backend=malletrain [--rdzv-endpoint=ADDRESS]
        --rdzv-id=JOB [--rdzv-conf=timeout=SECONDS]``.
        """
        endpoint = params.endpoint or os.environ.get(env.AGENT, "")
        if not endpoint:
            raise ValueError(
                "The malletrain rendezvous needs the address of the agent on this node: "
                f"{env.AGENT} is not set and --rdzv-endpoint is "
                "empty. Start the job with `malletrain submit`, which sets it."
            )
        job_secret()
        host = params.local_addr or os.environ.get(env.HOST) or socket.getfqdn()
        return cls(params.run_id, endpoint, host, float(params.get("timeout", DEFAULT_TIMEOUT_S)))

    # --- what TorchElastic calls ---

    def get_backend(self) -> str:
        """The name torchrun knows this by."""
        return BACKEND

    def get_run_id(self) -> str:
        """The job."""
        return self._job

    @property
    def use_agent_store(self) -> bool:
        """Workers are clients of the round's store, which lives in the launcher of rank 0 and so
        outlives any worker.
        """
        return True

    def is_closed(self) -> bool:
        """Whether there will be no further round here."""
        return bool(self._closed)

    def set_closed(self) -> None:
        """Take no further round."""
        self._closed = self._closed or "The launcher closed the rendezvous."

    def shutdown(self) -> bool:
        """Close the connection to the agent and every store served from here."""
        self.set_closed()
        self._leave_stores(None)
        self._agent.close()
        return True

    def num_nodes_waiting(self) -> int:
        """1 when the daemon has formed a newer round that this node is in, else 0. Never blocks.

        If this node is to serve the new round's store it does so now, while the workers still run:
        the others learn of the round only then, and all stop their workers at the same time.
        """
        self._listen(0.0)
        pending = self._inbox.pending()
        if pending is None:
            return 0
        if not pending.store_host:
            self._serve(pending)
        self._change_seen = True
        return 1

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the next round of the job and join it; the workers of the last one are stopped
        by now.

        Raises:
            RendezvousClosedError: the job has left this node, or the agent is gone.
            RendezvousTimeoutError: the agent says that the daemon formed no round in time, or the
                round's store cannot be reached.
            RendezvousConnectionError: no agent answers.
        """
        if not self._inbox.pending():
            broken = self._inbox.generation > 0 and not self._change_seen
            self._say(AssignmentPhase.FAILED if broken else AssignmentPhase.READY, self._failures)
        self._failures, self._change_seen = (), False
        contact = time.monotonic() + self._timeout_s
        while True:
            self._check_open()
            pending = self._inbox.pending()
            if pending is not None and (info := self._join(pending)):
                return info
            if not self._answered and time.monotonic() > contact:
                raise RendezvousConnectionError(
                    f"No agent answers at {self._agent.endpoint} within {self._timeout_s:g} s. "
                    "Run the job through `malletrain submit`, or "
                    f"give torchrun the --rdzv-endpoint that the agent puts in {env.AGENT}."
                )
            if pending is None:
                self._listen(0.5)

    # --- what MalleTrain's own launcher calls besides ---

    def note_failures(self, failures: tuple[Failure, ...]) -> None:
        """The workers of the current round failed; told to the agent by the next
        :meth:`next_rendezvous`.
        """
        self._failures = failures

    def succeeded(self) -> bool:
        """Report that all workers here ended well and wait in the lobby: other nodes may still need
        the store served from here.

        Returns whether there is a new round to join (else the job has left this node).
        """
        self._say(AssignmentPhase.SUCCEEDED)
        while not self._closed and not self.num_nodes_waiting():
            self._listen(0.5)
        return not self._closed

    def some_ended(self) -> None:
        """Some of the workers have ended well, the others run; told to the agent once."""
        if self._ending != self._inbox.generation:
            self._ending = self._inbox.generation
            self._say(AssignmentPhase.FINISHING)

    def wait_for_news(self, timeout_s: float) -> None:
        """Wait up to ``timeout_s``, less if the agent says something."""
        self._listen(timeout_s)

    # --- inside ---

    def _say(self, phase: AssignmentPhase, failures: tuple[Failure, ...] = ()) -> None:
        assignment = Assignment(self._job, phase, self._inbox.generation, failures, self._keeper)
        self._agent.send(Phase(assignment))

    def _listen(self, timeout_s: float) -> None:
        for message in self._agent.receive(timeout_s):
            if isinstance(message, Round) and message.job == self._job:
                self._inbox.add(message)
            elif isinstance(message, Release):
                self._closed = "The job was released from this node."
            elif isinstance(message, Error):
                raise RendezvousTimeoutError(message.sentence)
            elif isinstance(message, Alive):
                self._answered = True
        if self._agent.agent_gone:
            self._closed = "The agent on this node is gone."

    def _check_open(self) -> None:
        if self._closed:
            raise RendezvousClosedError(self._closed)

    def _leave_stores(self, before: int | None) -> None:
        """Close the stores of rounds that are over."""
        for generation in [g for g in self._stores if before is None or g < before]:
            self._stores.pop(generation).close()

    def _serve(self, pending: Round) -> ServedStore:
        """The store of ``pending``, served from here; told to the agent the first time."""
        store = self._stores.get(pending.generation)
        if not isinstance(store, ServedStore):
            host = pending.address or self._host
            store = ServedStore(self._job, pending.generation, host)
            self._stores[pending.generation] = store
            self._agent.send(StoreUp(self._job, pending.generation, store.host, store.port))
        return store

    def _join(self, pending: Round) -> RendezvousInfo | None:
        """Take part in ``pending``. None when something newer came up on the way."""
        store = self._connect(pending) if pending.store_host else self._serve(pending)
        if store is None or store.store is None:
            return None
        reached(FaultPoint.LAUNCHER_JOINS)
        self._inbox.take()
        self._leave_stores(pending.generation)
        os.environ[env.GENERATION] = str(pending.generation)
        fabric.put(os.environ, pending.interface)
        self._say(AssignmentPhase.RUNNING)
        where = RendezvousStoreInfo(USER_ADDRESS, store.local_port)
        return RendezvousInfo(store.store, pending.group_rank, pending.group_size, where)

    def _connect(self, pending: Round) -> ReachedStore | None:
        """The way to the round's store; None when something newer came up meanwhile."""
        deadline = time.monotonic() + self._timeout_s
        job, host, port = self._job, pending.store_host, pending.store_port
        reached = ReachedStore(job, pending.generation, host, port)
        attempt = None
        try:
            while self._wait(reached, deadline, pending):
                if reached.connected:
                    attempt = StoreClient(reached.local_port)
                    break
            while attempt is not None and self._wait(attempt, deadline, pending):
                if attempt.store is not None:
                    break
            if self._void(pending):
                return None
            if attempt is not None and attempt.store is not None:
                reached.store = attempt.store
                self._stores[pending.generation] = reached
                return reached
        finally:
            if reached.store is None:
                reached.close()
        raise RendezvousTimeoutError(
            f"The store of round {pending.generation} of job {job} at {host}:{port} cannot be "
            f"reached from this node within {self._timeout_s:g} s ({reached.trouble}). Check that "
            "the agents' --host is an address that the other nodes can reach, and that no firewall "
            "stands between them."
        )

    def _wait(self, one: ReachedStore | StoreClient, deadline: float, pending: Round) -> bool:
        """Wait a moment for ``one``. Returns whether to go on waiting: there is time, and nothing
        newer.
        """
        if time.monotonic() > deadline or self._void(pending):
            return False
        if one.over:  # it will not come back; a newer round may
            self._listen(0.5)
            return not self._void(pending)
        self._agent.also_wake_on(one.fileno())
        try:
            self._listen(0.5)
        finally:
            self._agent.also_wake_on(one.fileno(), wake=False)
        return not self._void(pending)

    def _void(self, pending: Round) -> bool:
        return bool(self._closed) or self._inbox.pending() is not pending
