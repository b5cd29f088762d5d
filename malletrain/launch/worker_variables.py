"""The environment variables of the workers that follow from the layout of the node.

Decides which variables a launcher sets for the workers of a round. :mod:`malletrain.launch.cores`
decides how many threads a worker has if the layout names no number.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

from malletrain.launch.cores import THREADS_VARIABLE, allowed_cores, threads_per_worker
from malletrain.protocol import env
from malletrain.protocol.payloads import RoundLayout


class WorkerVariables:
    """The variables of the workers of one job on this node.

    Args:
        environment: environment that the workers inherit. It is changed.
        tunes_threads: whether a number of threads in a layout is one that MalleTrain has measured
            (``--threads auto``), not one that the job's owner has chosen.
    """

    def __init__(
        self, environment: MutableMapping[str, str] = os.environ, *, tunes_threads: bool = False
    ) -> None:
        self._environment = environment
        self._tunes_threads = tunes_threads
        self._of_user = {THREADS_VARIABLE: environment.get(THREADS_VARIABLE, "")}

    def set(self, layout: RoundLayout) -> None:
        """Set the number of threads and of loader workers for the workers that start next. A number
        of threads that the user has chosen stays, unless the layout names one.
        """
        environment = self._environment
        cores = allowed_cores(environment)
        threads = layout.threads or threads_per_worker(cores, layout.processes, self._of_user)
        environment.pop(env.THREADS, None)
        if threads:
            environment[THREADS_VARIABLE] = str(threads)
            if self._tunes_threads or not layout.threads:
                environment[env.THREADS] = str(threads)
        if layout.loader_workers:
            environment[env.LOADER_WORKERS] = str(layout.loader_workers)
        else:
            environment.pop(env.LOADER_WORKERS, None)
