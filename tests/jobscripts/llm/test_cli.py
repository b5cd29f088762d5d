"""The command line: what it refuses, and that the processes of a batch get what was asked for."""

from __future__ import annotations

import os
import sys
import venv
from types import SimpleNamespace

import pytest
from llmserve import batch_command, cli, engines
from llmserve.batch_command import BatchSubmission
from llmserve.batch_member import MemberOptions
from llmserve.engines import PROFILES
from llmserve.replica_process import ReplicaOptions

from malletrain.api.options import spec_of
from malletrain.protocol.messages import JobSpec, Notification


@pytest.fixture(autouse=True)
def paths(monkeypatch):
    """Other processes find llmserve."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))


@pytest.fixture
def submitted(monkeypatch):
    """The specifications of the jobs that are submitted."""
    specs: list[JobSpec] = []

    class Daemon:
        def __enter__(self):
            return self

        def __exit__(self, *of_error: object) -> None:
            pass

        def job(self, name):
            return SimpleNamespace(view=SimpleNamespace(ended=1.0))

        def submit(self, script, args, **options):
            specs.append(spec_of(script, args, options))
            return SimpleNamespace(id="j1")

    monkeypatch.setattr(batch_command, "Client", Daemon)
    return specs


@pytest.mark.parametrize(
    ("words", "command", "tokenizer"),
    [
        (["--engine", "simulated"], PROFILES["simulated"], "simulated"),
        (["--engine", "vllm"], PROFILES["vllm"], "/models/m"),
        (["--engine", "vllm", "--tokenizer", "/t"], PROFILES["vllm"], "/t"),
        (["--", "my-engine", "{socket}"], ("my-engine", "{socket}"), "/models/m"),
        (
            ["--engine", "vllm", "--", "--dtype", "float32"],
            (*PROFILES["vllm"], "--dtype", "float32"),
            "/models/m",
        ),
        (
            ["--engine", "simulated", "--", "--load-s", "3"],
            (*PROFILES["simulated"], "--load-s", "3"),
            "simulated",
        ),
    ],
)
def test_the_processes_of_a_batch_get_its_options(tmp_path, monkeypatch, words, command, tokenizer):
    submitted: list[tuple[BatchSubmission, list[str]]] = []
    members: list[MemberOptions] = []

    class Member:
        def __init__(self, options: MemberOptions) -> None:
            members.append(options)

        async def run(self) -> None:
            pass

    def submit(batch: BatchSubmission, member_words: list[str]) -> str:
        submitted.append((batch, member_words))
        return "job j1"

    monkeypatch.setattr(cli, "submit_batch", submit)
    monkeypatch.setattr(cli, "BatchMember", Member)
    monkeypatch.setattr(cli, "check_engine", lambda *of: None)  # vLLM is not installed here
    monkeypatch.chdir(tmp_path)
    options = ["--model", "/models/m", "--served-name", "m", "--slots", "3", "--kv-tokens", "70"]
    options += ["--nodes", "2:5", "--worth", "7.5", "--job-name", "night"]
    at = words.index("--") if "--" in words else len(words)
    line = ["batch", "in.jsonl", "out.jsonl", *options, *words[:at], *words[at:]]
    assert cli.main(line) == 0
    [(batch, member_words)] = submitted
    assert batch == BatchSubmission(
        tmp_path / "in.jsonl", tmp_path / "out.jsonl", "/models/m", "m", tokenizer, "2:5", "night"
    )
    assert cli.main(["batch-member", *member_words]) == 0
    replica = ReplicaOptions(tuple(command), "/models/m", "m", 3, 70)
    assert members == [MemberOptions(batch.output, replica, tokenizer, 7.5, 5)]


def test_options_of_an_engine_need_its_name(capsys):
    with pytest.raises(SystemExit):
        cli.main(["serve", "--model", "m", "--", "--dtype", "float32"])
    assert "No engine is named" in capsys.readouterr().err


def test_a_batch_that_is_not_there_is_named(tmp_path, capsys):
    assert cli.main(["status", str(tmp_path / "out.jsonl")]) == 1
    error = capsys.readouterr().err
    assert error == f"llmserve status: {tmp_path}/out.jsonl.parts has no batch.\n"


SIMULATED = ("batch", "--model", "m", "--engine", "simulated")
LINE = '{"custom_id": "a", "url": "/v1/completions", "body": {"model": "m", "prompt": "Hi"}}\n'


def test_an_output_of_something_else_is_not_overwritten(tmp_path, capsys):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(LINE)
    output.write_text("mine")
    assert cli.main([*SIMULATED, str(source), str(output)]) == 1
    assert f"{output} already exists" in capsys.readouterr().err
    assert output.read_text() == "mine"


def test_an_engine_that_the_python_of_the_nodes_lacks_is_refused(tmp_path, submitted, capsys):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(LINE)
    venv.create(tmp_path / "env", with_pip=False)
    line = [*SIMULATED, str(source), str(output)]
    assert cli.main([*line, "--venv", str(tmp_path / "env")]) == 1
    assert capsys.readouterr().err == (
        f"llmserve batch: The Python that runs the engine, {tmp_path}/env/bin/python, has no "
        "llmserve and no fastapi and no uvicorn, which --engine simulated needs. Install it there: "
        "pip install -e 'jobscripts/llm[serve]' (in the clone). If the site runs jobs in a "
        "container by itself, name it with --container.\n"
    )
    assert not submitted
    assert not output.with_name("out.jsonl.parts").exists()
    for words in (["--module", "llm"], ["--setup", "export PYTHONPATH=/llm"]):  # may bring it
        assert cli.main([*line, "--venv", str(tmp_path / "env"), *words]) == 0
    assert len(submitted) == 2


def test_a_replica_without_its_engine_says_so_at_once(monkeypatch, capsys):
    monkeypatch.setitem(engines.REQUIREMENTS, "simulated", ("no_such_package",))
    assert cli.main(["serve", "--model", "m", "--engine", "simulated"]) == 1
    assert "has no no_such_package, which --engine simulated needs" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--slots", "--kv-tokens", "--loads-at-once"])
def test_a_number_below_one_is_refused(option, capsys):
    with pytest.raises(SystemExit):
        cli.main(["serve", "--model", "m", option, "0"])
    assert f"llmserve serve: error: {option} must be at least 1" in capsys.readouterr().err


def test_an_unknown_option_is_told_under_the_name_of_the_command(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["batch", "in.jsonl", "out.jsonl", "--model", "m", "--no-such-option"])
    assert ended.value.code == 2
    printed = capsys.readouterr().err
    assert printed.startswith("usage: llmserve batch ")
    assert "llmserve batch: error: unrecognized arguments: --no-such-option" in printed


@pytest.mark.parametrize("words", [["serve"], ["batch", "in.jsonl", "out.jsonl"]])
def test_nobody_gets_the_words_of_the_simulated_engine_unasked(words, capsys):
    with pytest.raises(SystemExit):
        cli.main([*words, "--model", "/models/m"])
    assert "No engine is named" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["serve"], ["batch", "in.jsonl", "out.jsonl"]])
def test_a_command_without_a_socket_is_refused_before_any_node_is_asked_for(words, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([*words, "--model", "m", "--", "my-engine"])
    assert ended.value.code == 2
    assert "needs {socket}" in capsys.readouterr().err


def test_where_and_how_the_job_of_a_batch_runs_is_as_for_submit(tmp_path, submitted, monkeypatch):
    monkeypatch.setenv("TOKEN", "secret")
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(LINE)
    line = [*SIMULATED, str(source), str(output)]
    assert cli.main(line) == 0
    assert submitted[0].env == {
        "PYTHONPATH": os.environ["PYTHONPATH"],
        "MALLETRAIN_UMASK": "0022",
    }
    assert (submitted[0].python, submitted[0].software) == (sys.executable, None)
    options = ["--kind", "gpu", "--module", "cuda/12.4", "--module", "gcc", "--container", "image"]
    options += ["--container-runtime", "apptainer", "--container-bind", "/scratch", "--setup", "ul"]
    options += ["--env", "TOKEN", "--env", "A=1", "--after", "j7", "--time-limit", "90 min"]
    options += ["--budget", "20nh", "--notify", "end=a@b.org"]
    assert cli.main([*line, *options]) == 0
    spec = submitted[1]
    assert (spec.node_class, spec.setup, spec.after) == ("gpu", "ul", ("j7",))
    assert (spec.time_limit_s, spec.budget_nh) == (5400.0, 20.0)
    assert spec.notify == (Notification("a@b.org", "mail", ("end",)),)
    # The Python of the image has paths of its own.
    assert spec.env == {"TOKEN": "secret", "A": "1", "MALLETRAIN_UMASK": "0022"}
    assert spec.software.modules == ("cuda/12.4", "gcc")
    assert (spec.software.container, spec.software.runtime) == ("image", "apptainer")
    assert spec.software.binds == ("/scratch",)
    assert (spec.mode, spec.min_nodes, spec.max_nodes, spec.name) == ("service", 1, 16, "batch-out")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--conda", "a", "--container", "b"], "--conda activates an environment of the node"),
        (["--venv", "/no"], "There is no virtual environment /no"),
        (["--env", "no_such_variable"], "no_such_variable is not set here"),
        (["--time-limit", "soon"], "--time-limit: "),
    ],
)
def test_a_wrong_option_of_the_job_is_a_sentence(tmp_path, submitted, capsys, options, sentence):
    source = tmp_path / "in.jsonl"
    source.write_text(LINE)
    with pytest.raises(SystemExit) as ended:
        cli.main([*SIMULATED, str(source), str(tmp_path / "out.jsonl"), *options])
    assert ended.value.code == 2
    assert sentence in capsys.readouterr().err
    assert not submitted
