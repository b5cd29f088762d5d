"""What the Python of each page finds when a test runs it: the names that it uses but does not
define, such as a model and a loader, with files and data.

A setting is a function of an empty folder. It returns names, and is called in a process of its own,
so that it may import what it likes and connect to a group of one rank.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import tarfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import create_autospec

Names = dict[str, Any]

REST = "rest"
"""Name of the function that is called for each statement ``...`` of a block."""
AROUND = "around"
"""Name of a function that returns an asynchronous context in which a block with ``await`` runs."""


def _as_it_is(sample: Any) -> Any:
    return sample


def _to_tensors(record: dict[str, bytes]) -> tuple[Any, Any]:
    import torch

    return torch.zeros(4), torch.tensor(int(record["cls"]))


def nothing(folder: Path) -> Names:
    """No names."""
    return {}


def training(folder: Path) -> Names:
    """A model, its data and a loader, as all pages call them, and a group of one rank."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, TensorDataset

    import malletrain

    dist.init_process_group("gloo", f"file://{folder}/group", rank=0, world_size=1)
    train = TensorDataset(torch.randn(96, 4), torch.arange(96) % 2)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sampler = malletrain.ElasticSampler(len(train), global_batch_size=32)
    names = {
        "torch": torch,
        "dist": dist,
        "os": os,
        "malletrain": malletrain,
        "DataLoader": DataLoader,
        "DistributedDataParallel": DistributedDataParallel,
        "train": train,
        "data": train,
        "model": model,
        "net": DistributedDataParallel(model),
        "optimizer": optimizer,
        "criterion": torch.nn.CrossEntropyLoss(),
        "sampler": sampler,
        "loader": DataLoader(train, batch_sampler=sampler),
        REST: sampler.advance,
    }
    names["snapshot"] = malletrain.Snapshot(model=model, optimizer=optimizer, sampler=sampler)
    return names


def epochs_ends(folder: Path) -> Names:
    """A schedule, facts and an evaluation beside the model."""
    import torch

    names = training(folder)
    names["scheduler"] = torch.optim.lr_scheduler.StepLR(names["optimizer"], 30)
    names["facts"] = {}
    names["evaluate"] = lambda model: model(torch.zeros(1, 4))
    names["base_lr"], names["base_world_size"] = 0.02, 2
    return names


def live(folder: Path) -> Names:
    """A run in live mode of one rank."""
    import torch

    from malletrain import elastic

    names = training(folder)
    # Without a compiler of C++, which the machine of a test may lack.
    torch.compile = functools.partial(torch.compile, backend="eager")
    names["elastic"] = elastic
    names["example_images"], names["example_labels"] = names["train"][:8]
    names["run"] = run = elastic.Run(
        model=names["model"], optimizer=names["optimizer"], sampler=names["sampler"]
    )
    names["net"] = run.ddp(names["model"])
    return names


def cached_images(folder: Path) -> Names:
    """A torchvision of which only ImageFolder is there, in memory."""
    names = training(folder)
    names["ImageFolder"] = lambda path: names["train"]
    names["augment"] = _as_it_is
    return names


def _tars(folder: Path) -> list[str]:
    """Two tars of three records each."""
    (folder / "data").mkdir()
    paths = []
    for number in range(2):
        paths.append(str(folder / "data" / f"{number}.tar"))
        with tarfile.open(paths[-1], "w") as tar:
            for record in range(3):
                part = folder / f"{number}{record}.cls"
                part.write_text(str(record))
                tar.add(part, part.name)
    return paths


def shards(folder: Path) -> Names:
    """Tars, and what makes an image and a label of a record."""
    import glob

    names = training(folder)
    os.chdir(folder)
    names["glob"] = glob
    names["paths"] = _tars(folder)
    names["to_tensors"] = _to_tensors
    names[REST] = lambda: None
    return names


def shards_in_memory(folder: Path) -> Names:
    """As the previous setting, with snapshots in the memory of a node."""
    from malletrain.protocol import env

    (folder / "memory").mkdir(mode=0o700)
    os.environ[env.DATA] = str(folder / "memory")
    return shards(folder)


def hugging_face(folder: Path) -> Names:
    """A model and arguments for Trainer."""
    import torch
    from transformers import Trainer, TrainingArguments

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 2)

        def forward(self, x: Any, labels: Any) -> dict[str, Any]:
            logits = self.layer(x)
            return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}

    return {
        "Trainer": Trainer,
        "model": Model(),
        "args": TrainingArguments(
            str(folder / "out"), max_steps=2, report_to=[], use_cpu=True, save_strategy="no"
        ),
        "data": [{"x": torch.randn(4), "labels": n % 2} for n in range(192)],
    }


def lightning(folder: Path) -> Names:
    """A module for Lightning's Trainer."""
    import lightning
    import torch

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 2)

        def training_step(self, batch: Any, index: int) -> Any:
            images, labels = batch
            return torch.nn.functional.cross_entropy(self.layer(images), labels)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    os.chdir(folder)
    trainer = functools.partial(
        lightning.Trainer,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = torch.utils.data.TensorDataset(torch.randn(96, 4), torch.arange(96) % 2)
    return {"Trainer": trainer, "model": Module(), "data": data}


def accelerate(folder: Path) -> Names:
    """An Accelerator, a model and a schedule."""
    import torch
    from accelerate import Accelerator

    import malletrain

    os.chdir(folder)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return {
        "malletrain": malletrain,
        "accelerator": Accelerator(cpu=True),
        "DataLoader": torch.utils.data.DataLoader,
        "data": torch.utils.data.TensorDataset(torch.randn(128, 4), torch.arange(128) % 2),
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 30),
        "criterion": torch.nn.CrossEntropyLoss(),
    }


def service(folder: Path) -> Names:
    """A process of a service outside MalleTrain, so that it is the only member; its changes end."""
    from malletrain import membership

    heard: list[str] = []

    class Group(membership.Membership):
        def changes(self) -> Any:
            yield next(super().changes())

    membership.Membership = Group  # type: ignore[misc]
    return {
        "membership": membership,
        "heard": heard,
        "port": 4711,
        "load": object,
        "listen": lambda: 4711,
        "connect": heard.append,
        "forget": heard.append,
        "hand_over": lambda within_s: None,
    }


def client(folder: Path) -> Names:
    """A client that takes each call that the real one takes, and asks no daemon."""
    import malletrain
    from malletrain.protocol.views import MembersView, MemberView

    member = MemberView(node="n1", host="n1", address="n1:4711")
    fake = create_autospec(malletrain.Client, instance=True)
    fake.members.side_effect = [
        MembersView(job="serve", number=1, members=(member,), version="1"),
        MembersView(job="serve", number=1, members=()),
    ]
    module = ModuleType("malletrain")
    module.Client = lambda: fake  # type: ignore[attr-defined]
    return {"client": fake, "malletrain": module, "route_to": lambda addresses: None}


def metric(folder: Path) -> Names:
    """Metrics of an epoch."""
    import malletrain

    return {"malletrain": malletrain, "accuracy": 0.5, "epoch": 0}


def sweep(folder: Path) -> Names:
    """A daemon's side of ``run_sweep`` that says what it was given."""
    module = importlib.import_module("malletrain.sweep")
    module.run_sweep = create_autospec(module.run_sweep)
    return {}


def trace(folder: Path) -> Names:
    """A trace of 1,500 nodes in a file."""
    module = importlib.import_module("scavenger.trace.trace")
    files = importlib.import_module("scavenger.trace.files")
    nodes = range(1500)
    starts, ends = [100.0 * (1 + n % 7) for n in nodes], [15_000.0 + n for n in nodes]
    made = module.Trace.from_gaps(nodes, starts, ends, [f"n{n}" for n in nodes], 90_000.0)
    files.write(made, folder / "trace.csv.gz")
    os.chdir(folder)
    return {}


def mlflow_tracker(folder: Path) -> Names:
    """MLflow without a server."""
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    import mlflow

    os.chdir(folder)
    mlflow.set_tracking_uri(f"file://{folder}/mlruns")
    return {"rank": 0, "mlflow": mlflow}


def wandb_tracker(folder: Path) -> Names:
    """W&B without a server."""
    os.environ.update(WANDB_MODE="disabled", WANDB_RUN_ID="j1")
    import wandb

    os.chdir(folder)
    return {**live(folder), "wandb": wandb, "loss": 1.0, "fold": 0}


def replica(folder: Path) -> Names:
    """A simulated engine. It is used as the replica, whatever address the page has."""
    from llmserve.generation import GenerationRequest
    from llmserve.live_dispatcher import LiveDispatcher
    from llmserve.policies import FairServe

    from tests.jobscripts.llm.live import engines

    request = GenerationRequest("r1", "alice", prompt=[1, 15043], max_tokens=4, stream=True)
    add_replica = LiveDispatcher.add_replica

    @contextlib.asynccontextmanager
    async def around() -> AsyncIterator[None]:
        async with engines(folder) as [engine]:

            def add(live: LiveDispatcher, node: str, address: str) -> None:
                add_replica(live, node, engine.address, engine.capacity)  # no front says it

            LiveDispatcher.add_replica = add  # type: ignore[method-assign]
            yield

    return {"FairServe": FairServe, "key": "", "request": request, AROUND: around}


Setting = Callable[[Path], Names]
