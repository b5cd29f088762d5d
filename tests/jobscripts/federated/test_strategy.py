"""``FedCaSe`` as a strategy of Flower. Flower is in an environment of its own."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.jobscripts.federated.flower_environment import environment, flower

SCRIPT = Path(__file__).with_name("with_flower.py")


def run(folder, rounds, *script):
    done = subprocess.run(
        [str(flower() / "python"), str(SCRIPT), str(folder), str(rounds), json.dumps(script)],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return {**json.loads(done.stdout.splitlines()[-1]), "log": done.stdout + done.stderr}


def average(clients):
    """Of the numbers of clients, each with as many samples as its number and one."""
    return sum(c * (c + 1) for c in clients) / sum(c + 1 for c in clients)


@pytest.mark.slow
def test_what_happens_to_nodes_changes_no_average(tmp_path):
    calm = run(tmp_path / "calm", 1)
    clients = calm["rounds"][0][1]
    assert len(clients) == 4
    assert sorted(client for sent in calm["sent"] for client in sent[1]) == clients
    assert calm["model"] == pytest.approx([average(clients)] * 2)

    # A node leaves with its message, another raises, and one has left before it is sent to.
    stormy = run(tmp_path / "stormy", 1, "leave", "crash", "refuse")
    assert stormy["rounds"][0][1] == clients
    assert stormy["model"] == pytest.approx(calm["model"])
    assert stormy["rounds"][0][2] >= len(stormy["sent"][0][1]), "drawn again"
    assert {word for _, _, word in stormy["sent"]} == {"leave", "crash", "refuse", ""}
    assert stormy["rounds"][0][3] == {"w": pytest.approx(average(clients))}


@pytest.mark.slow
def test_a_training_goes_on_after_the_last_round_that_counts(tmp_path):
    first = run(tmp_path / "two", 2)
    second = run(tmp_path / "two", 4, "leave")
    assert [one[0] for one in second["rounds"]] == [1, 2, 3, 4]
    assert second["rounds"][:2] == first["rounds"]
    assert second["model"] == second["result"]
    steps = [average(one[1]) for one in second["rounds"]]
    assert second["model"] == pytest.approx([sum(steps)] * 2)


@pytest.mark.slow
def test_a_failing_client_costs_itself_only(tmp_path):
    calm = run(tmp_path / "calm", 1)
    tried = run(tmp_path / "tried", 1, "raise", "")
    assert tried["rounds"][0][1] == calm["rounds"][0][1], "it is tried again, and averaged"
    assert tried["model"] == pytest.approx(calm["model"])
    first, bad = tried["sent"][0][1], tried["sent"][0][1][0]
    assert [sent[1] for sent in tried["sent"]].count([bad]) == 1
    assert len(first) > 1
    words = f"the training of client {bad} failed (1 of 3 times; it is tried again): ValueError"
    assert words in " ".join(tried["log"].split())

    dropped = run(tmp_path / "dropped", 1, "raise", "", "raise-all", "raise-all")
    clients = [client for client in calm["rounds"][0][1] if client != bad]
    assert dropped["rounds"][0][1] == clients
    assert dropped["model"] == pytest.approx([average(clients)] * 2)
    assert f"client {bad} failed (3 of 3 times; it is left out" in " ".join(dropped["log"].split())
