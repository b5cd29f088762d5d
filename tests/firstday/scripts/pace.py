"""Lets a script crawl until the file ``go`` is there, so that what is done to the job finds it
training however fast the machine is. It does not stand still: a rescale waits for the end of a
step.
"""

import time
from pathlib import Path

GO = Path("go")


def crawl():
    """Make one step slow."""
    for _ in range(300):
        if GO.exists():
            return
        time.sleep(0.02)
