"""What MalleTrain and torchrun start: ``malletrain submit --nodes 1:8 jobscripts/windsr/job.py train …``. The same as the command ``windsr``."""

import torch  # noqa: F401  (first, so that the agents' warm interpreter, which has it, is used)

from windsr.cli import main

if __name__ == "__main__":
    main()
