"""Never wrong bytes: clients that fork, in several threads, over connections that break."""

import asyncio
import json
import os
import subprocess
import sys
import threading

import pytest

from tests.jobscripts.infinicache.pool import KEY, Pool
from tests.waiting import NEVER_S, PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.check]

CLIENT = """
import json, os, random, sys, threading
from infinicache import Cache

addresses, key, seed = json.loads(sys.argv[1]), bytes.fromhex(sys.argv[2]), int(sys.argv[3])
may_miss = sys.argv[5] == "may miss"
options = {"code": (2, 1), "timeout_s": float(sys.argv[4]), "hedge_s": 0.0}
KEYS, GETS, CHILDREN, THREADS = 60, 120, 4, 2

def expected(number):
    return random.Random(number).randbytes(3000 + 7 * number)

def check(cache, rng, gets=GETS):
    '''The gets that gave other bytes than were put.'''
    wrong = 0
    for _ in range(gets):
        number = rng.randrange(KEYS)
        value = cache.get(f"k{number}")
        wrong += value != expected(number) and (value is not None or not may_miss)
    return wrong

with Cache(addresses, key, **options) as cache:
    for number in range(KEYS):
        cache.put(f"k{number}", expected(number))
    assert not check(cache, random.Random(seed), 5)  # its connections are open
    print("ready", flush=True)
    children = []
    for child in range(CHILDREN):
        if (pid := os.fork()) == 0:
            os._exit(min(255, check(cache, random.Random(seed + child))))
        children.append(pid)
    wrong = []

    def other_client(number):
        with Cache(addresses, key, **options) as own:
            wrong.append(check(own, random.Random(seed - number)))

    threads = [threading.Thread(target=other_client, args=(n,)) for n in range(1, 1 + THREADS)]
    for thread in threads:
        thread.start()
    wrong.append(check(cache, random.Random(seed + 100)))
    for thread in threads:
        thread.join()
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    wrong.append(check(cache, random.Random(seed + 200)))  # its children have ended
print(json.dumps({"own": wrong, "children": codes}))
"""


class PoolThread(threading.Thread):
    """A pool in a loop of its own."""

    def __init__(self):
        super().__init__(daemon=True)
        self.ready, self.addresses, self.pool = threading.Event(), [], None
        self.start()
        assert self.ready.wait(PATIENCE_S)

    def run(self):
        asyncio.run(self._serve())

    async def _serve(self):
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        self.pool = Pool(4)
        self.addresses = [node.address for node in self.pool.nodes]
        self.ready.set()
        await self._over.wait()
        await self.pool.close()

    def break_connections(self):
        """Close what clients have open."""

        def hang_up():
            for node in self.pool.nodes[1:]:
                for connection in list(node.server.connections):
                    connection.close()

        self._loop.call_soon_threadsafe(hang_up)

    def grow(self):
        """Four nodes join."""

        async def join():
            for _ in range(4):
                self.pool.join()

        asyncio.run_coroutine_threadsafe(join(), self._loop).result(PATIENCE_S)

    def shrink(self):
        """The first four nodes leave with notice."""

        async def leave():
            for node in self.pool.nodes[:4]:
                await self.pool.leave(node)

        asyncio.run_coroutine_threadsafe(leave(), self._loop).result(PATIENCE_S)

    def stop(self):
        self._loop.call_soon_threadsafe(self._over.set)
        self.join(PATIENCE_S)


@pytest.fixture
def served():
    thread = PoolThread()
    yield thread
    thread.stop()


def client(served, program, *arguments):
    path = os.pathsep.join(entry for entry in sys.path if entry)
    argv = [sys.executable, "-c", program, json.dumps(served.addresses), KEY.hex(), *arguments]
    return subprocess.Popen(
        argv,
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("breaks", [False, True])
def test_forks_threads_and_broken_connections_give_no_other_bytes(served, any_seed, breaks):
    may_miss = "may miss" if breaks else "hits"
    process = client(served, CLIENT, str(any_seed(1)), str(NEVER_S), may_miss)
    assert process.stdout.readline() == "ready\n", process.stderr.read()
    while breaks:
        served.break_connections()
        try:
            process.wait(0.05)
            break
        except subprocess.TimeoutExpired:
            continue
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    seen = json.loads(out)
    assert seen == {"own": [0, 0, 0, 0], "children": [0, 0, 0, 0]}


FORKED = """
import json, os, pickle, sys
from infinicache import Cache

addresses, key = json.loads(sys.argv[1]), bytes.fromhex(sys.argv[2])
with Cache(addresses, key) as cache:
    cache.put("k", b"x")
    print("ready", flush=True)
    sys.stdin.readline()
    cache.put("k", b"y")
    assert cache.get("k") == b"y"
    print("ready", flush=True)
    sys.stdin.readline()
    copy = pickle.loads(pickle.dumps(cache))
    if (pid := os.fork()) == 0:
        os._exit(0 if cache.get("k") == b"y" else 1)
    assert os.waitpid(pid, 0)[1] == 0, "the child"
    assert copy.get("k") == b"y"
    copy.close()
"""


def test_a_child_knows_the_members_that_its_parent_has_learned(served):
    """Those that the cache was made with are gone."""
    process = client(served, FORKED)
    assert process.stdout.readline() == "ready\n", process.stderr.read()
    served.grow()
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.stdout.readline() == "ready\n", process.stderr.read()
    served.shrink()
    _, err = process.communicate("\n", timeout=PATIENCE_S)
    assert process.returncode == 0, err


LOADER = """
import json, sys
import torch
from infinicache import Cache

addresses, key = json.loads(sys.argv[1]), bytes.fromhex(sys.argv[2])

class Samples(torch.utils.data.Dataset):
    def __init__(self, cache):
        self.cache = cache

    def __len__(self):
        return 200

    def __getitem__(self, number):
        value = self.cache.get(f"sample {number}")
        return torch.frombuffer(value, dtype=torch.int64)

cache = Cache(addresses, key)
for number in range(200):
    cache.put(f"sample {number}", torch.full((50,), number).numpy())
assert cache.get("sample 0") is not None
samples = torch.utils.data.DataLoader(
    Samples(cache), batch_size=10, num_workers=3, shuffle=True, multiprocessing_context="fork"
)
for epoch in range(2):
    seen = torch.cat([batch for batch in samples])
    assert torch.equal(seen, seen[:, :1].expand(-1, 50)), "a sample has parts of another"
    assert sorted(seen[:, 0].tolist()) == list(range(200))
    assert cache.stat("sample 7").size == 400, "the parent goes on"
cache.close()
"""


def test_workers_of_a_data_loader_read_over_the_cache_of_their_parent(served):
    pytest.importorskip("torch")
    process = client(served, LOADER)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err


STREAM = """
import json, os, sys
from infinicache import Cache, CacheError

addresses, key = json.loads(sys.argv[1]), bytes.fromhex(sys.argv[2])
cache = Cache(addresses, key, stripe_bytes=1000)
cache.put("k", bytes(3000))
stream = cache.get_stream("k")
next(stream)
if (pid := os.fork()) == 0:
    try:
        next(stream)
    except CacheError as error:
        cache.close()
        cache.close()
        os._exit(7 if "begun before a fork" in str(error) else 1)
    os._exit(2)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
assert sum(map(len, stream)) == 2000, "the parent reads on"
if (pid := os.fork()) == 0:
    cache.close()  # without a call of its own
    sys.exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
assert cache.get("k") == bytes(3000)
"""


def test_a_fork_that_closes_leaves_its_parent_alone(served):
    process = client(served, STREAM)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    assert "Exception" not in err


SPAWNED = """
import json, sys
import multiprocessing
from infinicache import Cache

def read(cache, number):
    with cache:
        return bytes(cache.get(f"k{number}"))

if __name__ == "__main__":
    cache = Cache(json.loads(sys.argv[1]), bytes.fromhex(sys.argv[2]), code=(2, 1), near_bytes=99)
    for number in range(2):
        cache.put(f"k{number}", bytes([number] * 500))
    with multiprocessing.get_context("spawn").Pool(2) as workers:
        values = workers.starmap(read, [(cache, number) for number in range(2)])
    assert values == [bytes([number] * 500) for number in range(2)]
    assert cache.get("k1") == bytes([1] * 500), "the parent goes on"
    cache.close()
"""


def test_a_worker_that_is_spawned_has_connections_of_its_own(served, tmp_path):
    script = tmp_path / "spawned.py"
    script.write_text(SPAWNED)
    process = client(served, f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')")
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
