"""Every process computes the same owner, and a change of nodes changes no more than it must."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from types import SimpleNamespace

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from malletrain.datacache import reader as reader_module
from malletrain.datacache import serving
from malletrain.datacache.members import Members, members_file, write_members
from malletrain.datacache.reader import SamplePeers, intact_samples, owners
from malletrain.datacache.serving import SampleService, data_key
from malletrain.datacache.store import DataSetIdentity, attach, check_sum, private_data_folder
from tests.waiting import NEVER_S, PATIENCE_S, until

NODES = st.lists(st.text("abcn0123/.", min_size=1, max_size=8), min_size=1, max_size=9, unique=True)
SAMPLES = st.lists(st.integers(0, 10**9), max_size=60)
KNOWN = ["n2", "n3", "n3", "n1", "n1", "n2", "n3", "n2", "n2", "n2", "n2", "n3"]
"""Owners of samples 0 to 11 among n1, n2 and n3, computed with whole numbers of Python."""


def test_a_known_answer_that_no_release_may_change():
    # Nodes of different releases in one job must agree.
    assert owners(range(12), ["n1", "n2", "n3"]) == KNOWN


@given(SAMPLES, NODES, st.randoms(use_true_random=False))
def test_the_order_of_the_nodes_does_not_matter(samples, nodes, random):
    shuffled = random.sample(nodes, len(nodes))
    assert owners(samples, nodes) == owners(samples, shuffled)
    assert set(owners(samples, nodes)) <= set(nodes)


@given(SAMPLES, NODES)
def test_only_the_samples_of_a_node_that_leaves_get_another_owner(samples, nodes):
    if len(nodes) < 2:
        return
    gone, *rest = nodes
    before, after = owners(samples, nodes), owners(samples, rest)
    for old, new in zip(before, after, strict=True):
        assert new == old or old == gone


def test_nodes_own_equal_shares_and_a_newcomer_takes_evenly_from_all():
    nodes, samples = [f"n{n}" for n in range(8)], range(40_000)
    before = owners(samples, nodes)
    for count in Counter(before).values():
        assert count == pytest.approx(5_000, rel=0.06)  # 4.5 standard deviations of a fair draw
    after = owners(samples, [*nodes, "newcomer"])
    moved = Counter(old for old, new in zip(before, after, strict=True) if new != old)
    assert sum(moved.values()) == pytest.approx(40_000 / 9, rel=0.06)
    assert set(moved) == set(nodes)
    assert max(moved.values()) < 2 * min(moved.values())


def test_a_job_without_nodes_is_refused():
    with pytest.raises(ValueError, match="without nodes"):
        owners([1], [])


pytestmark = pytest.mark.slow
SECRET = b"the secret of a job"
DATA = DataSetIdentity("imagenet", 100, 7)
MIB = 1 << 20
PAUSES_S = (reader_module.MIN_PAUSE_S, reader_module.MAX_PAUSE_S)


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    monkeypatch.setattr(reader_module, "ANSWER_S", PATIENCE_S)
    monkeypatch.setattr(reader_module, "MIN_PAUSE_S", NEVER_S)
    monkeypatch.setattr(reader_module, "MAX_PAUSE_S", NEVER_S)


@contextlib.contextmanager
def node(folder, data=DATA, memory=MIB):
    """A node that serves a store."""
    store = attach(private_data_folder(folder), data, memory)
    service = SampleService(folder, SECRET, "127.0.0.1")
    try:
        yield store, service
    finally:
        service.close()
        store.close()


@pytest.fixture
def client():
    made = SamplePeers(data_key(SECRET), DATA)
    yield made
    made.close()


def test_samples_of_several_nodes_come_in_one_call(tmp_path, client):
    with node(tmp_path / "a") as (one, first), node(tmp_path / "b") as (other, second):
        for sample in range(10):
            (one if sample < 5 else other).put(sample, b"%d" % sample * 100)
        samples = client.fetch({first.address: [0, 3, 77], second.address: [9, 4]})
        assert {s: bytes(data) for s, data in samples.items()} == {
            s: b"%d" % s * 100 for s in (0, 3, 9)
        }


def test_the_pauses_after_a_node_that_does_not_answer_grow_and_are_bounded(client, monkeypatch):
    monkeypatch.setattr(reader_module, "MIN_PAUSE_S", PAUSES_S[0])
    monkeypatch.setattr(reader_module, "MAX_PAUSE_S", PAUSES_S[1])
    now = 1000.0
    monkeypatch.setattr(reader_module, "time", SimpleNamespace(monotonic=lambda: now))
    with socket.socket() as closed:  # nobody listens there
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        for pause_s in (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0):
            assert client.takes(address)
            assert client.fetch({address: [1]}) == {}
            now += pause_s - 0.01
            assert not client.takes(address)
            now += 0.02


def test_a_fetched_sample_can_be_changed_by_its_reader(tmp_path, client):
    with node(tmp_path / "a") as (store, service):
        store.put(1, b"abcd")
        client.fetch({service.address: [1]})[1][:] = b"oops"
        assert bytes(store.get(1)) == b"abcd"


def test_an_answer_is_of_limited_size_and_the_rest_follows(tmp_path, client, monkeypatch):
    monkeypatch.setattr(serving, "MAX_BATCH_BYTES", 2500)
    with node(tmp_path / "a") as (store, service):
        for sample in range(20):
            store.put(sample, b"x" * 1000)
        samples = client.fetch({service.address: list(range(30))})
        assert sorted(samples) == list(range(20))


def test_the_owner_keeps_what_it_is_handed_until_it_is_full(tmp_path, client):
    with node(tmp_path / "a", memory=32 * 1024) as (store, service):
        assert client.takes(service.address)
        client.offer({service.address: {1: b"one", 2: b"two"}})
        assert (bytes(store.get(1)), bytes(store.get(2))) == (b"one", b"two")
        client.offer({service.address: dict.fromkeys(range(3, 60), b"x" * 4000)})
        assert store.count() < 12
        assert not client.takes(service.address)


def test_a_sample_that_is_damaged_on_the_way_is_not_kept_and_not_used(tmp_path, client):
    with node(tmp_path / "a") as (store, service):
        request = serving.SampleRequests(tmp_path / "a")
        request.put("imagenet", 100, 7, [1, 2], [3, 3], [check_sum(1, b"one"), 99], b"onetwo")
        assert (1 in store, 2 in store) == (True, False)
        request.put("imagenet", 100, 7, [3], [10], [check_sum(3, b"short")], b"short")
        assert 3 not in store
        head = {"samples": [1, 2], "sizes": [3, 3], "sums": [check_sum(1, b"one"), 5]}
        assert list(intact_samples(head, b"onetwo")) == [1]
        assert service


@pytest.mark.parametrize(
    "other",
    [
        DataSetIdentity("imagenet", 99, 7),
        DataSetIdentity("imagenet", 100, 8),
        DataSetIdentity("another", 100, 7),
    ],
    ids=["length", "samples", "name"],
)
def test_another_data_set_gets_nothing(tmp_path, other):
    with node(tmp_path / "a") as (store, service):
        store.put(1, b"one")
        client = SamplePeers(data_key(SECRET), other)
        assert client.fetch({service.address: [1]}) == {}
        client.offer({service.address: {2: b"two"}})
        assert 2 not in store
        client.close()


def test_another_job_gets_nothing(tmp_path):
    with node(tmp_path / "a") as (store, service):
        store.put(1, b"one")
        stranger = SamplePeers(data_key(b"the secret of another job"), DATA)
        assert stranger.fetch({service.address: [1]}) == {}
        assert not stranger.takes(service.address)  # it is not asked again for some time
        stranger.close()


def test_a_node_that_is_gone_has_no_samples_and_comes_back(tmp_path, client, monkeypatch):
    monkeypatch.setattr(reader_module, "MIN_PAUSE_S", 0.0)
    with node(tmp_path / "a") as (store, service):
        store.put(1, b"one")
        assert list(client.fetch({service.address: [1]})) == [1]
        address = service.address
    assert client.fetch({address: [1]}) == {}
    client.offer({address: {2: b"two"}})
    with node(tmp_path / "a") as (store, service):
        assert list(client.fetch({service.address: [1]})) == [1]


def test_a_node_that_failed_is_not_asked_for_some_time(tmp_path, client, monkeypatch):
    with node(tmp_path / "a") as (_, service):
        address = service.address
    assert client.fetch({address: [1]}) == {}
    calls = []
    monkeypatch.setattr(client, "_fetch", lambda *a: calls.append(a))
    assert client.fetch({address: [1], "": [2]}) == {}
    assert calls == []


STILL = """
import sys, time
from pathlib import Path
from malletrain.datacache.serving import SampleService
service = SampleService(Path(sys.argv[1]), b"the secret of a job", "127.0.0.1")
print(service.address, flush=True)
time.sleep(10000)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_node_that_is_killed_or_stands_still_costs_one_wait(tmp_path, client, monkeypatch, how):
    with node(tmp_path / "a") as (store, _):
        store.put(1, b"one")
        process = subprocess.Popen(
            [sys.executable, "-c", STILL, str(tmp_path / "a")], stdout=subprocess.PIPE, text=True
        )
        try:
            address = process.stdout.readline().strip()
            assert list(client.fetch({address: [1]})) == [1]
            process.send_signal(how)
            if how == signal.SIGKILL:
                process.wait()
            else:
                until(lambda: psutil.Process(process.pid).status() == "stopped", "it stands still")
                monkeypatch.setattr(reader_module, "ANSWER_S", 0.2)
            assert client.fetch({address: [1]}) == {}
            assert not client.takes(address)
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


def test_a_forked_process_has_connections_of_its_own(tmp_path, client):
    with node(tmp_path / "a") as (store, service):
        for sample in range(50):
            store.put(sample, b"%02d" % sample * 50)
        assert list(client.fetch({service.address: [1]})) == [1]
        children = []
        for child in range(3):
            if (pid := os.fork()) == 0:
                samples = client.fetch({service.address: list(range(child, 50, 3))})
                right = all(bytes(d) == b"%02d" % s * 50 for s, d in samples.items())
                os._exit(0 if right and len(samples) > 10 else 1)
            children.append(pid)
        samples = client.fetch({service.address: list(range(50))})
        assert [bytes(samples[s]) for s in range(50)] == [b"%02d" % s * 50 for s in range(50)]
        assert [os.waitpid(pid, 0)[1] for pid in children] == [0, 0, 0]
        assert len(client.fetch({service.address: list(range(50))})) == 50


def test_a_service_without_connections_closes(tmp_path):
    service = SampleService(private_data_folder(tmp_path / "a"), SECRET, "127.0.0.1")
    service.close()
    service.close()


# --- the file of the members ---


def test_members_are_read_again_when_the_round_changes(tmp_path):
    path = members_file(tmp_path, "job/1")
    members = Members(path, "n1")
    assert dict(members.addresses()) == {"n1": ""}
    write_members(path, {"n1": "a:1", "n2": "b:2"})
    assert dict(members.addresses()) == {"n1": "a:1", "n2": "b:2"}
    write_members(path, {"n3": "c:3"})
    assert dict(members.addresses()) == {"n1": "", "n3": "c:3"}
    path.write_text("{")
    os.utime(path, ns=(time.time_ns(), time.time_ns() + 1))
    assert dict(members.addresses()) == {"n1": ""}
    path.unlink()
    assert dict(members.addresses()) == {"n1": ""}
    assert dict(Members(None, "n1").addresses()) == {"n1": ""}
