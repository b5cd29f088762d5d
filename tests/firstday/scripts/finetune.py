"""Fine-tuning with Hugging Face's Trainer. After docs/library-trainers.md."""

import json

import torch
from pace import crawl
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from malletrain.integrations.transformers import MalleTrainCallback

EPOCHS, SAMPLES = 3, 150


class Numbers(Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return {"x": torch.tensor([index / SAMPLES, 1.0]), "index": torch.tensor(index)}


class Net(torch.nn.Module):
    """A straight line; notes which samples it was trained on."""

    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(2, 1)
        self.seen = []

    def forward(self, x, index):
        self.seen += index.tolist()
        return {"loss": ((self.line(x) - 3 * x[:, :1]) ** 2).mean()}


class Note(TrainerCallback):
    """A line for each step: its number, its learning rate, its samples."""

    def on_step_begin(self, args, state, control, optimizer=None, **_):
        crawl()
        self.rate = optimizer.param_groups[0]["lr"]

    def on_step_end(self, args, state, control, model=None, **_):
        line = {
            "step": state.global_step,
            "epoch": state.epoch,
            "rate": self.rate,
            "ranks": args.world_size,
            "samples": net.seen,
        }
        net.seen = []
        with open("record.jsonl", "a") as record:
            record.write(json.dumps(line) + "\n")


torch.manual_seed(0)
torch.set_num_threads(1)
net = Net()
args = TrainingArguments(
    "checkpoints",
    num_train_epochs=EPOCHS,
    per_device_train_batch_size=2,
    learning_rate=0.05,
    save_strategy="no",
    report_to=[],
    use_cpu=True,
    disable_tqdm=True,
    seed=7,
)
callback = MalleTrainCallback(global_batch_size=6)
trainer = Trainer(net, args, train_dataset=Numbers(), callbacks=[Note(), callback])
trainer.train(resume_from_checkpoint=callback.latest(args.output_dir))
if args.process_index == 0:
    state = trainer.state
    print(f"trained to epoch {state.epoch} in {state.global_step} steps", flush=True)
