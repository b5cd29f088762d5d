"""The code of the workers of these tests on a GPU. Module-level, so that a fork can find it."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import malletrain
import malletrain.elastic as elastic
from malletrain import ElasticSampler
from tests.malletrain.elastic.scripts import data, model_of

GPU = "cuda:0"
"""The device of processes that share one GPU."""


def digest_of(model: torch.nn.Module) -> str:
    """The exact weights, as a text."""
    return "".join(p.detach().cpu().numpy().tobytes().hex() for p in model.parameters())


def snapshots(folder: str, precision: str, first: int, last: int, result: str) -> None:
    """Steps ``first`` to ``last`` of a training with dropout, random inputs drawn on the GPU,
    autocast and a GradScaler that begins too high; the state comes from the snapshot of before.
    """
    torch.manual_seed(1)
    torch.use_deterministic_algorithms(False)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 256), torch.nn.Dropout(0.2), torch.nn.ReLU(), torch.nn.Linear(256, 1)
    ).to(GPU)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**24, growth_interval=7)
    snapshot = malletrain.Snapshot(
        os.path.join(folder, f"{precision}.pt"),
        every_s=3600.0,
        model=model,
        optimizer=optimizer,
        scaler=scaler,
    )
    if first:
        torch.cuda.manual_seed(999)  # what the snapshot must replace
        torch.rand(5, device=GPU)
        assert snapshot.restore()
    kind = torch.float16 if precision == "fp16" else torch.bfloat16
    seen = []
    for _ in range(first, last):
        x = torch.randn(32, 64, device=GPU)
        optimizer.zero_grad()
        with torch.autocast("cuda", kind):
            loss = (model(x).float() - x.sum(1, keepdim=True)).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        seen.append(float(loss.detach()))
        snapshot.step()
    snapshot.save()
    Path(folder, result).write_text(
        json.dumps(
            {
                "losses": seen,
                "scale": scaler.get_scale(),
                "weights": digest_of(model),
                "next": torch.rand(4, device=GPU).tolist(),
            }
        )
    )


def live(folder: str, options: dict[str, Any]) -> None:
    """Epochs over numbered samples with the model on a GPU; every step that counts is a line.
    ``own_gpu``: each process has a GPU of its own.
    """
    device = f"cuda:{os.environ['LOCAL_RANK']}" if options.get("own_gpu") else GPU
    torch.cuda.set_device(device)
    set_ = data(options["samples"])
    model = model_of(options.get("kind", "tanh")).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    sampler = ElasticSampler(len(set_), global_batch_size=16, seed=5)
    run = elastic.Run(model=model, optimizer=optimizer, sampler=sampler, device=device)
    used = torch.compile(model) if options.get("compile") else model
    net = run.ddp(used)
    loader = DataLoader(set_, batch_sampler=sampler)
    log = os.open(
        os.path.join(folder, f"steps-{os.getpid()}"), os.O_WRONLY | os.O_APPEND | os.O_CREAT
    )
    for epoch in sampler.epochs(options.get("epochs", 1)):
        for x, y, numbers in run.batches(loader):
            with run.step() as step:
                optimizer.zero_grad()
                loss = torch.nn.functional.binary_cross_entropy_with_logits(
                    net(x.to(device)), y.to(device)
                )
                loss = loss * run.loss_weight
                loss.backward()
                optimizer.step()
                time.sleep(options.get("sleep", 0.0))
            if step.aborted:
                continue
            record = {
                "step": run.steps_done - 1,
                "epoch": epoch,
                "seen": numbers.tolist(),
                "loss": float(loss.detach()),
                "rank": step.rank,
                "size": step.world_size,
                "generation": step.generation,
                "digest": run.digest(),
            }
            os.write(log, json.dumps(record).encode() + b"\n")
            while (
                run.steps_done in options.get("gates", ())
                and not Path(folder, f"go-{run.steps_done}").exists()
            ):
                time.sleep(0.005)
            if Path(folder, "stop").exists():
                run.request_stop()


def nccl_rounds(folder: str) -> None:
    """NCCL formed, used and destroyed three times in one process, in the same group of one."""
    took = []
    for _ in range(3):
        began = time.monotonic()
        dist.init_process_group(
            "nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device(GPU)
        )
        numbers = torch.arange(1000.0, device=GPU)
        dist.all_reduce(numbers)
        torch.cuda.synchronize()
        assert numbers.sum().item() == 499500.0
        formed = time.monotonic() - began
        began = time.monotonic()
        dist.destroy_process_group()
        took.append((formed, time.monotonic() - began))
    Path(folder, "took").write_text(json.dumps(took))


def nccl_aborted(folder: str) -> None:
    """A group whose stream is busy is aborted as live mode does, and formed again."""
    took = []
    for _ in range(2):
        dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
        numbers = torch.ones(1000, device=GPU)
        dist.all_reduce(numbers)
        torch.cuda._sleep(4_000_000_000)  # noqa: SLF001 (some 2 s of the GPU)
        dist.all_reduce(numbers, async_op=True)
        began = time.monotonic()
        dist.group.WORLD.abort()
        took.append(time.monotonic() - began)
        dist.destroy_process_group()
        torch.cuda.synchronize()
    Path(folder, "took").write_text(json.dumps(took))


def nccl_busy(folder: str) -> None:
    """Stay for a minute in a kernel and a collective that waits for it; the test kills the
    process.
    """
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    numbers = torch.ones(256 << 20, device=GPU)  # 1 GiB, to see it given back
    dist.all_reduce(numbers)
    torch.cuda.synchronize()
    torch.cuda._sleep(100_000_000_000)  # noqa: SLF001
    dist.all_reduce(numbers)
    Path(folder, "busy").touch()
    torch.cuda.synchronize()


def shared_gpu(folder: str) -> None:
    """Two processes of one GPU and no word about it: NCCL refuses."""
    model = torch.nn.Linear(4, 4).to(GPU)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = elastic.Run(model=model, optimizer=optimizer, device=GPU)
    net = run.ddp(model)
    for _ in run.steps(5):
        with run.step(samples=1):
            optimizer.zero_grad()
            net(torch.ones(1, 4, device=GPU)).sum().backward()
            optimizer.step()
    Path(folder, f"end-{os.getpid()}").touch()


class Net(torch.nn.Module):
    """Two layers, sharded each by itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last = torch.nn.Linear(8, 16), torch.nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One number a sample."""
        return self.last(torch.tanh(self.first(x)))


def parallelize(model: Net, mesh: Any) -> None:
    """Shard it over the mesh of the round."""
    from torch.distributed.fsdp import fully_shard

    fully_shard(model.first, mesh=mesh)
    fully_shard(model, mesh=mesh)


def sharded_live(folder: str, rounds: int) -> None:
    """A sharded model in live mode, one process; its losses."""
    run = elastic.Run(
        build=Net,
        parallelize=parallelize,
        optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=0.01),
        device=GPU,
    )
    seen = []
    for number in run.steps(rounds):
        with run.step(samples=4):
            x = torch.full((4, 8), float(number % 5), device=GPU)
            run.optimizer.zero_grad()
            loss = (run.model(x) - 1.0).square().mean()
            loss.backward()
            run.optimizer.step()
            seen.append(float(loss.detach()))
    Path(folder, f"losses-{os.getpid()}").write_text(json.dumps(seen))


def sharded_alone(folder: str, backend: str, first: int, last: int, result: str) -> None:
    """FSDP2 in a group of one, with snapshots."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cuda", (1,))
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(64, 1)
    )
    model.to(GPU)
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    snapshot = malletrain.Snapshot(
        os.path.join(folder, "sharded"), every_s=3600.0, model=model, optimizer=optimizer
    )
    if first:
        assert snapshot.restore()
    seen = []
    for _ in range(first, last):
        x = torch.randn(16, 32, device=GPU)
        optimizer.zero_grad()
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        seen.append(float(loss.detach()))
        snapshot.step()
    snapshot.save()
    Path(folder, result).write_text(json.dumps(seen))
    dist.destroy_process_group()


def sharded_pair(folder: str, rank: int, port: int) -> None:
    """FSDP2 over two processes of one GPU, by gloo; what torch says of it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group(
        "cpu:gloo,cuda:gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=2,
    )
    torch.cuda.set_device(GPU)  # else the mesh chooses one by rank
    mesh = init_device_mesh("cuda", (2,))
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    model.to(GPU)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    seen = []
    for _ in range(5):
        x = torch.ones(16, 32, device=GPU)
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        seen.append(float(loss.detach()))
    Path(folder, f"pair-{rank}").write_text(json.dumps(seen))
    dist.destroy_process_group()
