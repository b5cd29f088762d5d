"""Files of users on a file system that does not answer. It is imitated: calls that name its folder
wait until the test lets it answer.
"""

from __future__ import annotations

import os
import threading

import pytest

from malletrain.daemon.jobs import user_files
from malletrain.daemon.jobs.admission import problem_of
from malletrain.daemon.jobs.curves import Curves
from malletrain.protocol import messages
from tests.waiting import NEVER_S, PATIENCE_S, until


class Hanging:
    """A file system below ``folder``."""

    def __init__(self, folder, monkeypatch) -> None:
        self.folder = str(folder)
        self._monkeypatch = monkeypatch
        self.answers = threading.Event()
        self.calls = 0
        monkeypatch.setattr(user_files, "ANSWER_S", 0.05)
        for module, name in ((os, "open"), (os.path, "isfile"), (os.path, "isdir")):
            monkeypatch.setattr(module, name, self._waiting(getattr(module, name)))

    def answer(self) -> None:
        """Answer from now on. However long that takes, an answer is one."""
        self._monkeypatch.setattr(user_files, "ANSWER_S", NEVER_S)
        self.answers.set()

    def _waiting(self, call):
        def waiting(path, *arguments, **options):
            if str(path).startswith(self.folder):
                self.calls += 1
                assert self.answers.wait(PATIENCE_S)
            return call(path, *arguments, **options)

        return waiting


@pytest.fixture
def hanging(tmp_path, monkeypatch):
    (tmp_path / "nfs").mkdir()
    made = Hanging(tmp_path / "nfs", monkeypatch)
    yield made
    made.answer()
    for thread in list(user_files._unanswered.values()):  # noqa: SLF001
        thread.join(PATIENCE_S)
    assert user_files.is_folder(str(tmp_path))
    assert not user_files._unanswered  # noqa: SLF001


def in_time(call):
    """What ``call`` returns, in a thread that the test does not wait for without a limit."""
    results = []
    thread = threading.Thread(target=lambda: results.append(call()), daemon=True)
    thread.start()
    thread.join(PATIENCE_S / 4)
    assert results, "it waits for the file system"
    return results[0]


def spec_in(folder):
    script = f"{folder}/train.py"
    return messages.JobSpec("a", "ada", script, f"{folder}/work", "python", goal="throughput")


def test_a_submission_does_not_wait_for_a_file_system_that_hangs(hanging):
    """The client has seen the files; the daemon served nobody meanwhile."""
    assert in_time(lambda: problem_of(spec_in(hanging.folder))) == ""


def test_a_job_whose_script_does_not_come_has_a_key_all_the_same(hanging):
    spec = spec_in(hanging.folder)
    key = in_time(lambda: Curves.key_of(spec, "default"))
    assert len(key) == 32
    assert in_time(lambda: Curves.key_of(spec, "default")) == key
    assert hanging.calls == 1, "a folder that does not answer is not asked again"


def test_a_file_system_that_answers_again_is_asked_again(hanging, tmp_path):
    script = tmp_path / "nfs" / "train.py"
    assert user_files.is_file(str(script))
    hanging.answer()
    until(lambda: not user_files.is_file(str(script)), "there is no such file")
    script.write_text("1")
    assert user_files.is_file(str(script))
    assert user_files.read_script(str(script)) == b"1"


def test_when_too_many_folders_do_not_answer_none_is_asked(hanging):
    for number in range(user_files.MAX_UNANSWERED + 3):
        assert user_files.is_file(f"{hanging.folder}/{number}/train.py")
    assert hanging.calls == user_files.MAX_UNANSWERED


def test_the_sentences_are_those_of_before(tmp_path, monkeypatch):
    monkeypatch.setattr(user_files, "ANSWER_S", NEVER_S)
    missing = spec_in(tmp_path)
    assert "sees no file" in problem_of(missing)
    (tmp_path / "train.py").touch()
    assert "sees no directory" in problem_of(missing)
