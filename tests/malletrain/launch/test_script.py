"""A script that a worker runs behaves as if python had been started for it, and its process ends
without taking C++ libraries down.
"""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from malletrain.launch import script as runner
from tests.malletrain import forked_programs

FORKED = (
    "import sys; from malletrain.launch import script; from malletrain.launch.fork_server import "
    "_run_script; script.leave(_run_script(sys.argv[1:]))"
)
WAYS = {
    "forked": [sys.executable, "-c", FORKED],
    "cold": [sys.executable, "-u", runner.__file__],
}

COLD = f"import runpy; runpy.run_path({runner.__file__!r}, run_name='__main__')"
WARM_WAYS = {"forked": FORKED, "cold": COLD}
"""The same in a process that has imported torch."""

SCRIPTS = {
    "plain": "print('hello', __name__)",
    "arguments": "import sys; print(sys.argv[1:], sys.argv[0] == __file__)",
    "path": "import sys; print(sys.path[0])",
    "exit number": "import sys; sys.exit(7)",
    "exit none": "import sys; sys.exit()",
    "exit true": "import sys; sys.exit(True)",
    "exit text": "import sys; sys.exit('no data')",
    "error": "def f():\n    raise ValueError('wrong shape')\nf()",
    "chained": "try:\n    {}['x']\nexcept KeyError as e:\n    raise RuntimeError('no x') from e",
    "interrupted": "raise KeyboardInterrupt",
    "syntax": "def f(:\n    pass\n",
    "atexit": "import atexit; atexit.register(print, 'bye'); print('main')",
    "atexit after an error": "import atexit; atexit.register(print, 'bye'); 1 / 0",
    "thread": "import threading, time\ndef f(): time.sleep(0.1); print('thread "
    "done')\nthreading.Thread(target=f).start()\nprint('main')",
    "daemon thread": "import threading, time\ndef f():\n    while True: time.sleep(0.001); len(A)\n"
    "A = [1]\nthreading.Thread(target=f, daemon=True).start()\nprint('main')",
    "neighbour": "import neighbour; print(neighbour.VALUE)",
    "pickle": "import pickle\nclass A: "
    "pass\nprint(type(pickle.loads(pickle.dumps(A()))).__module__)",
    "spawn": "import multiprocessing as m\ndef f(q): q.put(41 + 1)\nif __name__ == "
    "'__main__':\n    c = m.get_context('spawn')\n"
    "    q = c.Queue()\n    p = c.Process(target=f, args=(q,)); p.start(); print(q.get()); "
    "p.join()",
    "unprintable": "import sys; sys.stdout.buffer.write(b'\\xff\\n')",
    "fresh library": "import malletrain; print(malletrain.report(1))",
    "signal": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "exit from a function": """
import sys, threading, queue
class Prefetcher:
    def __init__(self):
        self.requests = queue.Queue()
        threading.Thread(target=self.requests.get).start()
    def __del__(self):
        self.requests.put(None)
        print("saved")
def main():
    prefetcher = Prefetcher()
    try:
        raise KeyError("x")
    except KeyError:
        sys.exit(143)
main()
""",
    "deleted": "class A:\n    def __del__(self): print('deleted')\na = A()\nb = [A()]; b.append(b)",
}
WRITTEN = {
    "a file": "f = open('out', 'w'); f.write('x' * 100)",
    "a file of a module": "import neighbour; neighbour.LOG = open('out', 'wb'); "
    "neighbour.LOG.write(b'x')",
    "a compressed file": "import gzip, neighbour; neighbour.LOG = gzip.GzipFile('out', 'wb', "
    "mtime=0); neighbour.LOG.write(b'x')",
    "an archive": "import zipfile; z = zipfile.ZipFile('out', 'w'); "
    "z.writestr(zipfile.ZipInfo('a'), 'x')",
    "a file after an error": "f = open('out', 'w'); f.write('x'); 1 / 0",
    "a file after exit": "import sys; f = open('out', 'w'); f.write('x'); sys.exit(3)",
}


def outcome(command, directory):
    done = subprocess.run(command, capture_output=True, cwd=directory)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def here(tmp_path):
    (tmp_path / "neighbour.py").write_text("VALUE = 'next door'")
    return tmp_path


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SCRIPTS)
def test_as_if_python_had_been_started(here, name, way):
    (here / "script.py").write_text(SCRIPTS[name])
    argv = [str(here / "script.py"), "one", "two words", "-x"]
    assert outcome([*WAYS[way], *argv], "/") == outcome([sys.executable, *argv], "/")


@pytest.mark.parametrize("way", WAYS)
def test_a_linked_script_imports_what_is_beside_the_original(here, way):
    (here / "script.py").write_text(
        "import sys, neighbour\nprint(neighbour.VALUE, sys.path[0], sys.argv[0] == __file__)"
    )
    experiment = here / "runs" / "one"
    experiment.mkdir(parents=True)
    (experiment / "neighbour.py").write_text("VALUE = 'another'")
    (experiment / "train.py").symlink_to("../../script.py")
    (here / "latest").symlink_to("runs/one")
    argv = [str(here / "latest" / "train.py")]
    assert outcome([*WAYS[way], *argv], "/") == outcome([sys.executable, *argv], "/")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", WRITTEN)
def test_what_was_written_is_on_disk(here, name, way):
    (here / "script.py").write_text(WRITTEN[name])
    path = str(here / "script.py")
    plain = outcome([sys.executable, path], here)
    expected = (here / "out").read_bytes()
    (here / "out").unlink()
    launched = outcome([*WAYS[way], path], here)
    assert launched[:2] == plain[:2]
    if b"Exception ignored" not in plain[2]:  # of gzip in Python 3.14, where the modules are gone
        assert launched == plain
    assert (here / "out").read_bytes() == expected != b""


MODULES = {
    "package.train": "import sys; print(__name__, __package__, __spec__.name, sys.argv[1:]); "
    "print(sys.argv[0] == __file__, sys.path[0]); from . import other; print(other.VALUE)",
    "package": "print('the package', __name__)",
    "package.wrong": "def f():\n    raise ValueError('wrong shape')\nf()",
    "package.missing": None,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODULES)
def test_a_module_as_python_runs_it(tmp_path, name, way):
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "other.py").write_text("VALUE = 3")
    file = package / f"{name.partition('.')[2] or '__main__'}.py"
    if MODULES[name] is not None:
        file.write_text(MODULES[name])
    argv = ["-m", name, "one", "-x"]
    assert outcome([*WAYS[way], *argv], tmp_path) == outcome([sys.executable, *argv], tmp_path)


@pytest.mark.parametrize("way", WAYS)
def test_a_script_that_is_not_there_is_told_in_a_sentence(tmp_path, way):
    code, _, errors = outcome([*WAYS[way], str(tmp_path / "gone.py")], "/")
    assert code == 2
    assert b"gone.py: No such file" in errors
    assert b"Traceback" not in errors


# The store is lost while the interpreter ends, as it is when a job's other ranks are done first.
WAITS_IN_CPP = """
import subprocess, sys, threading, time
import torch.distributed as dist
server = subprocess.Popen([sys.executable, "-c",
    "import os, sys, torch.distributed as dist;"
    "store = dist.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False);"
    "print(store.port, flush=True); sys.stdin.read(1); os._exit(0)"],
    stdin=subprocess.PIPE, stdout=subprocess.PIPE)
port = int(server.stdout.readline())
store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
begun = threading.Event()
def wait():
    begun.set()
    store.wait(["never"])
threading.Thread(target=wait, daemon=True).start()
class Last:
    "What ends when the interpreter takes down what it holds."
    def __del__(self, server=server, sleep=time.sleep):
        server.communicate(b"x")
        sleep(0.3)  # the thread comes back from C++
sys.last = Last()
begun.wait()
print("trained to the end", flush=True)
"""


@pytest.mark.thorough
def test_a_thread_in_cpp_does_not_fail_a_script_that_is_done(tmp_path):
    pytest.importorskip("torch")
    (tmp_path / "script.py").write_text(WAITS_IN_CPP)
    code, output, _ = outcome([*WAYS["cold"], "script.py"], tmp_path)
    assert (code, output) == (0, b"trained to the end\n")


OUTLIVES = """
import gc, torch
import torch.distributed as dist
from pathlib import Path

def threads():
    return len(list(Path("/proc/self/task").iterdir()))

def train():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
    model(torch.ones(1, 1)).sum().backward()
    dist.destroy_process_group()

torch.ones(1, requires_grad=True).sum().backward()  # starts a thread for each GPU
before = threads()
for _ in range(3):  # torch itself keeps the newest one
    train()
    gc.collect()
print(threads() - before, dist.is_initialized())
"""


def test_a_group_that_a_model_outlives_stays(tmp_path):
    """The end of such a group would hold the interpreter while it waits for a thread of gloo, which
    may be waiting for the interpreter. A group has three threads.
    """
    (tmp_path / "script.py").write_text(OUTLIVES)
    result = forked_programs.run(FORKED, "script.py", folder=tmp_path)
    lines = result.output.splitlines()  # torch 2.9's gloo adds lines of its own
    assert (result.code, lines[-1:]) == (0, ["9 False"]), result.errors


CRASHES = {
    "an exit handler": """
import atexit, ctypes
atexit.register(ctypes.CDLL(None).abort)
""",
    "a destructor": """
import ctypes
class Last:
    def __del__(self, abort=ctypes.CDLL(None).abort):
        abort()
last = Last()
""",
    "a thread of C": """
import atexit, ctypes, threading, time
ended = threading.Event()
def crash():
    ended.wait()
    ctypes.CDLL(None).abort()
threading.Thread(target=crash, daemon=True).start()
atexit.register(lambda: (ended.set(), time.sleep(60)))
""",
}
CRASH_AFTER_END = "killed by signal 6 after its script had ended with code"


@pytest.mark.parametrize("code", [0, 3])
@pytest.mark.parametrize("place", CRASHES)
def test_a_crash_after_the_end_of_a_script_does_not_count(tmp_path, place, code):
    """For workers without a fork server; tests/malletrain/launch/test_fork_server.py has others."""
    text = f"{CRASHES[place]}\nimport sys\nprint('done', flush=True)\nsys.exit({code})"
    (tmp_path / "script.py").write_text(text)
    plain, _, _ = outcome([sys.executable, "script.py"], tmp_path)
    assert plain == -signal.SIGABRT
    ended, output, errors = outcome([*WAYS["cold"], "script.py"], tmp_path)
    assert (ended, output) == (code, b"done\n")
    assert f"{CRASH_AFTER_END} {code}".encode() in errors


def test_a_crash_of_a_script_counts(tmp_path):
    (tmp_path / "script.py").write_text("import ctypes; ctypes.CDLL(None).abort()")
    code, _, errors = outcome([*WAYS["cold"], "script.py"], tmp_path)
    assert code == -signal.SIGABRT
    assert CRASH_AFTER_END.encode() not in errors


STOPS_IN_THE_LAST_STEP = """
import sys
from malletrain import ElasticSampler, Snapshot
sampler = ElasticSampler(4, global_batch_size=2)
snapshot = Snapshot("run.pt", every_s=0.0, sampler=sampler)
snapshot.restore()
for epoch in sampler.epochs(2):
    for number, batch in enumerate(sampler):
        sampler.advance()
        snapshot.step()
        if sys.argv[1:] and number:
            snapshot.save()
            sys.exit(int(sys.argv[1]))
    print("after epoch", epoch)
"""


@pytest.mark.parametrize("way", WARM_WAYS)
@pytest.mark.parametrize(("code", "due"), [(143, (0, 1)), (0, (1,))])
def test_the_code_after_an_epoch_is_due_unless_the_script_ends_well(tmp_path, way, code, due):
    """As where a script's own handler of SIGTERM has it leave after the step."""
    (tmp_path / "script.py").write_text(STOPS_IN_THE_LAST_STEP)
    outputs = []
    for arguments in ([str(code)], []):
        program = (WARM_WAYS[way], "script.py", *arguments)
        ended = forked_programs.run(*program, folder=tmp_path)
        outputs.append((ended.code, ended.output))
    assert outputs == [(code, ""), (0, "".join(f"after epoch {epoch}\n" for epoch in due))]
