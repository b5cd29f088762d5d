"""Loader workers of DataLoaders that name none. Each case is a process of its own, because torch's
class is changed: a fork of one that has imported torch, unless MalleTrain is to be imported first.
"""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("torch")

HEAD = """
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
class Numbers(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return index
class Endless(IterableDataset):
    def __iter__(self):
        return iter(range(8))
"""
IMPORTS = ("import malletrain\nimport torch\n", "import torch\nimport malletrain\n")
FORKS = """
import json, os, sys, torch
for line in sys.stdin:
    program, environment = json.loads(line)
    reader, writer = os.pipe()
    if os.fork() == 0:
        try:
            os.dup2(writer, 1)
            os.environ.update(environment)
            exec(program, {"__name__": "__main__"})
            sys.stdout.flush()
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader) as output:
        print(json.dumps(output.read()), flush=True)
    os.wait()
"""
"""Runs each program that it is sent, with more variables, and answers what it has printed."""
SAMPLER = "sampler = malletrain.ElasticSampler(8, global_batch_size=2)\n"


def rank_0() -> dict[str, str]:
    """The variables of the only rank, for which no number was chosen."""
    environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "1"}
    environment.pop("MALLETRAIN_LOADER_WORKERS", None)
    return environment


@pytest.fixture(scope="module")
def forks():
    """The process that has imported torch."""
    with subprocess.Popen(
        [sys.executable, "-c", FORKS],
        env=rank_0(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process
        process.stdin.close()


@pytest.fixture
def printed(forks):
    """What a program prints in its first line, with a number of loader workers."""

    def run(program: str, number: str = "2") -> str:
        more = {"MALLETRAIN_LOADER_WORKERS": number, "MALLETRAIN_SOCKET": "/nowhere"}
        environment = more if number else {}
        if program.startswith(IMPORTS[1]):
            forks.stdin.write(json.dumps([program, environment]) + "\n")
            forks.stdin.flush()
            return json.loads(forks.stdout.readline()).split("\n")[0]
        done = subprocess.run(
            [sys.executable, "-c", program],
            env={**rank_0(), **environment},
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.split("\n")[0]

    return run


def test_a_loader_that_names_no_number_has_the_chosen_one(printed):
    loader = "loader = DataLoader(Numbers(), batch_sampler=sampler)\n"
    show = "print(loader.num_workers, sorted(int(i) for batch in loader for i in batch))"
    program = IMPORTS[1] + HEAD + SAMPLER + loader + show
    assert printed(program) == "2 [0, 1, 2, 3, 4, 5, 6, 7]"
    assert printed(program, "") == "0 [0, 1, 2, 3, 4, 5, 6, 7]"


@pytest.mark.parametrize("imports", IMPORTS)
def test_the_import_of_malletrain_is_enough(printed, imports):
    """Without a use of anything of it, and whichever is imported first."""
    loader = "loader = DataLoader(Numbers())\n"
    show = "print(loader.num_workers, [int(i) for batch in loader for i in batch])"
    assert printed(imports + HEAD + loader + show) == "2 [0, 1, 2, 3, 4, 5, 6, 7]"
    environment = {**os.environ, "RANK": "0", "MALLETRAIN_SOCKET": "/nowhere"}
    environment.pop("MALLETRAIN_LOADER_WORKERS", None)
    program = "import sys, malletrain; print('torch' in sys.modules)"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n", "without a number torch is the script's to import"


@pytest.mark.parametrize(
    ("loader", "workers"),
    [
        ("DataLoader(Numbers())", 2),
        ("DataLoader(dataset=Numbers(), shuffle=True)", 2),
        ("DataLoader(Numbers(), num_workers=0)", 0),
        ("DataLoader(Numbers(), num_workers=1)", 1),
        ("DataLoader(Numbers(), 2, False, None, None, 1)", 1),
        ("DataLoader(Numbers(), 2, False)", 2),
        ("DataLoader(Endless())", 0),
        ("DataLoader(Endless(), num_workers=malletrain.loader_workers())", 2),
    ],
)
def test_only_loaders_that_name_no_number_of_datasets_without_an_order_of_their_own(
    printed, loader, workers
):
    head = IMPORTS[1] + HEAD + "malletrain.loader_workers()\n"
    assert printed(f"{head}print({loader}.num_workers)") == str(workers)


def test_nothing_else_of_a_loader_changes(printed):
    head = IMPORTS[1] + HEAD + "plain = DataLoader(Numbers(), num_workers=2)\n"
    attributes = "('num_workers', 'prefetch_factor', 'persistent_workers', 'timeout', 'pin_memory')"
    same = (
        f"print(all(getattr(plain, a) == getattr(DataLoader(Numbers()), a) for a in {attributes}))"
    )
    assert printed(head + same) == "True"


@pytest.mark.parametrize("number", ["", "0", "many", "-1"])
def test_without_a_usable_number_torch_is_left_alone(printed, number):
    program = (
        IMPORTS[1] + HEAD + "print(malletrain.loader_workers(), DataLoader(Numbers()).num_workers)"
    )
    assert printed(program, number) == "0 0"


@pytest.mark.parametrize(
    ("before", "options", "method"),
    [
        ("", "", "fork"),
        ("", ", multiprocessing_context='spawn'", "spawn"),
        ("multiprocessing.set_start_method('spawn')\n", "", None),
    ],
)
def test_workers_are_forked_unless_the_script_says_otherwise(printed, before, options, method):
    """Also where that is not the default, as from Python 3.14 on."""
    newer = (
        "import multiprocessing\n"
        "multiprocessing.get_all_start_methods = lambda: ['forkserver', 'fork', 'spawn']\n"
    )
    loader = f"DataLoader(Numbers(){options}).multiprocessing_context"
    show = f"print(getattr({loader}, '_name', None))"
    assert printed(IMPORTS[1] + HEAD + newer + before + show) == str(method)
