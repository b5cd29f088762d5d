"""The server without Flower: its programs are scripts that do what a test wants."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from fedcase import rules, server
from fedcase.flower import FlowerMissingError, environment_without, program, split_arguments
from fedcase.options import TrainingOptions
from fedcase.ratio import EpsilonGreedy
from fedcase.server import FederatedServer, ServerError
from fedcase.state import StateFolder, TrainingStateError, lock

from tests.jobscripts.federated.flower_environment import environment
from tests.jobscripts.federated.test_state import state
from tests.ports import free_ports
from tests.waiting import until

SUPERLINK = f"""#!{sys.executable}
import socket, sys, time
place = sys.argv.index("--port")
one = socket.create_server(("127.0.0.1", int(sys.argv[place + 1])))
while True:
    one.accept()[0].close()
"""
FLWR = f"""#!{sys.executable}
import json, sys
with open({{log!r}}, "a") as log:
    print(*sys.argv[1:2], file=log)
print(json.dumps({{answer}}))
"""


def programs(tmp_path, answers="{'success': True, 'run-id': '7', 'runs': [{'status': 'running'}]}"):
    """A folder with programs named as Flower's; the calls of ``flwr`` are in the file ``calls``."""
    folder = tmp_path / "bin"
    folder.mkdir()
    flwr = FLWR.format(log=str(tmp_path / "calls"), answer=answers)
    for name, text in (("flower-superlink", SUPERLINK), ("flwr", flwr)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return str(folder)


def options(tmp_path, rounds=2):
    (tmp_path / "state").mkdir(exist_ok=True)
    return TrainingOptions("a:b", folder=str(tmp_path / "state"), rounds=rounds)


def calls(tmp_path):
    path = tmp_path / "calls"
    return path.read_text().split() if path.exists() else []


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(server, "POLL_S", 0.05)
    monkeypatch.setattr(server, "CHECK_S", 0.0)


@pytest.fixture
def port():
    """A port that no other test gets while this one runs."""
    number, reservation = free_ports(1)
    with reservation:
        yield number


def test_a_run_that_fails_is_started_again_and_then_given_up(tmp_path, port):
    ended = "{'success': True, 'run-id': '7', 'runs': [{'status': 'finished:failed'}]}"
    one = FederatedServer(options(tmp_path), "127.0.0.1", port, programs(tmp_path, ended))
    with pytest.raises(ServerError, match="The run has failed: failure 4 since round 0"):
        one.run()
    assert calls(tmp_path) == ["run", "list"] * 4


def test_a_superlink_that_cannot_start_is_given_up(tmp_path, port):
    folder = programs(tmp_path)
    (tmp_path / "bin" / "flower-superlink").write_text("#!/bin/sh\nexit 3\n")
    one = FederatedServer(options(tmp_path), "127.0.0.1", port, folder)
    with pytest.raises(ServerError, match="The SuperLink has ended: failure 4 since"):
        one.run()


def test_it_ends_when_all_rounds_count(tmp_path, port):
    with StateFolder(tmp_path / "state") as folder:
        folder.save(state())
        folder.save(state(1))
        folder.save(state(1, 2))
    one = FederatedServer(options(tmp_path), "127.0.0.1", port, programs(tmp_path))
    assert one.run() == 2
    assert calls(tmp_path) == []


def test_one_server_for_a_folder(tmp_path, port):
    one = FederatedServer(options(tmp_path), "127.0.0.1", port, programs(tmp_path))
    file = lock(tmp_path / "state" / "server.lock")
    with pytest.raises(TrainingStateError, match="Another server trains with the state in"):
        one.run()
    os.close(file)


def test_the_superlink_dies_with_a_killed_server(tmp_path, port):
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "fedcase.server", str(tmp_path / "state"), "--port", str(port)),
            *("--task", "tests.jobscripts.federated.tasks:Counting", "--rounds", "3"),
            *("--flower", programs(tmp_path), "--", "--insecure"),
        ],
        env=environment(),
    )
    until(lambda: "run" in calls(tmp_path), "the run is started")
    process.send_signal(signal.SIGKILL)
    process.wait()
    until(lambda: not _listens(port), "the SuperLink is gone")


def test_arguments_after_two_dashes_are_flower_s():
    assert split_arguments(["a", "--b", "--", "--insecure", "--", "x"]) == (
        ["a", "--b"],
        ["--insecure", "--", "x"],
    )
    assert split_arguments(["a"]) == (["a"], [])


def test_a_missing_program_says_how_to_install_it(tmp_path):
    with pytest.raises(FlowerMissingError, match="Install Flower into an environment of its own"):
        program("flwr", str(tmp_path))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--rounds", "0"], "are at least 1"),
        (["--cold-share", "0"], "--cold-share is above 0"),
        (["--rule", "dice"], "invalid choice"),
    ],
)
def test_options_that_are_not_possible(tmp_path, capsys, arguments, words):
    with pytest.raises(SystemExit):
        server.main([str(tmp_path), "--task", "a:b", *arguments])
    assert words in capsys.readouterr().err


def test_a_task_that_is_none_is_a_sentence(tmp_path, capsys):
    assert server.main([str(tmp_path / "x"), "--task", "no_such_module:Task"]) == 1
    assert (
        'The task "no_such_module:Task" with the options {} cannot be made'
        in capsys.readouterr().err
    )


NO_FOREST = (
    "The rule forest needs scikit-learn, which is not in {place}, the environment of Flower. "
    "Install it there ({place}/bin/pip install 'scikit-learn>=1.4'), or choose another --rule."
)


def test_a_rule_that_needs_a_package_is_refused_at_the_start(tmp_path, capsys):
    """The package is looked for by the Python beside Flower's programs, not by this one."""
    folder = Path(programs(tmp_path))
    (folder / "python").write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    (folder / "python").chmod(0o755)
    task = ("--task", "tests.jobscripts.federated.tasks:Counting")
    words = [str(tmp_path / "state"), *task, "--rule", "forest", "--flower", str(folder)]
    assert server.main([*words, "--", "--insecure"]) == 1
    assert capsys.readouterr().err == f"fedcase-server: {NO_FOREST.format(place=tmp_path)}\n"
    assert not calls(tmp_path)


def test_whether_a_package_is_in_the_environment_of_a_program(tmp_path):
    program_path = str(Path(sys.executable).with_name("flwr"))
    environment = str(Path(sys.executable).parent.parent)
    assert environment_without("numpy", program_path) == ""
    assert environment_without("no_such_package", program_path) == environment
    unknown = environment_without("no_such_package", str(tmp_path / "flwr"))
    assert unknown == "", "its Python is not known"


def test_a_rule_is_refused_where_the_server_app_starts(monkeypatch):
    assert isinstance(rules.create_rule("epsilon-greedy"), EpsilonGreedy)
    monkeypatch.setitem(rules.PACKAGES, "forest", "no_such_package")
    with pytest.raises(rules.RuleError) as caught:
        rules.create_rule("forest")
    assert str(caught.value) == NO_FOREST.format(place=sys.prefix)


def test_the_help_has_every_option_with_its_default(capsys):
    with pytest.raises(SystemExit) as end:
        server.main(["--help"])
    assert end.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for field in fields(TrainingOptions):
        name = {"folder": "folder", "answer_s": "--answer"}.get(
            field.name, f"--{field.name.replace('_', '-')}"
        )
        assert f" {name} " in text, field.name
        if field.name not in ("task", "folder"):
            _, _, its_help = text.partition("options:")[2].partition(f" {name} ")
            assert f"(default {field.default})" in its_help.partition(" --")[0], field.name
    for name in ("--host", "--port", "--flower", "--authority"):
        assert f" {name} " in text


def _listens(port):
    import socket

    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0
