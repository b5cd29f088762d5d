"""Real gloo ranks for tests, cheaply: one process imports torch once and forks them.

``Ranks(scripts).run(world, function, **arguments)`` runs a function of a module beside this one on
that many ranks of a process group and returns what each returned.
"""

import gc
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import traceback
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).parents[3]


class Ranks:
    """The process that forks, started at once and ended by ``close``; ``scripts`` names the module
    that it imports.
    """

    def __init__(self, scripts):
        self._process = subprocess.Popen(
            [sys.executable, "-m", __spec__.name, scripts],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1", "MALLETRAIN_JOB": "job-1"},
        )

    def run(self, world, function, /, **arguments):
        """Return the results of ``function(**arguments)`` on each of ``world`` ranks; for a rank
        that died, its exit code.
        """
        answers = self.outcomes(world, function, **arguments)
        for rank, (state, value) in enumerate(answers):
            assert state == "returned", f"rank {rank} {state}: {value}"
        return [value for _, value in answers]

    def outcomes(self, world, function, /, **arguments):
        """(``returned``, value), (``raised``, traceback) or (``died``, exit code) of each rank."""
        pickle.dump((world, function, arguments), self._process.stdin)
        self._process.stdin.flush()
        return pickle.load(self._process.stdout)

    def close(self):
        self._process.stdin.close()
        assert self._process.wait() == 0


def _rank(rank, world, folder, function, arguments):
    import torch
    import torch.distributed as dist

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world
        )
        home = import_module(f"tests.malletrain.training.{sys.argv[1]}")
        answer = "returned", getattr(home, function)(**arguments)
    except BaseException:
        answer = "raised", traceback.format_exc()
    with open(f"{folder}/{rank}", "wb") as file:
        pickle.dump(answer, file)
    os._exit(0)  # no group is taken down: a rank that died is not waited for


def _launch(world, function, arguments):
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(world):
            child = os.fork()
            if child == 0:
                _rank(rank, world, folder, function, arguments)
            children.append(child)
        answers = {}
        while len(answers) < world:
            child, status = os.wait()
            rank = children.index(child)
            code = os.waitstatus_to_exitcode(status)
            if code != 0:
                answers[rank] = "died", code
                for other in set(children) - {child}:  # as a launcher does
                    if children.index(other) not in answers:
                        os.kill(other, signal.SIGKILL)
                continue
            with open(f"{folder}/{rank}", "rb") as file:
                answers[rank] = pickle.load(file)
        return [answers[rank] for rank in range(world)]


def main():
    """Serve requests from standard input until it is closed."""
    gc.disable()  # as a fork server does: imported objects stay
    import_module(f"tests.malletrain.training.{sys.argv[1]}")
    gc.enable()
    gc.collect()
    gc.freeze()  # no rank walks through what was imported
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what ranks print is no answer
    while True:
        try:
            request = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        pickle.dump(_launch(*request), answers)
        answers.flush()


if __name__ == "__main__":
    main()
