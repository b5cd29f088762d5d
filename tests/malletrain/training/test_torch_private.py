"""The private parts of torch that MalleTrain uses, under the torch that is installed; ``make
torch-matrix`` runs it with the oldest and the newest one.
"""

import re
from datetime import timedelta
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

import malletrain  # noqa: E402
from malletrain.training import torch_private  # noqa: E402


@pytest.mark.parametrize("purpose", torch_private.PARTS)
def test_the_installed_torch_has_every_part(purpose):
    assert torch_private.missing(purpose) == []


def test_a_part_that_is_missing_is_named_in_a_sentence(monkeypatch):
    monkeypatch.delattr(dist.distributed_c10d, "_world")
    missing = r"has no .*_world\.group_count, which live mode needs\. "
    with pytest.raises(RuntimeError, match=missing):
        torch_private.require("live mode")


def test_a_scaler_forgets_that_it_unscaled():
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(weight.sum()).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.unscale_(optimizer)
    torch_private.forget_unscaling(scaler)
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"A step with a object cannot be repeated: torch .*\."):
        torch_private.forget_unscaling(object())


@pytest.mark.filterwarnings("error::FutureWarning")
def test_a_group_that_came_to_nothing_leaves_the_next_one_its_number():
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        torch_private.set_timeout(dist.group.WORLD, timedelta(minutes=3))
        dist.all_reduce(torch.ones(1))
    finally:
        dist.destroy_process_group()
    torch_private.forget_failed_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.destroy_process_group()


def test_no_other_file_touches_them():
    private = re.compile(
        r"\b(torch|dist)\.[a-z_.0-9]*\._\w|\._(per_optimizer_states|worker_group|pcontext|reducer)\b"
    )
    room = Path(malletrain.__file__).parent
    paths = {
        str(path.relative_to(room))
        for path in room.rglob("*.py")
        if private.search(path.read_text())
    }
    assert paths == {"training/torch_private.py"}
