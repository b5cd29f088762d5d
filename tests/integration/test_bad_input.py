"""What goes wrong in practice, each tried on a running site: the sender gets a sentence, the daemon
goes on, nothing is lost.
"""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
import zmq

from malletrain.client import ClientError
from malletrain.identity.keys import read_key
from malletrain.identity.state_directory import INFO, read_daemon_info
from malletrain.protocol import messages, wire
from tests.waiting import PATIENCE_S

PATIENCE_MS = int(PATIENCE_S * 1000)
SHORT = "import malletrain\nfor _ in range(50): malletrain.report(1)\n"


@pytest.mark.thorough
def test_a_script_that_crashes_at_import_fails_with_its_last_words(embedded):
    script = embedded.script(
        "crash.py", "print('loading', flush=True)\nimport no_such_module_of_mine\n"
    )
    job = embedded.submit(script)
    failed = embedded.until_state(job, "failed", "completed")
    assert failed.state == "failed"
    assert failed.tries == 2
    assert "no_such_module_of_mine" in failed.reason
    failure = embedded.show(job).failure
    assert failure.startswith("Rank 0 exited with code 1: ModuleNotFoundError")
    assert "\n[rank 0]\n" in failure
    assert "ModuleNotFoundError" in failure


def test_a_crash_on_one_rank_is_told_with_the_words_of_that_rank(shared):
    script = shared.script(
        "one.py",
        "import os, time, torch, torch.distributed as dist, malletrain\n"
        "dist.init_process_group('gloo')\n"
        "for step in range(1000):\n"
        "    dist.all_reduce(torch.ones(1))\n"
        "    malletrain.report(1)\n"
        "    if step == 20 and dist.get_rank() == 1: raise ValueError('rank one has had enough')\n"
        "    time.sleep(0.01)\n",
    )
    job = shared.submit(script, nodes=(2, 2))
    assert shared.until_state(job, "failed", "completed").state == "failed"
    failure = shared.show(job).failure
    assert failure.startswith("Rank 1 exited with code 1: ValueError: rank one has had enough")
    assert "\n[rank 1]\n" in failure
    assert "rank one has had enough" in failure
    assert [e.data["exit_code"] for e in shared.events("workers-failed", job)] == [1, 1]


def test_a_setup_that_fails_everywhere_fails_the_job(embedded):
    script = embedded.script("short.py", SHORT)
    job = embedded.submit(script, setup="echo no such environment >&2; exit 3")
    failed = embedded.until_state(job, "failed", "completed")
    assert failed.state == "failed"
    assert "no such environment" in embedded.show(job).failure


def test_a_job_that_never_reports_progress_runs_and_completes(shared):
    script = shared.script("silent.py", "print('quiet')\n")
    job = shared.submit(script, nodes=(1, 2))
    done = shared.until_state(job, "failed", "completed")
    assert done.state == "completed"
    assert done.samples == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"script": "/no/such/script.py"}, "sees no file /no/such/script.py"),
        ({"script": "train.py"}, "sees no file"),
        ({"workdir": "/no/such/place"}, "sees no directory"),
        ({"min_nodes": 5, "max_nodes": 2}, "MIN:MAX"),
        ({"min_nodes": 0, "max_nodes": 0}, "MIN:MAX"),
        ({"nproc_per_node": -1}, "processes a node"),
        ({"weight": -1.0}, "weight"),
        ({"weight": float("nan")}, "weight"),
        ({"goal": "fame"}, "throughput or efficiency"),
        ({"curve": {"1": float("nan")}}, "finite"),
        ({"curve": {"one": 1.0}}, "one"),
        ({"launcher": "mpirun"}, "builtin or torchrun"),
        ({"name": "a\nb"}, "printable"),
    ],
)
def test_a_job_that_makes_no_sense_is_refused_with_a_sentence(refusing, changes, words):
    script = refusing.script("short.py", SHORT)
    fields = {
        "name": "job",
        "owner": "",
        "script": str(script),
        "workdir": str(refusing.work),
        "python": sys.executable,
    }
    with refusing.client() as client, pytest.raises(ClientError, match=words) as refused:
        client.submit(messages.JobSpec(**{**fields, **changes}))
    assert refused.value.code == "usage"


@pytest.fixture
def refusing(standing):
    """The module's site, which is only asked things it refuses."""
    return standing


def _stranger(made):
    info = read_daemon_info(made.state / INFO)
    pair = read_key(made.state / "keys" / "client.key")
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.curve_publickey, socket.curve_secretkey = pair.public.encode(), pair.secret.encode()
    socket.curve_serverkey = info.server_key.encode()
    socket.linger, socket.rcvtimeo, socket.sndtimeo = 0, PATIENCE_MS, PATIENCE_MS
    socket.connect(info.endpoint)
    return socket


@pytest.mark.parametrize(
    ("frames", "words"),
    [
        ([b"MT1", b"\xff\xfe garbage"], "not valid msgpack|does not fit"),
        ([b"MT9", b""], "use the malletrain version"),
        ([b"one frame"], "2 frames"),
        ([b"MT1", b"x" * (wire.MAX_MESSAGE_BYTES + 1)], "the limit is"),
        ([b"MT1", wire.encode(messages.Heartbeat("x"))[1]], "may not send Heartbeat"),
        ([b"MT1", b"\x82\xa4type\xa7request\xa2id\x01"], "does not fit"),
    ],
)
def test_a_message_that_is_none_costs_its_sender_an_error(refusing, frames, words):
    import re

    socket = _stranger(refusing)
    socket.send_multipart(frames)
    answer = wire.decode(socket.recv_multipart())
    assert isinstance(answer, messages.Error)
    assert re.search(words, answer.sentence)
    socket.close()
    assert refusing.answers()


def test_an_enormous_message_is_cut_off_and_the_daemon_goes_on(refusing):
    socket = _stranger(refusing)
    socket.send_multipart([b"MT1", b"x" * (17 * 1024 * 1024)])
    refusing.until(refusing.answers, "the daemon still answers")
    socket.close()


def test_an_unknown_operation_is_refused(refusing):
    with (
        refusing.client() as client,
        pytest.raises(ClientError, match="knows no operation 'explode'"),
    ):
        client.call("explode")


def test_a_second_daemon_on_the_state_directory_refuses(refusing):
    argv = [sys.executable, "-m", "malletrain", "daemon", "--config", str(refusing.config)]
    second = subprocess.run(argv, capture_output=True, text=True)
    assert second.returncode == 1
    assert f"pid {refusing.daemon.pid}" in second.stderr
    assert "Traceback" not in second.stderr
    assert refusing.answers()


def test_the_command_line_says_how_to_start_a_daemon_that_is_not_there(tmp_path):
    argv = [sys.executable, "-m", "malletrain", "status", "--state-dir", str(tmp_path)]
    result = subprocess.run(argv, capture_output=True, text=True)
    assert result.returncode == 1
    assert "malletrain daemon --config" in result.stderr


@pytest.mark.thorough
def test_a_daemon_whose_store_breaks_ends_with_a_sentence_and_the_job_goes_on(embedded):
    script = embedded.script(
        "steady.py",
        "import time, malletrain\nwhile True:\n    time.sleep(0.02)\n    malletrain.report(1)\n",
    )
    job = embedded.submit(script)
    embedded.until_samples(job, 20)
    worker = embedded.workers(script)[0]
    embedded.kill_daemon(signal.SIGKILL)
    database = embedded.state / "malletrain.db"
    content = database.read_bytes()
    for extra in ("-wal", "-shm"):
        (database.parent / (database.name + extra)).unlink(missing_ok=True)
    database.write_bytes(b"this is no database at all" * 100)
    argv = [sys.executable, "-m", "malletrain", "daemon", "--config", str(embedded.config)]
    broken = subprocess.run(argv, capture_output=True, text=True)
    assert broken.returncode == 1
    assert "Traceback" not in broken.stderr
    assert "malletrain.db" in broken.stderr
    assert worker.is_running()
    database.write_bytes(content)
