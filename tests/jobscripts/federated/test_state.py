"""The state after each round: one file, one server."""

from __future__ import annotations

import signal
import subprocess
import sys
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from fedcase.state import FILE, LOCK, StateFolder, TrainingStateError, end_holder, last_round, load
from fedcase.training_state import RoundRecord, new_state

from tests.jobscripts.federated.flower_environment import environment


def rounds(*numbers):
    return [RoundRecord(n, (1, 2), 0.5, 1.0 / n, 3.0, n % 2) for n in numbers]


def state(*numbers):
    one = new_state({"w": np.arange(4.0), "b/1": np.float32(2)}, [10, 20, 30], Random(5))
    one.records[1] = replace(one.records[1], rounds=2, loss=0.25, last_round=2)
    one.rule = {"means": [[0.5, 1.0]]}
    one.rounds = rounds(*numbers)
    return one


def test_a_state_is_read_as_it_was_written(tmp_path):
    with StateFolder(tmp_path / "new") as folder:
        assert folder.load() is None
        assert last_round(folder.path) is None
        before = state()
        before.random.random()
        folder.save(before)
        after = folder.load()
        assert after.round == 0
        assert after.records == before.records
        assert after.rule == before.rule
        assert list(after.arrays) == ["w", "b/1"]
        np.testing.assert_array_equal(after.arrays["w"], np.arange(4.0))
        assert after.arrays["b/1"].dtype == np.float32
        # The next draws are the same.
        assert after.random.random() == before.random.random()
        folder.save(state(1))
        assert load(tmp_path / "new").rounds == rounds(1)


def test_a_round_counts_once(tmp_path):
    with StateFolder(tmp_path) as folder:
        folder.save(state())
        folder.save(state(1))
        for numbers in [(1,), (1, 2, 3), ()]:
            with pytest.raises(TrainingStateError, match="the last one there is round 1"):
                folder.save(state(*numbers))
        folder.save(state(1, 2))
        assert load(tmp_path).round == last_round(tmp_path) == 2


def test_one_server_at_a_time(tmp_path):
    other = StateFolder(tmp_path)
    with (
        StateFolder(tmp_path),
        pytest.raises(TrainingStateError, match="Another server trains with"),
    ):
        other.__enter__()
    with StateFolder(tmp_path) as folder:
        assert folder.load() is None


def test_the_run_of_a_dead_superlink_is_ended(tmp_path):
    code = (
        "import sys, time; from pathlib import Path; from fedcase.state import lock; "
        "lock(Path(sys.argv[1])); print('locked', flush=True); time.sleep(3600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / LOCK)],
        env=environment(),
        stdout=subprocess.PIPE,
    ) as process:
        process.stdout.readline()
        end_holder(tmp_path / LOCK)
        assert process.wait() == -signal.SIGKILL
    end_holder(tmp_path / LOCK)  # nobody has it
    with StateFolder(tmp_path) as folder:
        assert folder.load() is None


def test_what_a_kill_leaves_of_a_write_is_not_read(tmp_path):
    with StateFolder(tmp_path) as folder:
        folder.save(state())
        (tmp_path / f".{FILE}-123").write_bytes(b"PK")
        assert folder.load().round == 0


@pytest.mark.parametrize("content", [b"", b"PK", b"nonsense" * 100])
def test_a_damaged_state_is_an_error_with_its_path(tmp_path, content):
    (tmp_path / FILE).write_bytes(content)
    with pytest.raises(TrainingStateError, match=f"{FILE} cannot be read"):
        load(tmp_path)
    with pytest.raises(TrainingStateError, match=f"{FILE} cannot be read"):
        last_round(tmp_path)
