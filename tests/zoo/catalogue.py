"""The scripts of the zoo, by name."""

from __future__ import annotations

from tests.zoo.cases import Script

_RESTART = {
    "plain": (
        *("epoch_scheduler", "evaluation_together", "warm_up", "one_cycle", "plateau", "chained"),
        *("counted_range", "while_loop", "saved_before_scheduler", "saved_after_scheduler"),
        *(
            "early_stopping",
            "best_model",
            "evaluation_in_epoch",
            "cut_short",
            "cut_short_saved",
            "largest_step",
            "scheduled_after_snapshot",
            "limited_before_step",
            "kept_open",
            "rows_of_all_ranks",
            "slow_ranks",
            "batch_ramp",
            "batch_of_next_epoch",
        ),
    ),
    "tricks": (
        *("ema", "swa", "grad_scaler", "accumulation", "lbfgs", "sam", "gan", "group_added"),
        *("frozen", "compiled", "teacher"),
    ),
    "data": (
        *("persistent_workers", "prefetcher", "train_accuracy", "stream", "stream_of_few"),
        *("signal_handler", "writer_thread", "own_path"),
    ),
    "reports": (
        *("accumulation_by_length", "ema_counter", "annealed", "warm_up_around", "timm_like"),
        *("folds", "swa_with_update_bn"),
    ),
    "state_reports": (
        *("rebuilt_scheduler", "drawn", "two_loaders", "schedule_free", "contrast"),
        *("optimizers_in_list", "centered"),
    ),
    "resumed_reports": ("tensor_rate", "cyclic", "spectral", "skipped_schedule"),
    "further_reports": ("param_scheduler",),
    "epoch_begins": (
        *("scheduled_first", "decayed_first", "epoch_sums", "teacher_first", "drawn_first"),
    ),
    "hugging_face": ("trainer", "trainer_cosine", "trainer_early_stopping"),
    "hugging_face_reports": (
        *("begun_with_evaluation", "plateau", "two_kept", "best_kept", "tokens", "best_only"),
        *("accumulated", "cooled"),
    ),
    "lightning_trainer": (
        *("fit", "fit_early_stopping", "fit_limited", "fit_csv", "fit_as_it_comes"),
    ),
    "lightning_reports": (
        *("validated", "epoch_means", "annealed", "saved_by_step", "best_two", "averaged", "swa"),
        *("monitored", "clipped", "swapped"),
    ),
    "further_lightning_reports": ("stopping_within",),
    "accelerate_loop": (
        "accelerate",
        "accelerate_several_models",
        "accelerate_naming",
        "accelerate_cut_short",
    ),
    "accelerate_reports": ("accumulating", "gathered", "scheduled_first"),
    "diffusers_reports": ("averaged",),
    "tracking": ("weights_and_biases", "mlflow_files", "tensorboard_writer"),
    "trainer_tracking": ("trainer_wandb", "trainer_mlflow", "fit_wandb", "fit_mlflow"),
}
_LIVE = {
    "live": (
        *("epoch_scheduler", "warm_up", "one_cycle", "plateau", "evaluation_together", "ema"),
        *("swa", "grad_scaler", "accumulation", "sam", "closure", "gan", "frozen", "slow_ranks"),
    ),
    "live_tracking": ("weights_and_biases", "mlflow_files", "tensorboard_writer"),
    "live_loops": (
        *("early_stopping", "best_model", "compiled", "persistent_workers", "counted_range"),
        *("early_stopping_first", "while_loop", "saved_each_epoch", "group_added", "kept_open"),
        *("cut_short", "largest_step", "batch_ramp", "batch_in_epoch"),
    ),
    "live_models": (
        *("unfrozen", "heads_in_turn", "heads_by_micro_batch", "static_graph", "groups"),
        *("warm_restarts", "overflow", "averages_swapped_in"),
    ),
    "epoch_begins": (
        *("scheduled_first_live", "decayed_first_live", "epoch_sums_live", "teacher_first_live"),
        "drawn_first_live",
    ),
    "resumed_reports": ("tensor_rate_live", "cyclic_live", "spectral_live"),
    "further_reports": ("param_scheduler_live",),
    "live_reports": (
        *("ema_counter", "annealed", "warm_up_around", "drawn", "schedule_free", "contrast"),
        "optimizers_in_list",
    ),
}
_BY_RANK_0 = (
    *("live/while_loop", "live/counted_range"),
    *("live/weights_and_biases", "live/mlflow_files", "live/tensorboard_writer"),
)
_NEEDS = {
    "hugging_face": "transformers",
    "hugging_face_reports": "transformers",
    "lightning_trainer": "lightning",
    "lightning_reports": "lightning",
    "further_lightning_reports": "lightning",
    "accelerate_loop": "accelerate",
    "accelerate_reports": "accelerate",
    "diffusers_reports": "diffusers",
    "tracking": "wandb mlflow tensorboard",
    "live_tracking": "wandb mlflow tensorboard",
    "trainer_tracking": "wandb mlflow tensorboard transformers lightning",
}
"""Packages that the scripts of a module need."""


def _name(mode: str, module: str, name: str) -> str:
    """Return the name of a case. Cases of a module of reports have names of their own kind."""
    return f"{mode}/{module}/{name}" if module.endswith("reports") else f"{mode}/{name}"


def _scripts() -> dict[str, Script]:
    scripts = [
        Script(
            _name(mode, module, name),
            mode,
            f"{module}:{name}",
            _NEEDS.get(module, ""),
            by_rank_0=_name(mode, module, name) in _BY_RANK_0,
        )
        for mode, modules in (("restart", _RESTART), ("live", _LIVE))
        for module, names in modules.items()
        for name in names
    ]
    return {script.name: script for script in scripts}


SCRIPTS = _scripts()
