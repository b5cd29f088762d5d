"""The random faults of benchmarks/chaos.py: its account notices what is wrong, its way between
daemon and agents does what it says, and a short run breaks no promise.
"""

from __future__ import annotations

import itertools
import json
import socket
import threading

import pytest

from benchmarks import chaos
from benchmarks.chaos_jobs import KINDS, SAMPLES, ChaosJob, script
from benchmarks.chaos_network import Way
from malletrain import ElasticSampler
from tests.hosts.exact import BATCH, SEED
from tests.ports import free_ports
from tests.torch_versions import trains_shards
from tests.waiting import until

pytestmark = pytest.mark.slow


def job(folder, steps, once=(), more=(), trace=None):
    """A training that reports ``steps`` steps, in order but for ``once`` and ``more``."""
    order = ElasticSampler(
        SAMPLES, global_batch_size=BATCH, seed=SEED, rank=0, world_size=1, max_world_size=1
    )
    due = list(itertools.islice(itertools.chain.from_iterable(order), steps * BATCH))
    record = {"where": steps * BATCH, "once": [n for n in due if n not in more], "more": [*more]}
    record["once"] = [*(n for n in record["once"] if n not in once[:1]), *once[1:]]
    (folder / "said").write_text(json.dumps(record))
    places = trace or [(n + 1) * BATCH for n in range(steps)]
    (folder / "trace").write_text("".join(f"{at} 2 n1\n" for at in places))
    return ChaosJob("j1", "restart", folder), due


def test_the_account_of_samples(tmp_path):
    made, due = job(tmp_path, 5)
    assert made.account() == {"twice": 0, "never": 0, "replayed": 0, "samples": 50}
    made, _ = job(tmp_path, 5, more=due[:3])
    assert made.account()["twice"] == 3
    stranger = next(n for n in range(SAMPLES) if n not in due)
    made, _ = job(tmp_path, 5, once=(due[0], stranger))
    assert (made.account()["never"], made.account()["twice"]) == (1, 1)
    made, _ = job(tmp_path, 5, trace=[10, 20, 30, 20, 30, 40, 50])
    assert made.account()["replayed"] == 2


@pytest.mark.parametrize("kind", [*KINDS, "memory", "memory, replicas"])
def test_the_scripts_of_its_jobs_are_python(kind):
    compile(script(kind), kind, "exec")


def test_connections_are_cut_delayed_and_left_half_open():
    port, reservation = free_ports(1)
    heard = []
    with reservation, socket.create_server(("127.0.0.1", port)) as server:
        server.settimeout(60)

        def listen():
            for _ in range(2):
                connection, _ = server.accept()
                with connection:
                    while data := _received(connection):
                        heard.append(data)

        thread = threading.Thread(target=listen)
        thread.start()
        way = Way("127.0.0.2", "127.0.0.1", port)
        try:
            with socket.create_connection(("127.0.0.2", port), timeout=60) as first:
                first.sendall(b"a")
                until(lambda: heard == [b"a"], "the first bytes arrive")
                way.cut()
                assert not _received(first), "it was reset"
            with socket.create_connection(("127.0.0.2", port), timeout=60) as second:
                second.sendall(b"b")
                until(lambda: heard == [b"a", b"b"], "a second connection is let through")
                way.half_open(True)
                second.sendall(b"c")
                way.half_open(False)
                assert not _received(second), "its bytes are lost, and it is reset"
            thread.join()
            assert heard == [b"a", b"b"]
        finally:
            way.close()


def _received(connection):
    try:
        return connection.recv(100)
    except ConnectionResetError:
        return b""


FAULTS = [(1, 10), *(pytest.param(seed, 30, marks=pytest.mark.thorough) for seed in (2, 3, 4))]
"""(seed, number of faults) over services, which need no torch."""


def run(folder, campaign):
    """All faults of the campaign happen, and no guarantee is broken."""
    counts = chaos.run(folder, campaign)
    assert {name: counts[name] for name in chaos.BROKEN} == dict.fromkeys(chaos.BROKEN, 0)
    assert counts["faults"] == campaign.faults


@pytest.mark.parametrize(("seed", "faults"), FAULTS)
def test_random_faults_in_haste_break_no_promise(tmp_path, any_seed, seed, faults):
    """In haste: most come upon the one before. What stands still does so for seconds, and the
    limits of the site are as short, so that they are reached.
    """
    campaign = chaos.Campaign(
        faults=faults,
        jobs=2,
        seed=any_seed(seed),
        nodes=3,
        running=2,
        kinds=("service",),
        hasty=0.8,
        apart_s=0.5,
        silence_s=2.5,
    )
    run(tmp_path, campaign)


@trains_shards
@pytest.mark.thorough
def test_random_faults_over_jobs_of_all_kinds_break_no_promise(tmp_path, any_seed):
    run(tmp_path, chaos.Campaign(faults=20, jobs=8, seed=any_seed(4), nodes=3, running=2))
