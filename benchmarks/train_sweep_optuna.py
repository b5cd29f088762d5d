"""One process of Optuna alone: takes trials of a study one by one and trains them, on its node,
until all have ended. What benchmarks/sweep.py compares with.

Written after Optuna's own advice for processes that may be killed: a heartbeat, retries of trials
whose process is gone, and a checkpoint that a retry goes on from. torch is loaded once, before the
first trial.
"""

from __future__ import annotations

import argparse
import os
import runpy
import time
import warnings
from pathlib import Path
from typing import Any

import optuna
import torch
from optuna.storages import RDBStorage, RetryHeartbeatStaleTrialCallback, fail_stale_trials
from optuna.trial import TrialState
from torch import nn
from torch.utils.data import DataLoader

from malletrain import ElasticSampler

HEARTBEAT_S, GRACE_S = 1, 4
"""A trial whose process was not heard for so long is tried again."""
CHECKPOINT_S = 5.0
BATCH = 128
ENDED = (TrialState.COMPLETE, TrialState.PRUNED)


class TakenAlreadyError(Exception):
    """Another process took the last trial that waited."""


def open_study(url: str, name: str, seed: int) -> optuna.Study:
    """The study, with the pruner that all ways have."""
    storage = RDBStorage(
        url,
        engine_kwargs={"connect_args": {"timeout": 60}},
        heartbeat_interval=HEARTBEAT_S,
        grace_period=GRACE_S,
        heartbeat_stale_trial_callback=RetryHeartbeatStaleTrialCallback(
            inherit_intermediate_values=True
        ),
    )
    return optuna.create_study(
        storage=storage,
        study_name=name,
        direction="maximize",
        sampler=optuna.samplers.RandomSampler(seed=seed),
        pruner=optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=3),
        load_if_exists=True,
    )


class TrialTraining:
    """Trains trials as jobscripts/examples/digits.py does."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        example: dict[str, Any] = runpy.run_path(str(args.example))
        self._accuracy = example["accuracy"]
        self._train, self._test = example["load_digits"]()
        self._counted = args.folder / f"samples-{os.getpid()}"
        self._samples = 0

    def __call__(self, trial: optuna.Trial) -> float:
        """A trial's last accuracy."""
        args = self._args
        stored = trial.study.get_trials(deepcopy=False)[trial.number]
        if "fixed_params" not in stored.system_attrs:
            raise TakenAlreadyError
        lr = trial.suggest_float("lr", 1e-3, 1.0, log=True)
        hidden = trial.suggest_categorical("hidden", [16, 32, 64, 128])
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(64, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, 10),
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        sampler = ElasticSampler(len(self._train), global_batch_size=BATCH, seed=0)
        parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "sampler": sampler}
        first = RetryHeartbeatStaleTrialCallback.retried_trial_number(stored)
        place = args.folder / f"trial-{trial.number if first is None else first}.pt"
        if place.exists():
            for name, state in torch.load(place).items():
                parts[name].load_state_dict(state)
        saved = time.monotonic()
        for epoch in sampler.epochs(args.epochs):
            for images, labels in DataLoader(self._train, batch_sampler=sampler):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(images), labels).backward()
                optimizer.step()
                time.sleep(args.sample_delay * len(labels))
                sampler.advance()
                self._samples += len(labels)
                self._counted.write_text(str(self._samples))
                if time.monotonic() - saved >= CHECKPOINT_S:
                    new = place.with_suffix(f".{os.getpid()}")
                    torch.save({name: part.state_dict() for name, part in parts.items()}, new)
                    new.replace(place)
                    saved = time.monotonic()
            trial.report(self._accuracy(model, self._test), epoch + 1)
            if trial.should_prune():
                raise optuna.TrialPruned
        return float(self._accuracy(model, self._test))


def main() -> None:
    """The process."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("url", help="of the study's database")
    parser.add_argument("name", help="of the study")
    parser.add_argument("folder", type=Path, help="of checkpoints")
    parser.add_argument("--example", type=Path, required=True, help="digits.py")
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--epochs", type=int, default=27)
    parser.add_argument("--sample-delay", type=float, default=0.001)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    torch.set_num_threads(1)
    training = TrialTraining(args)
    study = open_study(args.url, args.name, args.seed)
    while True:
        fail_stale_trials(study)
        if len(study.get_trials(deepcopy=False, states=ENDED)) >= args.trials:
            return
        if study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
            study.optimize(training, n_trials=1, catch=(TakenAlreadyError,))
        else:
            time.sleep(0.2)


if __name__ == "__main__":
    main()
