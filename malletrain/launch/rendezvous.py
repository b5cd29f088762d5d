"""The rendezvous handler: returns to TorchElastic the next round, as the daemon has decided it.

The daemon decides which nodes are in a round, with which ranks, and where its store is. The agent
on this node forwards that. So there is no last call and no vote: a round has exactly the planned
members. Every round has a new store in the launcher of rank 0. This avoids the stale bootstrap
store of pytorch issue 135712, and needs no setting by the user. Every node reaches the store at a
port of its own loopback. A newer round makes an older one void at any time, even while a process
connects to its store.

Decides nothing about membership, tries or the maximum time to wait for a round: the agent ends a
wait that takes too long (``Error``).
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable

from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from malletrain.launch import worker_variables
from malletrain.launch.listeners import USER_ADDRESS
from malletrain.launch.node_samples import NodeSamples
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
    RoundLayout,
    StoreUp,
)
from malletrain.protocol.phases import AssignmentPhase

BACKEND = "malletrain"
DEFAULT_TIMEOUT_S = 60.0


class DaemonRendezvous(RendezvousHandler):
    """The rendezvous handler of one job on this node.

    Args:
        job: id of the job.
        endpoint: address of the agent.
        host: address of this node for other nodes.
        timeout_s: maximum time for the first contact with the agent, and for connecting to a
            round's store, seconds.
        keeper: address of the keeper of this node's memory; empty for none.
        samples: serves the samples of data caches; None for none.
    """

    def __init__(
        self,
        job: str,
        endpoint: str,
        host: str,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        keeper: str = "",
        samples: NodeSamples | None = None,
    ) -> None:
        self._job = job
        self._host = host
        self._timeout_s = timeout_s
        self._keeper, self._samples = keeper, samples
        self._inbox = RoundInbox()
        self._stores: dict[int, ServedStore | ReachedStore] = {}
        self._failures: tuple[Failure, ...] = ()
        self._change_seen = False
        self._finishing_round = 0
        """Number of the round of which some workers have ended with code 0."""
        self._answered = False
        self.on_layout: Callable[[RoundLayout | None], None] = lambda layout: None
        """Called with the layout of the node in each round before it is joined."""
        self._closed = ""
        """Reason why there are no further rounds; empty if there may be."""
        self._agent = LauncherEnd(endpoint)
        # All nodes of a job run the same number of workers, so ranks follow from the round and no
        # store is needed to agree on them. A worker's supervisor (supervisor.py) needs the
        # launcher's pid.
        os.environ["TORCH_ELASTIC_WORKER_IDENTICAL"] = "1"
        os.environ[env.LAUNCHER_PID] = str(os.getpid())

    @classmethod
    def from_parameters(cls, params: RendezvousParameters) -> DaemonRendezvous:
        """Return the handler for ``torchrun --rdzv-backend=malletrain [--rdzv-endpoint=ADDRESS]
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
        """Return the name of the rendezvous backend."""
        return BACKEND

    def get_run_id(self) -> str:
        """Return the id of the job."""
        return self._job

    @property
    def use_agent_store(self) -> bool:
        """Whether workers are clients of the round's store. They are: the store is in the launcher
        of rank 0, and so outlives every worker.
        """
        return True

    def is_closed(self) -> bool:
        """Return whether there is no further round on this node."""
        return bool(self._closed)

    def set_closed(self) -> None:
        """Join no further round."""
        self._closed = self._closed or "The launcher closed the rendezvous."

    def shutdown(self) -> bool:
        """Close the connection to the agent and every store served from here."""
        self.set_closed()
        self._close_stores(None)
        self._agent.close()
        return True

    def num_nodes_waiting(self) -> int:
        """Return 1 if the daemon has formed a newer round with this node, else 0. Never blocks.

        If this node serves the store of the new round, the store starts now, while the workers
        still run. The other nodes are informed of the round only then, so that all stop their
        workers at the same time.
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
        """Wait for the next round of the job and join it. The workers of the previous round have
        stopped.

        Raises:
            RendezvousClosedError: the job has left this node, or the agent has ended.
            RendezvousTimeoutError: the agent reports that the daemon formed no round in time, or
                the round's store cannot be reached.
            RendezvousConnectionError: no agent responds.
        """
        if not self._inbox.pending():
            broken = self._inbox.generation > 0 and not self._change_seen
            self._report(
                AssignmentPhase.FAILED if broken else AssignmentPhase.READY, self._failures
            )
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

    # --- further methods, for MalleTrain's own launcher ---

    def note_failures(self, failures: tuple[Failure, ...]) -> None:
        """Record failures of workers of the current round. The next call of
        :meth:`next_rendezvous` reports them to the agent.
        """
        self._failures = failures

    def succeeded(self) -> bool:
        """Report that all workers here ended with code 0, and wait, because other nodes may still
        need the store that this process serves.

        Returns:
            True if there is a new round to join, False if the job has left this node.
        """
        self._report(AssignmentPhase.SUCCEEDED)
        while not self._closed and not self.num_nodes_waiting():
            self._listen(0.5)
        return not self._closed

    def some_ended(self) -> None:
        """Report, once per round, that some workers have ended with code 0 while others run."""
        if self._finishing_round != self._inbox.generation:
            self._finishing_round = self._inbox.generation
            self._report(AssignmentPhase.FINISHING)

    def wait_for_news(self, timeout_s: float) -> None:
        """Wait up to ``timeout_s`` seconds for a message of the agent."""
        self._listen(timeout_s)

    # --- inside ---

    def _report(self, phase: AssignmentPhase, failures: tuple[Failure, ...] = ()) -> None:
        assignment = Assignment(
            self._job,
            phase,
            self._inbox.generation,
            failures,
            self._keeper,
            data_address=self._samples.address if self._samples else "",
        )
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

    def _close_stores(self, before: int | None) -> None:
        """Close the stores of rounds before ``before``; None for all."""
        for generation in [g for g in self._stores if before is None or g < before]:
            self._stores.pop(generation).close()

    def _serve(self, pending: Round) -> ServedStore:
        """Return the store of ``pending``, which this process serves. Announces it to the agent if
        it is new.
        """
        store = self._stores.get(pending.generation)
        if not isinstance(store, ServedStore):
            host = pending.address or self._host
            store = ServedStore(self._job, pending.generation, host)
            self._stores[pending.generation] = store
            self._agent.send(StoreUp(self._job, pending.generation, store.host, store.port))
        return store

    def _join(self, pending: Round) -> RendezvousInfo | None:
        """Join ``pending``. Return None if it has become void."""
        store = self._connect(pending) if pending.store_host else self._serve(pending)
        if store is None or store.store is None:
            return None
        reached(FaultPoint.LAUNCHER_JOINS)
        self._inbox.take()
        self._close_stores(pending.generation)
        os.environ[env.GENERATION] = str(pending.generation)
        worker_variables.set_network(os.environ, pending.interface)
        self.on_layout(pending.layout)
        if self._samples is not None:
            self._samples.enter(pending)
        self._report(AssignmentPhase.RUNNING)
        store_info = RendezvousStoreInfo(USER_ADDRESS, store.local_port)
        return RendezvousInfo(store.store, pending.group_rank, pending.group_size, store_info)

    def _connect(self, pending: Round) -> ReachedStore | None:
        """Connect to the store of ``pending``. Return None if the round has become void."""
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
            if self._is_void(pending):
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

    def _wait(self, attempt: ReachedStore | StoreClient, deadline: float, pending: Round) -> bool:
        """Wait up to 0.5 s for ``attempt``. Return whether to continue waiting: the deadline has
        not passed, and ``pending`` is not void.
        """
        if time.monotonic() > deadline or self._is_void(pending):
            return False
        if attempt.over:  # the store is lost; only a newer round can follow
            self._listen(0.5)
            return not self._is_void(pending)
        self._agent.also_wake_on(attempt.fileno())
        try:
            self._listen(0.5)
        finally:
            self._agent.also_wake_on(attempt.fileno(), wake=False)
        return not self._is_void(pending)

    def _is_void(self, pending: Round) -> bool:
        return bool(self._closed) or self._inbox.pending() is not pending
