"""What ``sbatch`` and ``scancel`` say, for :mod:`scavenger.submission`."""

from __future__ import annotations

import re

from scavenger.slurm_job import job_id
from scavenger.submission import Dialect

SLURM = Dialect(
    job_id=job_id,
    limit_reached=re.compile(r"MaxSubmit|MaxJobs|job submit limit|submit.*limit|too many jobs|Slurm temporarily unable", re.IGNORECASE),
    unsure=re.compile(r"timed? ?out|Unable to contact|Connection|Communication|Zero Bytes|transmission", re.IGNORECASE),
    ended=re.compile(r"Invalid job id|already complet", re.IGNORECASE),
    cancel="scancel",
    at_once=200,
)
