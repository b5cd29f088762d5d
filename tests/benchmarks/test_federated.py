"""The parts of ``benchmarks/federated.py``, and a short run of it."""

from __future__ import annotations

import gzip
import json
from random import Random

import numpy as np
import pytest
from fedcase.clients import ClientRecord
from fedcase.node_cache import ReadAccount
from fedcase.ratio import RULES

from benchmarks import federated
from benchmarks.federated_contenders import Oort, SampleMemory, Uniform


def record(client, loss=1.0, speed=100.0, samples=10, last=1):
    return ClientRecord(client, samples, 1, loss, speed, last)


def test_oort_s_utility():
    records = [record(0, loss=4.0), record(1, loss=2.0), record(2, loss=4.0, speed=10.0)]
    utilities = Oort.utilities(records, 1)
    # ln 1 = 0: no bonus. Client 2 takes 1 s where 0.1 s is preferred: (0.1 / 1)² = 0.01.
    assert utilities == {0: 1.0, 1: 0.5, 2: pytest.approx(0.01)}
    later = Oort.utilities([record(0, last=1), record(1, last=4)], 5)
    # Not chosen for longer: sqrt(0.1 · ln 5 / 1) against sqrt(0.1 · ln 5 / 4), half of it.
    assert later[0] - 1 == pytest.approx(2 * (later[1] - 1))


@pytest.mark.parametrize("chooser", [Oort(), Uniform()])
def test_a_chooser_chooses_different_clients(chooser):
    records = [ClientRecord(n, 10) for n in range(6)] + [record(n, loss=n) for n in range(6, 12)]
    for number in range(1, 30):
        chosen = chooser.choose(records, 8, number, Random(number))
        assert len(set(chosen)) == 8


def test_a_memory_evicts_the_least_recently_used_or_nothing():
    data = [f"sample {n}" for n in range(5)]

    def reads(evict, samples):
        account, memory = ReadAccount(), SampleMemory(2, evict)
        for sample in samples:
            assert memory.read((7, sample), data, account) == data[sample]
        return account.hits, account.source_reads

    assert reads(True, [0, 1, 0, 2, 0, 1]) == (2, 4)  # 2 evicts 1
    assert reads(False, [0, 1, 2, 2, 0, 1]) == (2, 4)  # 2 never fits
    memory = SampleMemory(2, evict=True)
    assert memory.client(1, data).read([3, 3]) == [data[3]] * 2
    other = memory.client(2, data)
    assert other.read([3]) == [data[3]]
    assert (other.account.hits, other.account.source_reads) == (0, 1)


@pytest.fixture
def folder(tmp_path):
    """A data set in the format of Fashion-MNIST, whose classes are easy to tell apart."""
    random = np.random.default_rng(0)
    for part, count in (("train", 600), ("t10k", 100)):
        labels = random.integers(0, 10, count).astype(np.uint8)
        images = random.integers(0, 60, (count, 784)).astype(np.uint8)
        for row, label in zip(images, labels, strict=True):
            row[70 * int(label) : 70 * int(label) + 70] = 250
        head = bytes(16)
        (tmp_path / f"{part}-images-idx3-ubyte.gz").write_bytes(
            gzip.compress(head + images.tobytes(), 1)
        )
        (tmp_path / f"{part}-labels-idx1-ubyte.gz").write_bytes(
            gzip.compress(head[:8] + labels.tobytes(), 1)
        )
    return tmp_path


def test_a_short_run(folder, tmp_path, capsys):
    out = tmp_path / "out.json"
    federated.main(
        [
            *("--data", str(folder), "--clients", "12", "--round", "4", "--nodes", "2"),
            *("--rounds", "12", "--targets", "0.1", "1.1", "--samples-per-s", "1000000"),
            *("--json", str(out)),
        ]
    )
    rows = {row["contender"]: row for row in json.loads(out.read_text())["rows"]}
    assert list(rows) == list(federated.CONTENDERS)
    assert all(row["rounds"] == 12 for row in rows.values())
    assert all([target for target, _, _ in row["reached"]] == [0.1] for row in rows.values())
    assert all(row["accuracy"] > 0.3 for row in rows.values())
    for name in federated.RULE_OF:
        assert rows[name]["source_reads"] < rows["FedAvg + LRU"]["source_reads"]
        assert rows[name]["hits"] > 0
    assert rows["FedAvg + never evict"]["hits"] > 0
    table = capsys.readouterr().out
    assert all(name in table for name in federated.CONTENDERS)


@pytest.mark.parametrize(("contender", "rule"), federated.RULE_OF.items())
def test_a_contender_has_its_own_ratio_rule(folder, monkeypatch, contender, rule):
    rounds = []

    class Recorded(RULES[rule]):
        def choose(self, random):
            rounds.append(rule)
            return super().choose(random)

    monkeypatch.setitem(RULES, rule, Recorded)
    federated.main(
        [
            *("--data", str(folder), "--clients", "12", "--round", "4", "--nodes", "2"),
            *("--rounds", "3", "--samples-per-s", "1000000", "--contenders", contender),
        ]
    )
    assert rounds == [rule] * 3
