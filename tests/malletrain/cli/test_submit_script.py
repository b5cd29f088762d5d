"""``malletrain submit``: what a script must be, and options written after it."""

import pytest


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "my train.py"
    path.write_text("print('hi')\n")
    return path


def spec_of(daemon):
    ((_, params),) = [seen for seen in daemon.seen if seen[0] == "submit"]
    return params["spec"]


# --- the script is a Python program ---


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("job.sh", "echo hello\n", "is a shell script"),
        ("run.sbatch", "ls\n", "with what has to run before it in --setup"),
        ("train", "#!/bin/bash\nls\n", "is a shell script"),
        ("train.ipynb", '{"cells": []}\n', "jupyter nbconvert --to script train.ipynb"),
        ("a.py", "import x\nif x\n    pass\n", "a syntax error in line 2: expected ':' (if x)"),
        ("b.py", "def f():\npass\n", "a syntax error in line 2: expected an indented block"),
        ("c.py", "x = 1\0\n", "null bytes"),
        ("d.py", 'print("caf\xe9")', "a syntax error"),
    ],
)
def test_what_is_no_python_program_is_refused(run, daemon, tmp_path, file, text, words):
    path = tmp_path / file
    path.write_bytes(text.encode("latin-1"))
    result = run("submit", path)
    assert result.exit_code == 2
    assert str(path) in result.stderr
    assert words in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert daemon.seen == []


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("train", "#!/usr/bin/env python3\nprint(1)\n"),
        ("train_v1.2", "print(1)\n"),
        ("empty.py", ""),
        ("odd.py", "print('\\d')\n"),  # a warning is no error
        ("latin.py", "# -*- coding: latin-1 -*-\nx = '\xe9'\n"),
    ],
)
def test_python_programs_of_any_name(run, daemon, tmp_path, file, text):
    path = tmp_path / file
    path.write_bytes(text.encode("latin-1"))
    result = run("submit", path)
    assert (result.exit_code, result.stderr) == (0, "")


def test_a_script_whose_name_looks_like_an_id(run, daemon, tmp_path):
    path = tmp_path / "j7.py"
    path.write_text("")
    assert run("submit", path).exit_code == 0
    assert spec_of(daemon)["name"] == "j7.py"


# --- options after the script ---


def test_options_after_the_script_are_told(run, daemon, script):
    result = run("submit", script, "--nodes", "1:4", "--lr", "0.1", "--name=x")
    assert result.exit_code == 0
    assert "these are passed to the script, because they stand after it: --nodes --name=x" in (
        result.stderr
    )
    assert len(result.stderr.splitlines()) == 1
    assert spec_of(daemon)["args"] == ["--nodes", "1:4", "--lr", "0.1", "--name=x"]


@pytest.mark.parametrize("before", [True, False])
def test_two_dashes_say_that_they_are_the_scripts(run, daemon, script, before):
    words = ("--", script) if before else (script, "--")
    result = run("submit", *words, "--nodes", "4", "--", "-x")
    assert (result.exit_code, result.stderr) == (0, "")
    assert spec_of(daemon)["args"] == ["--nodes", "4", "--", "-x"]


def test_options_of_the_script_are_not_told(run, daemon, script):
    assert run("submit", "--nodes", "4", script, "--lr", "1", "nodes", "--", "--nodes").stderr == ""


# --- a module instead of a script ---


@pytest.fixture
def package(tmp_path, monkeypatch):
    package = tmp_path / "package"
    (package / "inner").mkdir(parents=True)
    for name in ("__init__", "train", "inner/__init__", "inner/__main__"):
        (package / f"{name}.py").write_text("raise SystemExit('nothing is imported')\n")
    monkeypatch.chdir(tmp_path)
    return package


@pytest.mark.parametrize(
    ("module", "file"),
    [("package.train", "train.py"), ("package.inner", "inner/__main__.py")],
)
def test_a_module_is_found_and_not_imported(run, daemon, package, module, file):
    result = run("submit", "--nodes", "1:2", "-m", module, "--lr", "0.1")
    assert result.exit_code == 0, result.stderr
    spec = spec_of(daemon)
    assert (spec["script"], spec["module"]) == (str(package / file), module)
    assert spec["args"] == ["--lr", "0.1"]
    assert spec["name"] == module.rpartition(".")[2]


def test_options_at_the_head_of_a_module_count(run, daemon, package):
    (package / "train.py").write_text("#MALLETRAIN --nodes 1:4\n")
    assert run("submit", "-m", "package.train").exit_code == 0
    assert spec_of(daemon)["max_nodes"] == 4


@pytest.mark.parametrize(
    ("head", "words", "counts", "largest"),
    [
        ("", ("--slots", "1:16"), "slots", 16),
        ("", ("--gpus", "2"), "gpus", 2),
        ("--gpus 1:8 --kind gpu", (), "gpus", 8),
        ("--gpus 1:8", ("--nodes", "1:4"), None, 4),
        ("--nodes 1:4", ("--slots", "1:3"), "slots", 3),
        ("--slots 1:4", ("--gpus", "1:3"), "gpus", 3),
    ],
)
def test_sizes_in_slots_and_gpus(run, daemon, script, head, words, counts, largest):
    """A size on the command line takes the place of the script's."""
    script.write_text(f"#MALLETRAIN {head}\n" if head else "")
    result = run("submit", *words, script)
    assert result.exit_code == 0, result.stderr
    spec = spec_of(daemon)
    assert (spec.get("counts"), spec["max_nodes"]) == (counts, largest)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--nodes", "1:4", "--gpus", "1:4"), "--nodes and --gpus each give the size of the job"),
        (("--slots", "0"), '"0" asks for 0 slots at least'),
        (("--gpus", "many"), '"many" is not a number of GPUs'),
    ],
)
def test_sizes_that_are_refused(run, daemon, script, words, sentence):
    result = run("submit", *words, script)
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert not daemon.seen


def test_a_wrong_size_at_the_head_of_a_script_is_named_by_its_line(run, daemon, script):
    script.write_text("#MALLETRAIN --slots 4:2\n")
    result = run("submit", script)
    assert 'line 1: "4:2" has a maximum below' in result.stderr


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("package.gone", "There is no module package.gone that can be run in "),
        ("package", "a package with a __main__"),
        ("package/train.py", "is no name of a module, such as package.train; for the file leave"),
        ("no_such_package.train", "There is no module no_such_package.train"),
        ("sys", "There is no module sys"),
    ],
)
def test_what_is_no_module_is_refused(run, daemon, package, module, words):
    result = run("submit", "-m", module)
    assert result.exit_code == 2
    assert words in result.stderr
    assert daemon.seen == []
