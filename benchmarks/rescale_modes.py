"""The contenders of benchmarks/rescale.py. Each can run the training on a number of nodes, and lose
one without notice.

``live``, ``restart``: the whole product (embedded cluster, daemon, agents), used as a user would:
another job that needs k nodes makes the training shrink by k, and its end makes it grow. ``c10d``:
plain ``torchrun --rdzv-backend=c10d``, one torchrun per virtual node, on the same machine; nodes
leave by SIGTERM to their torchrun, and join by starting one.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, Protocol

import psutil

from benchmarks.host_image import host_binds, make_image
from malletrain.client import Connection
from malletrain.protocol import messages
from scavenger.embedded.cluster_process import ClusterProcess, start_cluster

SCRIPT = Path(__file__).with_name("train_step.py")
LIVE_SCRIPT = Path(__file__).with_name("train_live.py")
BLOCKER = "import time, malletrain\nwhile True:\n    time.sleep(0.2)\n    malletrain.report(1)\n"
PATIENCE_S = 180.0
STOP_S = 120.0
"""Time after which a daemon that does not end is killed, so that the measurements are not lost,
seconds.
"""


class Contender(Protocol):
    """A way to run the training elastically on up to ``nodes`` virtual nodes."""

    def start(self) -> None:
        """Begin to train on all nodes."""

    def shrink(self, by: int) -> None:
        """Let the training leave ``by`` nodes; return at once."""

    def grow(self, by: int) -> None:
        """Give the nodes back."""

    def lose(self) -> None:
        """Kill one node without notice (not the one of rank 0)."""

    def recover(self) -> None:
        """Return the lost node."""

    def begin_anew(self) -> None:
        """End the training, and submit another one to the same nodes. Return the time of the
        submission.
        """

    def phases(self) -> list[dict[str, float]]:
        """Phases of every rescale so far in seconds, if the contender knows them."""

    def last_words(self) -> str:
        """Return the ends of its logs."""

    def stop(self) -> None:
        """End everything."""


def until(condition: Callable[[], object], what: str, patience_s: float = PATIENCE_S) -> None:
    """Wait for ``condition``. Raises RuntimeError after a time limit."""
    deadline = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"Not within {patience_s:g} s: {what}.")
        time.sleep(0.05)


class Restart:
    """MalleTrain in restart mode."""

    mode = "restart"
    script = SCRIPT
    env: ClassVar[dict[str, str]] = {}
    """Additional environment variables of the training."""
    jobs = ""
    """Additional settings of the site in ``[jobs]``."""
    allocation = ""
    """Additional settings in ``[allocation]``."""
    local = ""
    """Additional settings in ``[scheduler.local]``."""
    sections = ""
    """Additional sections of the site's configuration."""

    def __init__(self, root: Path, nodes: int, arguments: list[str]) -> None:
        self.root, self.nodes, self.arguments = root, nodes, arguments
        self.state = root / "state"
        self.cluster = self._cluster()
        (root / "blocker.py").write_text(BLOCKER)
        config = root / "site.toml"
        config.write_text(
            f'[daemon]\nstate_dir = "{self.state}"\nmetrics_listen = ""\n'
            '[scheduler]\nkind = "local"\npoll_interval = "0.5 s"\n[scheduler.local]\nnodes = '
            f"{nodes}\nautostart = false\n{self.local}\n"
            f'[jobs]\nwarmup_timeout = "60 s"\n{self.jobs}\n[allocation]\ndebounce = "0.3 '
            f's"\nmin_interval = "0 s"\nrelease_after = "1 h"\n{self.allocation}\n'
            f"[profiling]\nenabled = false\n{self.sections}"
        )
        with (root / "daemon.log").open("ab") as log:
            argv = [sys.executable, "-m", "malletrain", "daemon", "--config", str(config)]
            self.daemon = subprocess.Popen(argv, stdout=log, stderr=log)
        until(self._answers, "the daemon answers")
        self.job = ""
        self.trainings = 1
        self.blockers: list[str] = []

    def _cluster(self) -> ClusterProcess:
        return start_cluster(self.state / "cluster", self.nodes, grace_s=20.0)

    def _answers(self) -> bool:
        with contextlib.suppress(RuntimeError), Connection.of(self.state) as client:
            return bool(client.status())
        return False

    def _submit(
        self,
        name: str,
        script: Path,
        arguments: list[str],
        low: int,
        high: int,
        weight: float,
        mode: str,
    ) -> str:
        spec = messages.JobSpec(
            *(name, "", str(script), str(self.root), sys.executable, tuple(arguments)),
            min_nodes=low,
            max_nodes=high,
            weight=weight,
            mode=mode,
            env=self.env,
            profile=False,
        )
        with Connection.of(self.state) as client:
            return client.submit(spec).id

    def start(self) -> None:
        self.job = self._submit(
            "training", self.script, self.arguments, 1, self.nodes, 1.0, self.mode
        )

    def shrink(self, by: int) -> None:
        self.blockers.append(
            self._submit("blocker", self.root / "blocker.py", [], by, by, 1e6, "restart")
        )

    def grow(self, by: int) -> None:
        with Connection.of(self.state) as client:
            client.cancel(self.blockers)
        self.blockers.clear()

    def lose(self) -> None:
        with Connection.of(self.state) as client:
            node = client.job(self.job).job.nodes[-1]
        for agent in psutil.Process(self.cluster.pid).children():
            if (
                agent.environ().get("MALLETRAIN_NODE") == node
                and "malletrain.agent" in agent.cmdline()
            ):
                agent.kill()

    def recover(self) -> None:
        """Do nothing: the embedded cluster offers the node again by itself."""

    def begin_anew(self) -> None:
        with Connection.of(self.state) as client:
            client.cancel([self.job])
        until(self._all_free, "the nodes are free of the training")
        self.trainings += 1
        self.arguments[-1] = (
            # the other training has a snapshot of its own
            f"{self.root / 'snapshot'}-{self.trainings}"
        )
        self.start()

    def _all_free(self) -> bool:
        with Connection.of(self.state) as client:
            return sum(node.state == "free" for node in client.nodes()) == self.nodes

    def phases(self) -> list[dict[str, float]]:
        with Connection.of(self.state) as client:
            return [dict(rescale.phases) for rescale in client.job(self.job).rescales]

    def last_words(self) -> str:
        return (self.root / "daemon.log").read_text(errors="replace")[-4000:]

    def stop(self) -> None:
        self.daemon.send_signal(signal.SIGTERM)
        try:
            self.daemon.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.daemon.kill()
            self.daemon.wait()
        self.cluster.stop()


class RestartMemory(Restart):
    """Restart mode with snapshots in the memory of the nodes."""

    def __init__(self, root: Path, nodes: int, arguments: list[str]) -> None:
        super().__init__(root, nodes, ["--memory", *arguments])


class RestartCold(Restart):
    """Restart mode with every worker as a new Python process."""

    env: ClassVar[dict[str, str]] = {"MALLETRAIN_PRELOAD": "0"}


class RestartContainer(Restart):
    """Restart mode in a container of Charliecloud, whose image is this machine's own files."""

    def __init__(self, root: Path, nodes: int, arguments: list[str]) -> None:
        image = make_image(root / "image", Path(sys.executable))
        binds = host_binds(root, Path(__file__).parents[1])
        self.sections = (
            f'[containers]\nimage = "{image}"\nruntime = "charliecloud"\n'
            f"binds = {json.dumps(binds)}\n"
        )
        super().__init__(root, nodes, arguments)


class Live(Restart):
    """MalleTrain in live mode."""

    mode = "live"
    script = LIVE_SCRIPT
    env: ClassVar[dict[str, str]] = {"MALLETRAIN_GPU_BACKEND": "gloo"}
    """The virtual nodes of a machine share its GPU."""

    def phases(self) -> list[dict[str, float]]:
        path = self.root / "steps.parts"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


class C10d:
    """Plain torchrun with the c10d rendezvous and its default times."""

    script = SCRIPT
    options: ClassVar[tuple[str, ...]] = ()
    """Additional arguments of torchrun."""

    def __init__(self, root: Path, nodes: int, arguments: list[str]) -> None:
        self.root, self.nodes, self.arguments = root, nodes, arguments
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port = s.getsockname()[1]
        self.running: list[subprocess.Popen[bytes]] = []

    def _one(self) -> None:
        argv = [
            *(
                sys.executable,
                "-m",
                "torch.distributed.run",
                f"--nnodes=1:{self.nodes}",
                "--nproc-per-node=1",
            ),
            *(
                "--rdzv-backend=c10d",
                f"--rdzv-endpoint=127.0.0.1:{self.port}",
                "--rdzv-id=bench",
                "--max-restarts=1000",
            ),
            *(*self.options, str(self.script), *self.arguments),
        ]
        # without this a joiner of a later round waits 60 s for a store that is gone, and fails
        env = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
        with (self.root / "torchrun.log").open("ab") as log:
            self.running.append(subprocess.Popen(argv, env=env, stdout=log, stderr=log))

    def start(self) -> None:
        self._one()
        until(self._listens, "the first torchrun serves the rendezvous")
        for _ in range(self.nodes - 1):
            self._one()

    def _listens(self) -> bool:
        with socket.socket() as s:
            return s.connect_ex(("127.0.0.1", self.port)) == 0

    def shrink(self, by: int) -> None:
        for torchrun in self.running[-by:]:
            torchrun.send_signal(signal.SIGTERM)
        del self.running[-by:]

    def grow(self, by: int) -> None:
        for _ in range(by):
            self._one()

    def lose(self) -> None:
        torchrun = self.running.pop()
        tree = [
            psutil.Process(torchrun.pid),
            *psutil.Process(torchrun.pid).children(recursive=True),
        ]
        for process in tree:
            with contextlib.suppress(psutil.Error):
                process.kill()

    def recover(self) -> None:
        self._one()

    def begin_anew(self) -> None:
        self.stop()
        self.running.clear()
        self.start()

    def phases(self) -> list[dict[str, float]]:
        return []

    def last_words(self) -> str:
        return (self.root / "torchrun.log").read_text(errors="replace")[-4000:]

    def stop(self) -> None:
        for torchrun in self.running:
            tree = (
                psutil.Process(torchrun.pid).children(recursive=True)
                if torchrun.poll() is None
                else []
            )
            torchrun.kill()
            torchrun.wait()
            for process in tree:
                with contextlib.suppress(psutil.Error):
                    process.kill()


CONTENDERS: dict[str, type[Restart] | type[C10d]] = {
    "live": Live,
    "restart": Restart,
    "restart-memory": RestartMemory,
    "restart-cold": RestartCold,
    "restart-container": RestartContainer,
    "c10d": C10d,
}
