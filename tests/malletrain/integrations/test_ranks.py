"""The callbacks on two ranks, each on a node of its own: only rank 0's is told of a drain; both
save at the same step, and nobody hangs.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from malletrain.protocol.worker_channel import DrainDone, WorkerProgress
from tests.last_words import tail
from tests.malletrain.agent.node_side import alive, eventually
from tests.malletrain.training.worker_side import FakeAgent
from tests.ports import free_ports

pytestmark = pytest.mark.slow

STEPS = 40
HOME = Path(__file__).parents[3]


class Ranks:
    """The workers of a round, as torchrun starts them on a node each, and their agents' ends."""

    def __init__(
        self,
        server: subprocess.Popen[str],
        folder: Path,
        generation: int,
        flags: tuple[str, str] = ("", ""),
        world: int = 2,
        most: int = 2,
    ) -> None:
        self.folder = folder
        self.agents = [FakeAgent() for _ in range(world)]
        port, self._port = free_ports(1)
        self.workers: list[int] = []
        assert server.stdin is not None
        assert server.stdout is not None
        for rank, (agent, other) in enumerate(itertools.zip_longest(self.agents, flags[:world])):
            environment = {
                "FOLDER": str(folder),
                "RANK": str(rank),
                "LOCAL_RANK": "0",
                "GROUP_RANK": str(rank),
                "WORLD_SIZE": str(world),
                "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "TORCHELASTIC_RUN_ID": "job-1",
                "GLOO_SOCKET_IFNAME": "lo",
                "MALLETRAIN_SOCKET": agent.path,
                "MALLETRAIN_FLAGS": other or agent.flags.path,
                "MALLETRAIN_JOB": "job-1",
                "MALLETRAIN_MAX_WORLD_SIZE": str(most),
                "MALLETRAIN_GENERATION": str(generation),
            }
            print(json.dumps(environment), file=server.stdin, flush=True)
            self.workers.append(int(server.stdout.readline()))

    def until(self, rank: int, what: str, heard: Callable[[Any], bool]) -> None:
        """Wait for something that the agent of ``rank`` hears."""
        eventually(lambda: any(map(heard, self.agents[rank].received())) or self.check(), what)

    def when(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for ``condition``; fails when a worker ends before."""
        eventually(lambda: condition() or self.check(), what)

    def check(self) -> bool:
        assert all(map(alive, self.workers)), self.logs()
        return False

    def ended(self) -> None:
        """Wait until none of them lives; their agents hear their last reports."""

        def over() -> bool:
            for agent in self.agents:
                agent.received()
            return not any(map(alive, self.workers))

        eventually(over, "they end", details=self.logs)

    def logs(self) -> str:
        return "\n".join(
            f"--- rank {rank}\n{tail(self.folder / f'log-{rank}')}"
            for rank in range(len(self.agents))
        )

    def steps(self) -> list[list[int]]:
        """By rank: the steps done, one after the other."""
        return [
            [int(line) for line in (self.folder / f"steps-{rank}").read_text().split()]
            for rank in range(2)
        ]

    def close(self) -> None:
        self._port.close()
        for pid in filter(alive, self.workers):
            os.kill(pid, signal.SIGKILL)
        for agent in self.agents:
            agent.close()


@pytest.fixture
def server(library):
    """Forks ranks that have the library imported."""
    pytest.importorskip(library, reason="pip install malletrain[integrations]")
    command = [
        sys.executable,
        "-m",
        "tests.malletrain.integrations.ranks",
        library,
        str(STEPS),
    ]
    with subprocess.Popen(
        command, cwd=HOME, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.kill()


@pytest.mark.parametrize(
    "library",
    [
        pytest.param("transformers", marks=pytest.mark.thorough),
        pytest.param("lightning", marks=pytest.mark.thorough),
        "accelerate",
    ],
)
def test_a_drain_that_only_rank_0_hears_of_has_both_save_and_stop_at_the_same_step(
    server, tmp_path, library
):
    (tmp_path / "limit").write_text("20")
    first = Ranks(server, tmp_path, 1)
    try:
        first.until(1, "some steps", lambda m: isinstance(m, WorkerProgress) and m.steps >= 3)
        first.agents[0].flags.request_drain(7)
        (tmp_path / "limit.new").write_text(str(STEPS))
        os.replace(tmp_path / "limit.new", tmp_path / "limit")
        first.until(
            0, "the answer", lambda m: isinstance(m, DrainDone) and m.saved and m.number == 7
        )
        done = first.steps()
        assert done[0] == done[1] == list(range(1, len(done[0]) + 1))
        assert len(done[0]) < STEPS
        if library == "transformers":
            (checkpoint,) = tmp_path.glob("checkpoint-*")
            assert len(list(checkpoint.glob("rng_state_*"))) == 2, (
                "both ranks' parts are on disk before that is said"
            )
        for pid in first.workers:
            os.kill(pid, signal.SIGTERM)
        first.ended()
        assert first.steps() == done, "what is done after the snapshot is lost"
    finally:
        first.close()

    second = Ranks(
        server, tmp_path, 2, ("", str(tmp_path / "nowhere"))
    )  # the flags cannot be read on one of them
    try:
        second.ended()
        assert second.steps() == [list(range(1, STEPS + 1))] * 2, second.logs()
        assert [(tmp_path / f"end-{rank}").read_text() for rank in range(2)] == [str(STEPS)] * 2
    finally:
        second.close()
