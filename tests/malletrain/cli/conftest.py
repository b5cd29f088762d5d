"""A fake daemon per test, and the command line called as a person calls it (in this process, for
speed).
"""

import pytest

from malletrain.cli import main
from tests.command_runner import CliRunner
from tests.malletrain.cli.fake_daemon import FakeDaemon, default_answers


@pytest.fixture
def daemon(tmp_path):
    """A fake daemon with one running job; change ``daemon.answers`` as needed."""
    fake = FakeDaemon(tmp_path / "state", default_answers())
    yield fake
    fake.stop()


@pytest.fixture
def run(tmp_path, monkeypatch):
    """``run("status", "--json")``: exit code, stdout and stderr of one command against the state
    directory of this test.
    """
    monkeypatch.setenv("MALLETRAIN_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.delenv("MALLETRAIN_DEBUG", raising=False)
    monkeypatch.setenv("COLUMNS", "200")

    def call(*words, **options):
        return CliRunner().invoke(main, [str(w) for w in words], prog_name="malletrain", **options)

    return call
