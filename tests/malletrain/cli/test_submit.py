"""``malletrain submit`` and ``cancel``: what is sent, and what is refused before anything is
sent.
"""

import json
import os
import re
import sys
from pathlib import Path

import msgspec
import pytest

from malletrain.cli.submit import EQUIVALENTS
from malletrain.identity.keys import user_name
from malletrain.submission.curve_file import read_curve
from malletrain.submission.error import SpecError
from malletrain.submission.resuming import snapshot_paths
from malletrain.submission.spec import parse_env, parse_nodes
from tests.malletrain.cli.fake_daemon import Refuse, detail, job_view


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "my train.py"
    path.write_text("print('hi')\n")
    return path


def spec_of(daemon):
    ((_, params),) = [seen for seen in daemon.seen if seen[0] == "submit"]
    return params["spec"]


def test_defaults(run, daemon, script, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    result = run("submit", script.name)
    assert result.exit_code == 0, result.stderr
    assert "Submitted my-train as job j1" in result.stdout
    sent = spec_of(daemon)
    assert sent["script"] == str(script)
    assert sent["workdir"] == str(tmp_path)
    assert sent["python"] == sys.executable
    assert sent["owner"] == user_name()
    assert "min_nodes" not in sent  # defaults are left out of the message


def test_everything(run, daemon, script, tmp_path, monkeypatch):
    monkeypatch.setenv("PASSED", "on")
    curve = tmp_path / "curve.csv"
    curve.write_text("nodes,samples_per_s\n1,100\n4,310.5\n")
    result = run(
        "submit",
        "--name",
        "abl-3",
        "--nodes",
        "2:8",
        "--nproc-per-node",
        4,
        "--weight",
        2.5,
        "--goal",
        "efficiency",
        "--curve",
        curve,
        "--setup",
        "module load cuda",
        "--env",
        "A=1=2",
        "--env",
        "PASSED",
        "--workdir",
        tmp_path,
        "--launcher",
        "torchrun",
        "--json",
        script,
        "--nodes",
        "9",
        "--lr",
        "0.1",
        "--",
        "-x",
    )
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["name"] == "abl-3"
    sent = spec_of(daemon)
    assert (sent["min_nodes"], sent["max_nodes"], sent["nproc_per_node"], sent["weight"]) == (
        2,
        8,
        4,
        2.5,
    )
    assert sent["args"] == ["--nodes", "9", "--lr", "0.1", "--", "-x"]  # untouched, options and all
    assert sent["env"] == {"A": "1=2", "PASSED": "on", "MALLETRAIN_UMASK": "0022"}
    assert sent["curve"] == {"1": 100.0, "4": 310.5}
    assert (sent["setup"], sent["goal"], sent["launcher"]) == (
        "module load cuda",
        "efficiency",
        "torchrun",
    )


def test_the_size_of_a_model(run, daemon, script):
    assert run("submit", "--model-size", "25.6e6,1.2e10", script).exit_code == 0
    sent = spec_of(daemon)
    assert (sent["parameters"], sent["flops"]) == (25.6e6, 1.2e10)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4", (4, 4)),
        ("1:16", (1, 16)),
        (" 2 : 3 ", (2, 3)),
        ("1:1", (1, 1)),
        ("100000", (10**5, 10**5)),
    ],
)
def test_nodes_accepted(text, expected):
    assert parse_nodes(text) == expected


@pytest.mark.parametrize(
    "text",
    ["0:0", "0", "5:2", "x", "", "1:", ":4", "-1", "1:2:3", "1.5", "0:4", "1000001", "١", "9" * 50],
)
def test_nodes_refused(run, script, text):
    """Refused without a daemon: nothing was asked."""
    result = run("submit", f"--nodes={text}", script)
    assert result.exit_code == 2
    assert "accepted is N or MIN:MAX" in result.stderr
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("name", ["missing.py", "."])
def test_script_must_be_a_file(run, daemon, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    result = run("submit", name)
    assert result.exit_code == 2
    assert str(tmp_path) in result.stderr
    assert "give the path of a Python file" in result.stderr
    assert daemon.seen == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_unreadable_script(run, script):
    script.chmod(0)
    assert "cannot be read" in run("submit", script).stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--name", "../x"], "is no name of a job"),
        (["--name", "a" * 65], "is no name of a job"),
        (["--weight", "0"], "above 0"),
        (["--weight", "nan"], "above 0"),
        (["--nproc-per-node", "-1"], "1 or more"),
        (["--nproc-per-node", "0"], "Leave --nproc-per-node out for one on each GPU"),
        (["--name", "j1"], '"j1" looks like the id of a job'),
        (["--name", "j007"], "looks like the id of a job"),
        (["--env", "9X=1"], "NAME=VALUE"),
        (["--env", "NOT_SET_ANYWHERE_1"], "is not set here"),
        (["--workdir", "/does/not/exist"], "does not exist"),
        (["--goal", "speed"], "efficiency"),
        (["--model-size", "large"], "is no size of a model"),
        (["--model-size", "1e6,0"], "is no size of a model"),
        (["--nods", "4"], "No such option"),
        (["--curve", "/does/not/exist"], "cannot be read"),
    ],
)
def test_bad_options(run, daemon, script, options, words):
    result = run("submit", *options, script)
    assert result.exit_code == 2
    assert words in result.stderr
    assert daemon.seen == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("nodes,samples_per_s\n# measured\n4, 300\n1, 100.5\n", {"1": 100.5, "4": 300.0}),
        ('{"1": 100.5, "4": 300}', {"1": 100.5, "4": 300.0}),
        ("[[4, 300], [1, 100.5]]", {"1": 100.5, "4": 300.0}),
    ],
)
def test_curve_forms(tmp_path, text, expected):
    path = tmp_path / "c"
    path.write_text(text)
    assert read_curve(path) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nodes,samples_per_s\n",
        "a,b\n1,2\n",
        "nodes,samples_per_s\n1\n",
        "nodes,samples_per_s\n1,x\n",
        "nodes,samples_per_s\n0,1\n",
        "nodes,samples_per_s\n1,-1\n",
        "nodes,samples_per_s\n1,nan\n",
        "nodes,samples_per_s\n1.5,3\n",
        "nodes,samples_per_s\n1,2\n1,3\n",
        "{",
        "[1, 2]",
        '{"a": 1}',
        '{"1": true}',
        "[[1e400, 1]]",
        '{"nan": 1}',
        "[" * 10000,
    ],
)
def test_curve_refused(tmp_path, text):
    path = tmp_path / "c"
    path.write_text(text)
    with pytest.raises(SpecError):
        read_curve(path)


def test_curve_binary(tmp_path):
    path = tmp_path / "c"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SpecError, match="not a text file"):
        read_curve(path)


def test_env_empty_value():
    assert parse_env(["A="]) == {"A": ""}


def test_refused_by_the_daemon(run, daemon, script):
    def refuse(params):
        raise Refuse("The daemon has no room for another job.")

    daemon.answers["submit"] = refuse
    result = run("submit", script)
    assert result.exit_code == 1
    assert result.stderr == "The daemon has no room for another job.\n"


def test_usage_found_by_the_daemon(run, daemon, script):
    def refuse(params):
        raise Refuse("The weight is too large.", "usage")

    daemon.answers["submit"] = refuse
    assert run("submit", script).exit_code == 2


def test_cancel(run, daemon):
    result = run("cancel", "j1", "train")
    assert result.exit_code == 0
    assert result.stdout == "Cancelled j1.\nCancelled train.\n"
    assert daemon.seen[0] == ("cancel", {"jobs": ["j1", "train"]})


def test_cancel_partly_refused(run, daemon):
    daemon.answers["cancel"] = lambda p: {
        "results": [
            {"job": "a", "ok": True, "sentence": "Cancelled a."},
            {"job": "b", "ok": False, "sentence": "There is no job b."},
        ]
    }
    result = run("cancel", "a", "b")
    assert (result.exit_code, result.stdout, result.stderr) == (
        1,
        "Cancelled a.\n",
        "There is no job b.\n",
    )


def test_no_profile(run, daemon, script):
    run("submit", "--nodes", "1:8", "--no-profile", script)
    assert spec_of(daemon)["profile"] is False


def test_profile_options(run, daemon, script):
    run(
        "submit",
        "--nodes",
        "1:8",
        "--profile-sizes",
        "1, 8,4,4",
        "--profile-key",
        "sweep-7",
        script,
    )
    sent = spec_of(daemon)
    assert (sent["profile_sizes"], sent["profile_key"]) == ([8, 4, 1], "sweep-7")
    assert "profile" not in sent


@pytest.mark.parametrize(
    ("text", "why"),
    [("", "not a list"), ("4;2", "not a list"), ("٤", "not a list"), ("9", "1:8"), ("4,0", "1:8")],
)
def test_profile_sizes_refused(run, script, text, why):
    result = run("submit", "--nodes", "1:8", "--profile-sizes", text, script)
    assert result.exit_code == 2
    assert why in result.stderr


# --- snapshots of other jobs ---


def test_resume_from_is_the_jobs_id_or_an_absolute_path(run, daemon, script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run("submit", "--resume-from", "train", script).exit_code == 0
    assert spec_of(daemon)["env"]["MALLETRAIN_RESUME_FROM"] == "j1", "a name is an id by now"
    daemon.seen.clear()
    (tmp_path / "run.pt").write_text("")
    assert run("submit", "--env", "A=1", "--resume-from", "run.pt", script).exit_code == 0
    expected = {"A": "1", "MALLETRAIN_RESUME_FROM": str(tmp_path / "run.pt")}
    assert spec_of(daemon)["env"] == {**expected, "MALLETRAIN_UMASK": "0022"}
    result = run("submit", "--resume-from", "./no.pt", script)
    assert result.exit_code == 2
    assert "there is no file ./no.pt" in result.stderr


@pytest.mark.parametrize("where", ["argument", "script"])
@pytest.mark.parametrize("ended", [None, 1009.0])
def test_two_unfinished_jobs_with_one_snapshot_path_are_told(
    run, daemon, script, tmp_path, monkeypatch, where, ended
):
    monkeypatch.chdir(tmp_path)
    args = ["--snapshot=run.pt"] if where == "argument" else []
    if where == "script":
        script.write_text("import malletrain\nmalletrain.Snapshot('run.pt', model=model)\n")
    other = job_view(id="j7", owner=user_name(), ended=ended)
    theirs = {"script": str(script), "workdir": str(tmp_path), "args": ["--lr", "0.1", *args]}
    daemon.answers["jobs"] = lambda p: [other]
    daemon.answers["job"] = lambda p: msgspec.structs.replace(detail(), job=other, spec=theirs)
    result = run("submit", script, "--lr", "0.2", *args)
    assert result.exit_code == 0, result.stderr
    warning = f"job j7 (train) is not finished and saves to the same snapshot, {tmp_path}/run.pt"
    assert (warning in result.stderr) == (ended is None)
    assert spec_of(daemon)
    daemon.seen.clear()
    script.write_text("import malletrain\nmalletrain.Snapshot(model=model)\n")
    assert "same snapshot" not in run("submit", script, "--lr", "0.2").stderr


@pytest.mark.parametrize("ended", [None, 1009.0])
def test_two_unfinished_jobs_with_one_output_folder_are_told(
    run, daemon, script, tmp_path, monkeypatch, ended
):
    monkeypatch.chdir(tmp_path)
    other = job_view(id="j7", owner=user_name(), ended=ended)
    theirs = {"script": str(script), "workdir": str(tmp_path), "args": ["--output_dir", "out"]}
    daemon.answers["jobs"] = lambda p: [other]
    daemon.answers["job"] = lambda p: msgspec.structs.replace(detail(), job=other, spec=theirs)
    result = run("submit", script, "--output_dir=out/", "--lr", "0.2")
    assert result.exit_code == 0, result.stderr
    warning = (
        f"job j7 (train) is not finished and writes to the same output folder, {tmp_path}/out."
    )
    assert (warning in result.stderr) == (ended is None)
    assert "output folder" not in run("submit", script, "--output_dir", "other").stderr


def test_an_array_whose_jobs_share_an_output_folder_is_told(run, daemon, script, tmp_path):
    daemon.answers["jobs"] = lambda p: []
    result = run("submit", "--array", "1-3", script, "--output_dir", "out")
    assert "all jobs of the array write to the output folder" in result.stderr
    result = run("submit", "--array", "1-3", script, "--output_dir", "out-{index}")
    assert "output folder" not in result.stderr


def test_paths_that_options_and_literals_name(tmp_path):
    script = tmp_path / "s.py"
    script.write_text(
        "from malletrain import Snapshot\nSnapshot('a.pt', m=m)\nSnapshot(path='/b.pt', m=m)\n"
        "elastic.Run(snapshot='c.pt')\nelastic.Run(snapshot=True)\nSnapshot(args.path)\n"
    )
    args = ["--snapshot-every", "3", "--snapshot", "d.pt", "--ckpt-path=e.pt", "--snapshot", "--x"]
    assert snapshot_paths(str(script), args, "/w") == {
        "/w/a.pt",
        "/b.pt",
        "/w/c.pt",
        "/w/d.pt",
        "/w/e.pt",
    }
    script.write_text("def")
    assert snapshot_paths(str(script), [], "/w") == set()


def test_a_job_of_the_same_name_that_goes_on_is_named(run, daemon):
    mine = [
        job_view(id=name, name="train", owner=user_name(), state=state, ended=ended)
        for name, state, ended in (
            ("j3", "running", None),
            ("j4", "completed", 9.0),
            ("j5", "running", None),
        )
    ]
    another_users = job_view(id="j6", name="train", owner=f"not-{user_name()}")
    daemon.answers["jobs"] = lambda p: [*mine, another_users]
    daemon.answers["cancel"] = lambda p: {
        "results": [{"job": "j5", "ok": True, "sentence": "Job j5 (train) is cancelled."}]
    }
    done = run("cancel", "train")
    assert (done.exit_code, done.stdout) == (0, "Job j5 (train) is cancelled.\n")
    assert done.stderr == (
        "Note: the name train is not unique. Job j3 goes on; malletrain cancel j3 ends it.\n"
    )
    assert run("cancel", "j5").stderr == ""
    assert run("cancel", "--json", "train").stderr == ""


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--epochs", "3"], r"No such option:? '?--epochs'?\. Options of the script stand after"),
        (["--node", "1:4"], r"Did you mean --nodes, --module or --name\? Options of the script"),
        (["-N", "4"], r"In place of -N of sbatch there is --nodes\. Options of the script"),
        (["--ntasks=4"], "of sbatch there is --nodes, times --nproc-per-node."),
        (["--max-restarts", "3"], "of torchrun there is nothing to give: the operator sets"),
    ],
)
def test_an_unknown_option_before_the_script(run, daemon, script, words, sentence):
    done = run("submit", *words, script)
    assert done.exit_code == 2
    assert re.search(sentence, done.stderr)
    assert daemon.seen == []


def test_the_page_has_every_equivalent():
    page = (Path(__file__).parents[3] / "docs" / "submitting.md").read_text()
    rows = [line.split("|")[1:3] for line in page.splitlines() if line.startswith("| ")]
    for table in EQUIVALENTS.values():
        for option, equivalent in table.items():
            (cell,) = [c for names, c in rows if re.search(rf"`{option}[ =`]", names)]
            word = equivalent.split(",")[0].split(" to give")[0]
            assert word.split(" N")[0] in cell, option


@pytest.mark.parametrize("words", [("submit", "train.py"), ("submit", "-m", "train")])
def test_a_current_directory_that_is_gone(run, daemon, monkeypatch, tmp_path, words):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    done = run(*words)
    assert (done.exit_code, done.stderr) == (
        1,
        "The current directory no longer exists; change to another with cd, and run the command "
        "again.\n",
    )
    assert daemon.seen == []


def test_another_missing_file_is_not_taken_for_the_current_directory(run, monkeypatch):
    def missing(*args):
        raise FileNotFoundError(2, "No such file or directory", "x")

    monkeypatch.setattr(sys.modules["malletrain.cli.submit"], "client_of", missing)
    done = run("cancel", "j1")
    assert done.exit_code == 1
    assert "(FileNotFoundError): [Errno 2] No such file or directory: 'x'. Set" in done.stderr
