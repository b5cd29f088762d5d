"""What answers to the names of PBS's commands."""

import pytest

from scavenger.batch.commands import CommandPolicy, Commands
from scavenger.interface import SchedulerError
from scavenger.pbs.site import ask_site
from tests.scavenger.batch.fake_tools import FakeTools
from tests.waiting import PATIENCE_S

REFUSES = 'echo "qstat: invalid option -- F" >&2; echo "usage: qstat [-f [-1]] [-x]" >&2; exit 2;;'


@pytest.fixture
def answer(tmp_path):
    """The error for a qstat that does not know -F and prints this for --version."""

    def failure(version: str) -> str:
        tools = FakeTools(tmp_path / "bin", ("qstat", "qmgr"))
        tools.runs("qstat", f'case "$*" in *--version*) {version} exit 0;; *) {REFUSES} esac')
        commands = Commands(CommandPolicy(PATIENCE_S, 1, 0.0), tools.environment)
        with pytest.raises(SchedulerError) as error:
            ask_site(commands)
        return str(error.value)

    return failure


@pytest.mark.parametrize(
    ("version", "named"),
    [
        ('echo "Version: 6.1.2"; echo "Commit: 661e0925";', "6.1.2"),
        ('echo "version: 2.5.13" >&2;', "2.5.13"),
    ],
)
def test_torque_is_named_and_what_it_lacks(answer, version, named):
    sentence = answer(version)
    assert sentence.startswith(f"This is Torque {named}, which MalleTrain does not support: ")
    assert "18.1" in sentence


@pytest.mark.parametrize("version", ['echo "pbs_version = 23.06.06";', ":;"])
def test_another_failure_is_told_in_its_own_words(answer, version):
    sentence = answer(version)
    assert "Torque" not in sentence
    assert "invalid option" in sentence
