"""``malletrain check`` and ``malletrain daemon``: configurations that would and would not work."""

import gc
import json
import os
import socket
import sqlite3

import msgspec
import pytest

from malletrain.cli.check import MORE_TESTS
from malletrain.daemon.site.startup import STARTUP
from malletrain.protocol.views import NetworkView
from tests.disks import fill, small_disk


@pytest.fixture
def config(tmp_path):
    """Write a configuration; return its path."""

    def write(daemon="", scheduler='kind = "local"', rest=""):
        path = tmp_path / "site.toml"
        if "state_dir" not in daemon:
            daemon += '\nstate_dir = "state"'
        if "metrics_listen" not in daemon:
            daemon += '\nmetrics_listen = ""'
        path.write_text(f"[daemon]\n{daemon}\n[scheduler]\n{scheduler}\n{rest}\n")
        return path

    return write


def test_good(run, config, tmp_path):
    result = run("check", "--config", config())
    assert result.exit_code == 0, result.stdout + result.stderr
    assert "would not work" not in result.stdout
    assert not (tmp_path / "state").exists()  # nothing was created


def test_a_database_on_a_network_file_system_is_named(run, config, tmp_path, monkeypatch):
    mounts = tmp_path / "mounts"
    mounts.write_text(f"disk / ext4 rw 0 0\nhead:/export {tmp_path} nfs4 rw 0 0\n")
    monkeypatch.setattr("malletrain.store.database.MOUNTS", mounts)
    path = config()
    result = run("check", "--json", "--config", path)
    [row] = [
        f for f in json.loads(result.stdout)["findings"] if "network file system" in f["sentence"]
    ]
    assert row["look"]
    assert "(nfs4)" in row["sentence"]
    mounts.write_text("disk / ext4 rw 0 0\n")
    assert "network file system" not in run("check", "--config", path).stdout


def test_no_lease_of_an_embedded_cluster_is_tried(run, config, tmp_path):
    result = run("check", "--lease", "--config", config())
    assert result.exit_code == 0, result.stdout + result.stderr
    assert "no lease of it was tried" in " ".join(result.stdout.split())
    assert not (tmp_path / "state").exists()


def test_a_lease_that_cannot_be_tried_is_a_failure(run, config, tmp_path, monkeypatch):
    """No command of Slurm is there."""
    monkeypatch.setenv("PATH", str(tmp_path))
    result = run("check", "--lease", "--json", "--config", config(scheduler='kind = "slurm"'))
    assert result.exit_code == 1
    rows = [f for f in json.loads(result.stdout)["findings"] if f["what"] == "lease"]
    assert [f["works"] for f in rows] == [False], rows


def test_a_forward_looking_time_that_lets_no_job_start(run, config):
    path = config(rest='[allocation]\nt_fwd = "10 s"\nstart = "12 s"')
    result = run("check", "--config", path)
    assert result.exit_code == 0, result.stdout
    assert "12 s and plans look 10 s ahead" in " ".join(result.stdout.split())
    data = json.loads(run("check", "--config", path, "--json").stdout)
    assert [f["look"] for f in data["findings"] if f["what"] == "allocation"] == [True]
    assert data["ok"] is True


def test_what_a_node_that_leaves_can_hand_over(run, config):
    timed = config(rest='[jobs]\ndrain_timeout = "1 min"')
    grace = " ".join(run("check", "--config", timed).stdout.split())
    assert "can hand over 1.75 GB" in grace  # the embedded cluster gives 5 s
    drain = config(rest='[jobs]\ndrain_timeout = "2 s"')
    assert "can hand over 700 MB" in " ".join(run("check", "--config", drain).stdout.split())
    without = config(rest="[jobs]\nsnapshot_memory = 0")
    assert "hand over" not in run("check", "--config", without).stdout


def test_jobs_that_will_not_get_it_done_are_named(daemon, run, config):
    status = daemon.answers["status"]
    sentence = "A node that leaves hands over 7 GB, which takes 56 s."
    networks = (NetworkView("default", "By ib0 it goes.", True, 1000.0),)
    daemon.answers["status"] = lambda params: msgspec.structs.replace(
        status(params), late={"j7": sentence}, networks=networks
    )
    path = config(daemon=f'state_dir = "{daemon.state_dir}"')
    data = json.loads(run("check", "--config", path, "--json").stdout)
    rows = [f for f in data["findings"] if f["what"] == "hand-over"]
    assert [(f["look"], f["sentence"]) for f in rows[1:]] == [(True, f"j7: {sentence}")]
    assert "hand over 625 MB" in rows[0]["sentence"]
    assert "125 MB/s, as measured" in rows[0]["sentence"]


def test_json(run, config):
    data = json.loads(run("check", "--config", config(), "--json").stdout)
    assert data["ok"] is True
    assert {f["what"] for f in data["findings"]} == {"configuration"} | {
        name for name, _ in (*STARTUP, *MORE_TESTS)
    }


def test_all_problems_of_the_file_at_once(run, tmp_path):
    path = tmp_path / "bad.toml"
    path.write_text('[daemon]\nstate_dirr = "x"\nheartbeat = "5 MB"\n[scheduler]\nkind = "lsf"\n')
    result = run("check", "--config", path)
    assert result.exit_code == 1
    for words in ("line 2", "state_dirr", "line 3", "5 MB", "line 5", "lsf"):
        assert words in result.stderr
    assert result.stdout == ""


def test_the_daemon_refuses_the_same_file_the_same_way(run, tmp_path):
    path = tmp_path / "bad.toml"
    path.write_text('[daemon]\nstate_dirr = "x"\n[scheduler]\nkind = "local"\n')
    assert run("daemon", "--config", path).stderr == run("check", "--config", path).stderr
    assert gc.isenabled(), "it is disabled during imports only"


def test_a_node_class_of_two_trainers_is_refused_by_check_and_daemon(run, tmp_path):
    path = tmp_path / "site.toml"
    path.write_text(
        '[scheduler]\nkind = "local"\n'
        '[[trainer]]\nname = "gpus"\nusers = ["ann"]\nnode_classes = ["h100", "a100"]\n'
        '[[trainer]]\nname = "urgent"\nnode_classes = ["a100"]\n'
    )
    for command in ("check", "daemon"):
        result = run(command, "--config", path)
        assert (result.exit_code, result.stdout) == (1, "")
        assert result.stderr.splitlines() == [
            f"{path}: 1 problem.",
            '  line 9: trainer.1.node_classes: "a100" is in node_classes of the trainers "gpus" '
            'and "urgent"; leave it in one of them.',
        ]


def test_missing_file(run, tmp_path):
    result = run("check", "--config", tmp_path / "none.toml")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "cannot be read" in result.stderr


def findings(run, path):
    result = run("check", "--config", path, "--json")
    return result.exit_code, {
        f["sentence"]: f["works"] for f in json.loads(result.stdout)["findings"]
    }


def test_address_in_use(run, config):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, works_by_sentence = findings(
            run, config(f'listen = "tcp://127.0.0.1:{port}"\nmetrics_listen = "127.0.0.1:{port}"')
        )
    assert code == 1
    assert (
        sum(
            "cannot be listened on" in sentence
            for sentence, works in works_by_sentence.items()
            if not works
        )
        == 2
    )


def test_state_directory_is_a_file(run, config, tmp_path):
    (tmp_path / "state").write_text("")
    code, works_by_sentence = findings(run, config())
    assert code == 1
    assert any("is not a directory" in sentence for sentence in works_by_sentence)


def test_state_directory_on_a_full_disk(run, config, tmp_path):
    path = config(f'state_dir = "{tmp_path / "disk" / "state"}"')
    (tmp_path / "disk").mkdir()
    with small_disk(tmp_path / "disk"):
        assert findings(run, path)[0] == 0
        fill(tmp_path / "disk")
        code, works_by_sentence = findings(run, path)
    assert code == 1
    assert any(
        "No space left on device); make room there, or" in sentence
        for sentence in works_by_sentence
    )


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_state_directory_not_writable(run, config):
    code, works_by_sentence = findings(run, config('state_dir = "/proc/none/state"'))
    assert code == 1
    assert any("cannot be created" in sentence for sentence in works_by_sentence)


def test_open_to_others(run, config, tmp_path):
    (tmp_path / "state" / "keys").mkdir(parents=True)
    (tmp_path / "state").chmod(0o755)
    (tmp_path / "state" / "keys").chmod(0o755)
    code, works_by_sentence = findings(run, config())
    assert code == 1
    assert sum("Others may enter" in sentence for sentence in works_by_sentence) == 2


def test_where_everybody_may_write_no_daemon_starts(run, config, tmp_path):
    (tmp_path / "state").mkdir(mode=0o700, exist_ok=True)
    (tmp_path / "state").chmod(0o777)
    for command in ("check", "daemon"):
        result = run(command, "--config", str(config()))
        assert result.exit_code == 1
        assert "chmod 700" in result.output


def test_database_that_is_none(run, config, tmp_path):
    (tmp_path / "state").mkdir(mode=0o700)
    (tmp_path / "state" / "malletrain.db").write_text(
        "this is no database, whatever its name says" * 50
    )
    code, works_by_sentence = findings(run, config())
    assert code == 1
    assert any(
        "cannot be opened" in sentence or "not a database" in sentence
        for sentence, works in works_by_sentence.items()
        if not works
    )


def test_database_of_a_later_version(run, config, tmp_path):
    (tmp_path / "state").mkdir(mode=0o700)
    with sqlite3.connect(tmp_path / "state" / "malletrain.db") as connection:
        connection.execute("CREATE TABLE alembic_version (version_num VARCHAR(32))")
        connection.execute("INSERT INTO alembic_version VALUES ('9999')")
    connection.close()
    code, works_by_sentence = findings(run, config())
    assert code == 1
    assert any(
        "later malletrain" in sentence for sentence, works in works_by_sentence.items() if not works
    )


def test_no_cluster_and_none_to_be_started(run, config):
    code, works_by_sentence = findings(run, config(rest="[scheduler.local]\nautostart = false"))
    assert code == 1
    assert any(
        "python -m scavenger.embedded" in sentence
        for sentence, works in works_by_sentence.items()
        if not works
    )


IMPOSSIBLE = {
    "a trace that is not there": ("", 'trace = "none.csv"', "none.csv"),
    "a trace that is none": ("", 'trace = "site.toml"', "Correct trace in [scheduler.local]"),
    "a state directory nowhere": ('state_dir = "/proc/none/state"', "", "/proc/none"),
    "a state directory in a file": ('state_dir = "site.toml/state"', "", "site.toml"),
    "a database nowhere": ('database = "sqlite:////proc/none/db"', "", "/proc/none"),
    "a database of no kind": ('database = "nosql://x"', "", "nosql://x"),
}


@pytest.mark.parametrize(("daemon", "local", "word"), IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_what_keeps_the_daemon_from_starting_is_found_before(run, config, daemon, local, word):
    """In the same words, and nothing is left behind by the look."""
    path = config(daemon, rest=f"[scheduler.local]\n{local}" if local else "")
    before = sorted(path.parent.iterdir())
    code, works_by_sentence = findings(run, path)
    wrong = [sentence for sentence, works in works_by_sentence.items() if not works]
    assert code == 1
    assert any(word in sentence for sentence in wrong), wrong
    assert sorted(path.parent.iterdir()) == before
    started = run("daemon", "--config", path)
    assert started.exit_code == 1
    lines = [line.removeprefix("malletraind: ") for line in started.stderr.splitlines()]
    assert lines, started.stdout
    assert set(lines) <= set(wrong)


def test_with_a_daemon_at_work(run, config, daemon):
    port = daemon.info.endpoint.rpartition(":")[2]
    code, works_by_sentence = findings(run, config(f'listen = "tcp://127.0.0.1:{port}"'))
    assert any("in use by that daemon" in sentence for sentence in works_by_sentence)
    assert code == 0
