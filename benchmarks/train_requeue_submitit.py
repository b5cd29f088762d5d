"""The training of benchmarks/requeue.py for submitit: submits itself, and is requeued by submitit.

submitit calls ``checkpoint()`` of the first task from the signal's handler, in the middle of a
step, and requeues the job. So the training keeps a copy of its state from the end of each step.
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path
from typing import Any

from benchmarks.requeue_slurm import SlurmTraining
from benchmarks.requeue_training import add_arguments

MINUTES = 600
SIGNAL_DELAY_S = 60


class Training:
    """The function that submitit calls on each task of a job.

    Args:
        args: the arguments of the script.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self._training: SlurmTraining | None = None
        self._state: dict[str, Any] | None = None

    def __call__(self) -> None:
        self._training = training = SlurmTraining(self.args)
        for _ in training.steps():
            self._state = copy.deepcopy(training.state())
            if training.is_checkpoint_due():
                training.save(self._state)

    def checkpoint(self) -> Any:
        """Save the state of the last step that has ended. Return what the requeued job calls."""
        from submitit.helpers import DelayedSubmission

        if self._training is not None and self._state is not None:
            self._training.save(self._state)
        return DelayedSubmission(Training(self.args))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--partition", required=True)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--logs", type=Path, required=True, help="folder for submitit")
    parser.add_argument("--setup", action="append", default=[], help="line of the batch script")
    parser.add_argument("--teardown", action="append", default=[], help="the same, at its end")
    args = parser.parse_args()
    import submitit

    # by its module's name, so that the job finds it
    from benchmarks.train_requeue_submitit import Training as Submitted

    executor = submitit.SlurmExecutor(folder=args.logs)
    executor.update_parameters(
        partition=args.partition,
        nodes=args.nodes,
        ntasks_per_node=1,
        time=MINUTES,
        exclusive=True,
        signal_delay_s=SIGNAL_DELAY_S,
        setup=args.setup,
        teardown=args.teardown,
        srun_args=["--kill-on-bad-exit=1"],
        additional_parameters={"requeue": True},
    )
    executor.submit(Submitted(args))


if __name__ == "__main__":
    main()
