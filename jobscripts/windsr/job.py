"""The script that MalleTrain and torchrun start; it does the same as the command ``windsr``.

malletrain submit --nodes 1:8 jobscripts/windsr/job.py train FOLDER
"""

from windsr.cli import main

if __name__ == "__main__":
    main()
