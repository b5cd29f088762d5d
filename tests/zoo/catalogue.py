"""The scripts of the zoo, by name."""

from __future__ import annotations

from tests.zoo.cases import Script

_RESTART = {
    "plain": (
        *("epoch_scheduler", "evaluation_together", "warm_up", "one_cycle", "plateau", "chained"),
        *("counted_range", "while_loop", "saved_before_scheduler", "saved_after_scheduler"),
        *("early_stopping", "best_model", "evaluation_in_epoch", "cut_short"),
    ),
    "tricks": (
        *("ema", "swa", "grad_scaler", "accumulation", "lbfgs", "sam", "gan", "group_added"),
        *("frozen", "compiled", "teacher"),
    ),
    "data": (
        *("persistent_workers", "prefetcher", "train_accuracy", "stream", "stream_of_few"),
        *("signal_handler", "writer_thread", "own_path"),
    ),
    "hugging_face": ("trainer", "trainer_cosine", "trainer_early_stopping"),
    "lightning_trainer": ("fit", "fit_early_stopping", "fit_limited", "fit_csv"),
    "accelerate_loop": ("accelerate", "accelerate_several_models", "accelerate_naming"),
    "tracking": ("weights_and_biases", "mlflow_files"),
}
_LIVE = {
    "live": (
        *("epoch_scheduler", "warm_up", "one_cycle", "plateau", "evaluation_together", "ema"),
        *("swa", "grad_scaler", "accumulation", "sam", "closure", "gan", "frozen"),
    ),
    "live_loops": (
        *("early_stopping", "best_model", "compiled", "persistent_workers", "counted_range"),
        *("while_loop", "saved_each_epoch", "group_added"),
    ),
}
_NEEDS = {
    "hugging_face": "transformers",
    "lightning_trainer": "lightning",
    "accelerate_loop": "accelerate",
    "tracking": "wandb",
}
"""Packages that the scripts of a module need."""


def _scripts() -> dict[str, Script]:
    scripts = [
        Script(f"{mode}/{name}", mode, f"{module}:{name}", _NEEDS.get(module, ""))
        for mode, modules in (("restart", _RESTART), ("live", _LIVE))
        for module, names in modules.items()
        for name in names
    ]
    return {script.name: script for script in scripts}


SCRIPTS = _scripts()
