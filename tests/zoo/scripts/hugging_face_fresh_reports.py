"""Restart mode: what more public bug reports of Trainer are about."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from malletrain.integrations.transformers import MalleTrainCallback
from tests.zoo.scripts.hugging_face import Recorder
from tests.zoo.scripts.hugging_face_reports import History
from tests.zoo.scripts.parts import BATCH, EPOCHS, SAMPLES
from tests.zoo.trace import Trace


class Sentences(torch.utils.data.Dataset[Any]):
    """Sequences of which different numbers of tokens count."""

    def __init__(self, count: int = SAMPLES, seed: int = 3) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(0, 7, (count, 5), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, number: int) -> dict[str, Any]:
        labels = self.tokens[number].clone()
        labels[1 + number % 4 :] = -100
        return {"input_ids": self.tokens[number], "labels": labels, "number": number}


class Language(nn.Module):
    """Takes ``num_items_in_batch`` as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 7))
        self.seen: list[int] = []

    def forward(
        self, input_ids: Any, labels: Any, number: Any, num_items_in_batch: Any = None, **more: Any
    ) -> dict[str, Any]:
        if self.training:
            self.seen += number.tolist()
        made = self.layers(input_ids.roll(1, 1))
        kind = "mean" if num_items_in_batch is None else "sum"
        loss = nn.functional.cross_entropy(made.transpose(1, 2), labels, reduction=kind)
        if num_items_in_batch is not None:
            loss = loss / num_items_in_batch
        return {"loss": loss, "logits": made}


def tokens(trace: Trace) -> None:
    """A loss by token over sequences of different lengths, tokens counted (transformers#35438,
    #34373).
    """
    net = Language()
    callback = MalleTrainCallback(global_batch_size=BATCH)
    args = TrainingArguments(
        "out",
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=1,
        learning_rate=0.05,
        save_strategy="no",
        eval_strategy="no",
        logging_steps=2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        ddp_backend="gloo",
        remove_unused_columns=False,
        include_num_input_tokens_seen="all",
    )
    trainer = Trainer(
        net,
        args,
        train_dataset=Sentences(),
        callbacks=[Recorder(trace, net), callback, History(trace)],
    )
    trainer.train(resume_from_checkpoint=callback.latest("out"))
    trace.note("trained", "end", tokens=int(trainer.state.num_input_tokens_seen))
    trace.finish(net.layers)
