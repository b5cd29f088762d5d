"""Views of trainers for clients. Changes nothing."""

from __future__ import annotations

from malletrain.core.records import JobRecord
from malletrain.daemon.core import Core
from malletrain.protocol.views import TrainerView


def trainer_views(core: Core) -> tuple[TrainerView, ...]:
    """Return the views of all trainers with a summary of their jobs; empty if there is only one
    plan.
    """
    controller, now = core.controller, core.clock.now()
    views = []
    for trainer in controller.trainers:
        if trainer is None:
            continue
        jobs = [
            job for job in controller.state.unfinished.values() if core.trainer_of(job) is trainer
        ]
        views.append(
            TrainerView(
                trainer.name,
                trainer.objective,
                tuple(sorted(trainer.only)) if trainer.only is not None else (),
                trainer.part,
                sum(bool(job.nodes) for job in jobs),
                sum(not job.nodes for job in jobs),
                sum(len(job.nodes) for job in jobs),
                sum(_rate(core, job, now) for job in jobs),
                f"{trainer.phrase()}.",
            )
        )
    return tuple(views)


def _rate(core: Core, job: JobRecord, now: float) -> float:
    run = core.runs.get(job.submitted.job)
    return run.rate(now) if run else 0.0


def of_job(core: Core, job: str) -> str:
    """Return the trainer of a job as a phrase; empty if there is none or the job has ended."""
    record = core.controller.jobs.get(job)
    trainer = core.trainer_of(record) if record is not None else None
    return trainer.phrase() if trainer is not None else ""


def of_class(core: Core, node_class: str) -> tuple[str, ...]:
    """Return the trainers whose jobs may run on nodes of a class."""
    trainers = core.controller.trainers
    return tuple(t.name for t in trainers if t is not None and t.may_use(node_class))
