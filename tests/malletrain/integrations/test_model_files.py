"""Files of Lightning's ModelCheckpoint over rounds: a step that comes again overwrites its file."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from malletrain.integrations.lightning_rounds import ModelFiles
from malletrain.training import owner


class Saver:
    """Chooses names as ModelCheckpoint does."""

    def __init__(self, folder):
        self.folder = folder

    def file_exists(self, filepath, trainer):
        return (self.folder / filepath).exists()

    def save(self, trainer, name):
        path, version = self.folder / f"{name}.ckpt", 0
        while self.file_exists(str(path), trainer):
            version += 1
            path = self.folder / f"{name}-v{version}.ckpt"
        path.touch()
        return path.name


class Round:
    """One round of a job's training."""

    def __init__(self, folder, number, monkeypatch, job="j1"):
        monkeypatch.setenv("MALLETRAIN_JOB", job)
        monkeypatch.setenv("MALLETRAIN_GENERATION", str(number))
        self.saver = Saver(folder)
        self.trainer = SimpleNamespace(
            checkpoint_callbacks=[self.saver], loggers=[], is_global_zero=True
        )
        self.files = ModelFiles(str(folder / "states"), owner.this_run())
        self.files.begin(self.trainer)
        self.files.record(self.trainer)

    def save(self, *names):
        return [self.saver.save(self.trainer, name) for name in names]


@pytest.fixture
def begin(tmp_path, monkeypatch):
    return lambda number, job="j1": Round(tmp_path, number, monkeypatch, job)


def test_a_step_that_comes_again_overwrites_its_file(begin):
    first = begin(1)
    first.save("step=2")
    checkpoint = first.files.written()
    first.save("step=4", "step=6")
    second = begin(2)
    second.files.resume(checkpoint)
    assert second.save("step=4") == ["step=4.ckpt"]
    third = begin(3)  # lost before step 6 came again; goes on from the same checkpoint
    third.files.resume(checkpoint)
    assert third.save("step=4", "step=6", "step=8") == [f"step={n}.ckpt" for n in (4, 6, 8)]


def test_a_name_that_the_training_uses_twice_has_versions_as_without_a_loss(begin):
    first = begin(1)
    assert first.save("best", "best") == ["best.ckpt", "best-v1.ckpt"]
    checkpoint = first.files.written()
    first.save("best")
    second = begin(2)
    second.files.resume(checkpoint)
    assert second.save("best", "best") == ["best-v2.ckpt", "best-v3.ckpt"]


def test_without_a_checkpoint_all_comes_again(begin):
    begin(1).save("step=2", "step=4")
    assert begin(2).save("step=2", "step=4", "step=4") == [
        *("step=2.ckpt", "step=4.ckpt", "step=4-v1.ckpt"),
    ]


def test_files_of_others_are_not_overwritten(begin):
    begin(1).save("step=2")
    assert begin(2, job="j2").save("step=2") == ["step=2-v1.ckpt"]
    assert begin(1, job="").save("step=2") == ["step=2-v2.ckpt"]
    assert begin(1, job="").save("step=2") == ["step=2-v3.ckpt"]
