"""The command line: what it refuses, and that the processes of a batch get what was asked for."""

from __future__ import annotations

import pytest
from llmserve import cli
from llmserve.batch_command import BatchSubmission
from llmserve.batch_member import MemberOptions
from llmserve.engines import PROFILES
from llmserve.replica_process import ReplicaOptions


@pytest.mark.parametrize(
    ("words", "command", "tokenizer"),
    [
        (["--engine", "simulated"], PROFILES["simulated"], "simulated"),
        (["--engine", "vllm"], PROFILES["vllm"], "/models/m"),
        (["--engine", "vllm", "--tokenizer", "/t"], PROFILES["vllm"], "/t"),
        (["--", "my-engine", "{socket}"], ("my-engine", "{socket}"), "/models/m"),
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


def test_a_batch_that_is_not_there_is_named(tmp_path, capsys):
    assert cli.main(["status", str(tmp_path / "out.jsonl")]) == 1
    error = capsys.readouterr().err
    assert error == f"llmserve status: {tmp_path}/out.jsonl.parts has no batch.\n"


SIMULATED = ("batch", "--model", "m", "--engine", "simulated")


def test_an_output_of_something_else_is_not_overwritten(tmp_path, capsys):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(
        '{"custom_id": "a", "url": "/v1/completions", "body": {"model": "m", "prompt": "Hi"}}\n'
    )
    output.write_text("mine")
    assert cli.main([*SIMULATED, str(source), str(output)]) == 1
    assert f"{output} is there already" in capsys.readouterr().err
    assert output.read_text() == "mine"


@pytest.mark.parametrize("option", ["--slots", "--kv-tokens", "--loads-at-once"])
def test_a_number_below_one_is_refused(option, capsys):
    with pytest.raises(SystemExit):
        cli.main(["serve", "--model", "m", option, "0"])
    assert f"{option} must be at least 1" in capsys.readouterr().err


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
