"""Architecture search over cells, as malletrain's paper runs it: each candidate is a malleable job,
a sweep finds the best. Runs in the jobs of a sweep (training) and beside its engine (what is tried
next).

Cells, their encoding and their sizes are those of NAS-Bench-101 (:mod:`malletrain.sim.nas`).
"""

__version__ = "0.1.0"


class NasError(RuntimeError):
    """It cannot be done as asked; the message is a sentence."""
