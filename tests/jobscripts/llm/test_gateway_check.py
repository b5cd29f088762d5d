"""``llmserve gateway --check``: each failure is a sentence, and nothing is left behind."""

from __future__ import annotations

import asyncio
import socket

import pytest
from llmserve.cli import main
from llmserve.gateway import check
from llmserve.gateway.check import check_gateway
from llmserve.gateway.configuration import read
from llmserve.gateway.database import GatewayDatabase
from llmserve.gateway.keys import KeyFile

from malletrain.client import ClientError, Unreachable
from malletrain.protocol.views import MembersView, MemberView
from tests.jobscripts.llm.gateways import site

LISTEN = 'listen = "127.0.0.1:0"\n'
SERVICE = '[models.llama]\njob = "serve"\ntokenizer = "simulated"\n[users.alice]\n'
VIEW = MembersView("j1", 1, (), "00", "1-a", "running")
LOADING = MemberView("n2", "h2", "n2:1", loading=True)


class Daemon:
    """The answers of a daemon; an error is raised."""

    members_of: dict[str, MembersView | Exception]
    error: Exception | None

    def __init__(self, state_dir):
        if self.error is not None:
            raise self.error

    async def __aenter__(self):
        return self

    async def __aexit__(self, *of_error: object) -> None:
        pass

    async def status(self) -> None:
        pass

    async def members(self, job: str) -> MembersView:
        answer = self.members_of[job]
        if isinstance(answer, Exception):
            raise answer
        return answer


def findings(tmp_path, text: str) -> dict[str, list[tuple[bool | None, str]]]:
    path = tmp_path / "gateway.toml"
    path.write_text(LISTEN + text)
    before = sorted(tmp_path.rglob("*"))
    results: dict[str, list[tuple[bool | None, str]]] = {}
    for each in asyncio.run(check_gateway(read(path), tmp_path)):
        results.setdefault(each.what, []).append((each.works, each.sentence))
    assert sorted(tmp_path.rglob("*")) == before
    return results


@pytest.mark.parametrize(
    ("view", "works", "sentence"),
    [
        (
            MembersView("j1", 1, (MemberView("n1", "h1", "n1:1"), LOADING), "00", "1-a", "running"),
            True,
            "Model llama: service serve is running; replicas ready: 1.",
        ),
        (
            ClientError("There is no job 'serve'; `malletrain status` lists all jobs."),
            False,
            "Model llama: There is no job 'serve'; `malletrain status` lists all jobs. Submit the "
            "service, or correct its job.",
        ),
        (
            MembersView("j1", 1, (), "", "", "failed"),
            False,
            "Model llama: service serve has ended (failed); submit it again.",
        ),
        (
            MembersView("j1", 1, (), "", "1-a", "running"),
            False,
            "Model llama: Service serve belongs to another user, so its replicas do not answer "
            "this gateway. Run the gateway as the user who submitted the service.",
        ),
    ],
)
def test_services(tmp_path, monkeypatch, view, works, sentence):
    monkeypatch.setattr(check, "AsyncClient", Daemon)
    monkeypatch.setattr(Daemon, "error", None, raising=False)
    monkeypatch.setattr(Daemon, "members_of", {"serve": view}, raising=False)
    results = findings(tmp_path, SERVICE)
    assert results["daemon"] == [(True, "The daemon answers.")]
    assert results["service"] == [(works, sentence)]


def test_a_daemon_that_does_not_answer(tmp_path, monkeypatch):
    monkeypatch.setattr(check, "AsyncClient", Daemon)
    monkeypatch.setattr(Daemon, "error", Unreachable("No daemon answers."), raising=False)
    results = findings(tmp_path, SERVICE)
    assert results["daemon"] == [(False, "No daemon answers.")]
    assert "service" not in results


ENGINE = '[models.m]\nengines = ["unix:{folder}/engine"]\ntokenizer = "{tokenizer}"\n'


def test_what_works_without_a_daemon(tmp_path, capsys):
    with site(tmp_path) as made:
        made.wait_for_replica()
        made.key()
        assert main(["gateway", "--check", "--config", str(tmp_path / "gateway.toml")]) == 0
        lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [
        ["OK", "file"],
        ["OK", "keys"],
        ["OK", "database"],
        ["OK", "listen"],
        ["OK", "tokenizer"],
        ["OK", "engine"],
    ]


def test_each_failure_is_a_sentence(tmp_path, capsys):
    path = tmp_path / "gateway.toml"
    path.write_text(
        'listen = "no.such.host.invalid:1"\nkeys = "no/keys.json"\n'
        'database = "sqlite:///no/gateway.db"\n'
        + ENGINE.format(folder=tmp_path, tokenizer=tmp_path)
    )
    assert main(["gateway", "--check", "--config", str(path)]) == 1
    printed = capsys.readouterr()
    assert printed.err == "llmserve gateway: 5 of these would not work.\n"
    verdicts = [line.split("  ")[0] for line in printed.out.splitlines()]
    assert verdicts == ["OK", *["would not work"] * 5]
    for sentence in (
        f"{tmp_path}/no cannot be written by this account, so no key can be made",
        f"{tmp_path}/no cannot be written by this account, which SQLite needs",
        "no.such.host.invalid:1 cannot be used: ",
        f"Model m: {tmp_path} has no tokenizer that can be read: ",
        f"Model m: unix:{tmp_path}/engine",
    ):
        assert sentence in printed.out


def test_files_that_others_can_read(tmp_path):
    text = ENGINE.format(folder=tmp_path, tokenizer="simulated") + "[users.alice]\n"
    results = findings(tmp_path, text)
    assert results["keys"] == [
        (None, "No user has a valid key; make one with: llmserve key add USER")
    ]
    assert results["database"] == [(True, f"{tmp_path}/gateway.db will be created.")]
    KeyFile(tmp_path / "keys.json").add("alice")
    GatewayDatabase(f"sqlite:///{tmp_path}/gateway.db").close()
    results = findings(tmp_path, text)
    assert results["keys"] == [
        (True, f"{tmp_path}/keys.json can be used; users with a valid key: 1.")
    ]
    assert results["database"] == [(True, f"sqlite:///{tmp_path}/gateway.db can be used.")]
    for name in ("keys.json", "gateway.db"):
        (tmp_path / name).chmod(0o640)
    results = findings(tmp_path, text)
    for what in ("keys", "database"):
        [(works, sentence)] = results[what]
        assert not works
        assert "read or written by other users (mode 0640); run chmod 600 on it" in sentence
    (tmp_path / "gateway.db").chmod(0o600)
    (tmp_path / "gateway.db").write_text("This is no database." * 100)
    [(works, sentence)] = findings(tmp_path, text)["database"]
    assert not works
    assert "file is not a database" in sentence


def test_an_address_in_use_needs_a_look(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        text = ENGINE.format(folder=tmp_path, tokenizer="simulated")
        path = tmp_path / "gateway.toml"
        path.write_text(f'listen = "127.0.0.1:{port}"\n' + text)
        results = asyncio.run(check_gateway(read(path), tmp_path))
    [finding] = [each for each in results if each.what == "listen"]
    assert finding.works is None
    assert finding.sentence == (
        f"127.0.0.1:{port} is in use, by a running gateway or another program."
    )
