"""``malletrain reload`` and SIGHUP: what a running daemon takes over of its configuration."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys

from malletrain.client import Connection
from tests import waiting

SITE = """
[daemon]
state_dir = "state"
metrics_listen = ""
{daemon}
[scheduler]
kind = "local"
[scheduler.local]
autostart = false
[jobs]
{jobs}
"""


def reloaded(state):
    """What the command says, and its exit status."""
    argv = [sys.executable, "-m", "malletrain", "reload", "--state-dir", str(state)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_a_daemon_reads_its_configuration_again(tmp_path):
    config, state = tmp_path / "site.toml", tmp_path / "state"
    config.write_text(SITE.format(daemon="", jobs=""))
    argv = [sys.executable, "-m", "malletrain", "daemon", "--config", str(config)]
    daemon = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True)

    def answers():
        assert daemon.poll() is None
        with contextlib.suppress(RuntimeError), Connection.of(state) as client:
            return client.status().pid == daemon.pid

    def events():
        with Connection.of(state) as client:
            return [e for e in client.events(limit=1000) if e.kind == "configuration-reloaded"]

    try:
        waiting.until(answers, "the daemon answers", 0.05)
        config.write_text(SITE.format(daemon='heartbeat = "2 s"', jobs="max_running = 7"))
        status, output = reloaded(state)
        assert status == 0
        assert "Applied:\n  jobs.max_running: 20 -> 7\n" in output
        assert "Needs a restart of the daemon:\n  daemon.heartbeat: 1 s -> 2 s\n" in output

        # What waits for a restart is in the next event again; what was applied is not.
        daemon.send_signal(signal.SIGHUP)
        waiting.until(lambda: len(events()) == 2, "it was read again", 0.05)
        changes = events()[-1].data["changes"]
        assert changes == {
            "applied": [],
            "next_jobs": [],
            "restart": ["daemon.heartbeat: 1 s -> 2 s"],
        }

        # A bad file changes nothing, by whichever way.
        config.write_text(SITE.format(daemon="", jobs='max_running = "many"\nmax_trys = 3'))
        status, output = reloaded(state)
        assert status == 1
        assert "Nothing has changed." in output
        assert "max_running" in output
        assert "max_tries" in output
        daemon.send_signal(signal.SIGHUP)
        assert daemon.stderr is not None
        lines = (line for line in daemon.stderr if "not reloaded" in line)
        assert "max_tries" in next(lines)
        assert "SIGHUP" in next(lines)
        assert len(events()) == 2
        daemon.terminate()
        assert daemon.wait(waiting.PATIENCE_S) == 0
    finally:
        daemon.kill()
        daemon.wait()
        assert daemon.stderr is not None
        daemon.stderr.close()
