"""What ``qsub`` and ``qdel`` say, for :mod:`scavenger.submission`."""

from __future__ import annotations

import re

from scavenger.pbs_job import job_id
from scavenger.submission import Dialect

PBS = Dialect(
    job_id=job_id,
    limit_reached=re.compile(r"(?i)would exceed|maximum number of jobs|limit on (?:number|jobs)|max_(?:queued|run)|too many jobs"),
    unsure=re.compile(r"(?i)timed? ?out|end of file|communication|connection (?:reset|closed|broken)|protocol|no reply|premature"),
    ended=re.compile(r"(?i)unknown job|has finished|job is (?:already )?exiting|invalid for (?:finished|state)"),
    cancel="qdel",
    at_once=100,
)
