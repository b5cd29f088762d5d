"""``malletrain submit``: the software that a job runs in, and options at the head of the script."""

import os
import sys

import pytest


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("print('hi')\n")
    return path


@pytest.fixture
def venv(tmp_path):
    """What looks like a virtual environment."""
    python = tmp_path / "my venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    return python.parents[1]


def spec_of(daemon):
    ((_, params),) = [seen for seen in daemon.seen if seen[0] == "submit"]
    return params["spec"]


# --- software ---


def test_a_job_without_an_environment_says_nothing_of_one(run, daemon, script):
    assert run("submit", script).exit_code == 0
    assert "software" not in spec_of(daemon)
    assert spec_of(daemon)["python"] == sys.executable


def test_modules_keep_their_order_and_the_python_that_submits(run, daemon, script):
    assert run("submit", "--module", "gcc 12", "--module", "cuda/12", script).exit_code == 0
    assert spec_of(daemon)["software"] == {"modules": ["gcc 12", "cuda/12"]}
    assert spec_of(daemon)["python"] == sys.executable


def test_a_virtual_environment(run, daemon, script, venv, monkeypatch):
    monkeypatch.chdir(venv.parent)
    assert run("submit", "--venv", "my venv", script).exit_code == 0
    assert spec_of(daemon)["software"] == {"venv": str(venv)}
    assert spec_of(daemon)["python"] == f"{venv}/bin/python"


def test_a_conda_environment_takes_conda_along(run, daemon, script, monkeypatch):
    monkeypatch.setenv("CONDA_EXE", "/opt/conda/bin/conda")
    assert run("submit", "--conda", "train", script).exit_code == 0
    software = {"conda": "train", "conda_exe": "/opt/conda/bin/conda"}
    assert spec_of(daemon)["software"] == software


def test_a_container_sees_the_folders_of_snapshots_too(run, daemon, tmp_path):
    (tmp_path / "work").mkdir()
    (tmp_path / "saved").mkdir()
    script = tmp_path / "work" / "train.py"
    script.write_text("def new_in(later): type Shape = later\n")  # not for this Python to judge
    image = tmp_path / "torch.sif"
    image.touch()
    arguments = ["--snapshot", tmp_path / "saved" / "x.pt"]
    options = ["--container", image, "--container-bind", "/usr:/data", "--workdir", script.parent]
    assert run("submit", *options, script, *arguments).exit_code == 0
    assert spec_of(daemon)["software"] == {
        "container": str(image),
        "binds": ["/usr:/data", str(tmp_path / "saved")],
    }
    assert spec_of(daemon)["python"] == "python"


@pytest.mark.parametrize(
    ("options", "bound"),
    [
        ([], True),
        (["--module", "cuda/12"], True),
        (["--no-container"], False),
        (["--conda", "train"], False),
    ],
)
def test_the_folders_of_snapshots_are_named_for_the_sites_image_too(
    run, daemon, tmp_path, options, bound
):
    (tmp_path / "work").mkdir()
    (tmp_path / "saved").mkdir()
    script = tmp_path / "work" / "train.py"
    script.touch()
    arguments = ["--snapshot", tmp_path / "saved" / "x.pt"]
    assert run("submit", "--workdir", script.parent, *options, script, *arguments).exit_code == 0
    binds = spec_of(daemon).get("software", {}).get("binds", [])
    assert binds == ([str(tmp_path / "saved")] if bound else [])


def test_names_of_a_registry_stay_as_they_are(run, daemon, script):
    name = "nvcr.io/nvidia/pytorch:24.01-py3"
    options = ["--container", name, "--container-runtime", "podman"]
    assert run("submit", *options, script).exit_code == 0
    assert spec_of(daemon)["software"] == {"container": name, "runtime": "podman"}


def test_no_container_is_something_else_than_none_named(run, daemon, script):
    assert run("submit", "--no-container", script).exit_code == 0
    assert spec_of(daemon)["software"] == {"container": ""}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--conda", "a", "--venv", "b"], "give one of them"),
        (["--conda", "a", "--container", "b"], "leave --conda out"),
        (["--container", "a", "--no-container"], "exclude each other"),
        (["--venv", "/no/such"], "There is no virtual environment /no/such"),
        (["--container", "./gone.sif"], "There is no container image"),
        (["--container", "gone.sif"], "There is no container image"),
        (["--module", "-f"], "is no name; give one such as cuda/12.4"),
        (["--module", "a\nb"], "is no name"),
        (["--container", "x", "--container-bind", "/a:b"], "is not SRC or SRC:DST"),
    ],
)
def test_what_does_not_go_is_refused_before_the_daemon_is_asked(
    run, daemon, script, options, words
):
    result = run("submit", *options, script)
    assert result.exit_code == 2
    assert words in result.stderr
    assert daemon.seen == []


# --- options at the head of the script ---


def headed(script, *lines):
    script.write_text("\n".join(["#!/usr/bin/env python3", *lines, "print('hi')", ""]))
    return script


def test_options_at_the_head_of_the_script(run, daemon, script):
    head = [
        "# -*- coding: utf-8 -*-",
        "#MALLETRAIN --nodes 1:8 --name 'from-script'  # as sbatch reads its own",
        "",
        "#MALLETRAIN\t--weight=2 --env A=1 --env B=1 --module one",
        "#MALLETRAIN",
        "##MALLETRAIN --nodes 1:99",
        "#MALLETRAINS --nodes 1:98",
        "# MALLETRAIN is what runs this",
        "# MALLETRAIN --nproc-per-node 3",  # what a formatter makes of it
        "#MALLETRAIN --no-profile",
    ]
    assert run("submit", headed(script, *head)).exit_code == 0
    spec = spec_of(daemon)
    assert (spec["name"], spec.get("min_nodes", 1), spec["max_nodes"]) == ("from-script", 1, 8)
    assert spec["weight"] == 2.0
    assert spec["env"] == {"A": "1", "B": "1", "MALLETRAIN_UMASK": "0022"}
    assert spec["nproc_per_node"] == 3
    assert (spec["profile"], spec["software"]) == (False, {"modules": ["one"]})


def test_the_command_line_wins(run, daemon, script, venv):
    head = [
        "#MALLETRAIN --nodes 1:8 --name script --env A=1 --env B=1",
        "#MALLETRAIN --module one --conda train --no-profile",
    ]
    options = ["--nodes", "2", "--env", "B=2", "--module", "two", "--venv", venv, "--profile"]
    assert run("submit", *options, headed(script, *head)).exit_code == 0
    spec = spec_of(daemon)
    assert (spec.get("min_nodes"), spec["max_nodes"], spec["name"]) == (2, 2, "script")
    assert spec["env"] == {"A": "1", "B": "2", "MALLETRAIN_UMASK": "0022"}
    assert spec["software"] == {"modules": ["two"], "venv": str(venv)}
    assert spec.get("profile", True)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--nodes 8:1", 'line 3: "8:1" has a maximum below its minimum'),
        ("--name j7", 'line 3: "j7" looks like the id of a job'),
        ("--weight heavy", "line 3: Invalid value for '--weight': 'heavy' is not a valid float"),
        ("--nodse 4", "line 3: No such option"),
        ("--json", "line 3: No such option"),
        ("4 nodes", "line 3: Got unexpected extra arguments (4 nodes)"),
        ("--name 'x", "line 3: unmatched quotation mark"),
        ("--name x \\", "line 3: backslash at the end: #MALLETRAIN --name x"),
        ("--nodes", "line 3: Option '--nodes' requires an argument"),
        ("--env 1=2", 'line 3: "1=2" is not an environment variable'),
        ("--venv /no/such", "line 3: There is no virtual environment"),
    ],
)
def test_an_error_names_the_line(run, daemon, script, line, words):
    result = run("submit", headed(script, "# head", f"#MALLETRAIN {line}"))
    assert result.exit_code == 2
    assert f"{script} {words}" in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert daemon.seen == []


def test_an_error_of_the_command_line_names_no_line(run, daemon, script):
    result = run("submit", "--nodes", "8:1", headed(script, "#MALLETRAIN --nodes 1:2"))
    assert 'submit: "8:1" has a maximum' in result.stderr


def test_a_line_that_stands_too_late_is_told(run, daemon, script):
    script.write_text('"""What it does."""\n#MALLETRAIN --nodes 1:8\nimport os\n')
    result = run("submit", script)
    assert result.exit_code == 0
    assert f"Note: {script} line 2 is not read as options" in result.stderr
    assert spec_of(daemon).get("max_nodes", 1) == 1


def test_the_help_tells_of_the_head_of_the_script(run):
    text = run("submit", "--help").stdout
    assert '"#MALLETRAIN --nodes 1:16"' in " ".join(text.split())
    assert all(name in text for name in ("--module", "--conda", "--venv", "--container"))


def test_conda_environments_are_completed(monkeypatch, tmp_path):
    from malletrain.cli.common import conda_environments

    (tmp_path / ".conda").mkdir()
    lines = ["/opt/conda", "/opt/conda/envs/train", f"{tmp_path}/envs/test", "/p/envs/other"]
    (tmp_path / ".conda" / "environments.txt").write_text("\n".join(lines))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert os.path.expanduser("~") == str(tmp_path)
    assert [item.value for item in conda_environments(None, None, "t")] == ["train", "test"]


@pytest.mark.parametrize(
    ("head", "name"),
    [
        ("#!/usr/bin/env python\n#SBATCH --nodes=4\n\nprint()", "#SBATCH"),
        ("#PBS -l select=4\nprint()", "#PBS"),
        ("\ufeff#!/usr/bin/env python\n#SBATCH --nodes=4\n\nprint()", "#SBATCH"),
        ("#SBATCH --nodes=4\n#MALLETRAIN --nodes 4\nprint()", ""),
        ("# SBATCH lines are below\nTEXT = '''\n#SBATCH --nodes=4\n'''", ""),
    ],
)
def test_lines_of_another_scheduler_are_not_left_out_without_a_word(
    run, daemon, script, head, name
):
    script.write_text(head)
    result = run("submit", script)
    assert result.exit_code == 0
    assert (f"Note: the {name} lines of {script} are not read:" in result.stderr) == bool(name)
    assert ("are not read:" in result.stderr) == bool(name)
