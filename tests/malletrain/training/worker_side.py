"""An agent's end of the channel for tests of the training-side library: a real socket and a real
flags file.
"""

import contextlib
import shutil
import socket
import tempfile
from pathlib import Path

from malletrain.protocol.flags import FlagsWriter
from malletrain.protocol.worker_channel import decode_datagram
from malletrain.training import disk_tier, report


class FakeAgent:
    """Receives what this process sends; ``flags`` asks it for snapshots."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp())  # pytest's tmp_path may be too long for a socket
        self.path = str(self.folder / "agent")
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(self.path)
        self.socket.setblocking(False)
        self.flags = FlagsWriter(str(self.folder / "flags"))

    def received(self, kind=None):
        """Everything that has arrived since the last call, of one kind if given."""
        messages = []
        with contextlib.suppress(BlockingIOError):
            while True:
                messages.append(decode_datagram(self.socket.recv(65536)))
        return [message for message in messages if kind is None or isinstance(message, kind)]

    def close(self) -> None:
        self.socket.close()
        self.flags.close()
        shutil.rmtree(self.folder, ignore_errors=True)


@contextlib.contextmanager
def as_worker(monkeypatch, rank=0, world=1, generation=3):
    """Make this process a worker of a job for the while."""
    agent = FakeAgent()
    values = {
        "MALLETRAIN_SOCKET": agent.path,
        "MALLETRAIN_FLAGS": agent.flags.path,
        "MALLETRAIN_JOB": "job-1",
        "MALLETRAIN_GENERATION": str(generation),
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
    }
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    report.forget()
    report.sentence_keys.clear()
    try:
        yield agent
    finally:
        report.forget()
        agent.close()


@contextlib.contextmanager
def as_plain_script(monkeypatch):
    """Make this process an ordinary script outside MalleTrain for the while."""
    for name in (
        "MALLETRAIN_SOCKET",
        "MALLETRAIN_FLAGS",
        "MALLETRAIN_JOB",
        "MALLETRAIN_GENERATION",
        "RANK",
        "WORLD_SIZE",
    ):
        monkeypatch.delenv(name, raising=False)
    report.forget()
    report.sentence_keys.clear()
    try:
        yield
    finally:
        report.forget()


def process_ends():
    """Forget this process's Snapshots: the code that follows acts as another process."""
    disk_tier._in_open_epoch.clear()  # noqa: SLF001
