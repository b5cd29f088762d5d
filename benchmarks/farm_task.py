"""A task of benchmarks/farm_peers.py: sleeps for its length, and records start, node and end.

    farm_task.py FOLDER INDEX

Each try has a record, ``FOLDER/tries/INDEX-PID-TIME``: a line with start and node, and at the end a
line with the end. Meanwhile it updates the file's time ten times per second, so that the time of an
interruption is known. Needs no package, and starts in milliseconds with ``python -I -S``.
"""

import os
import sys
import time

BEAT_S = 0.1


def main() -> None:
    began = time.time()
    folder, index = sys.argv[1], int(sys.argv[2])
    node = os.environ.get("SLURMD_NODENAME") or os.environ.get("MALLETRAIN_NODE", "")
    record = os.path.join(folder, "tries", f"{index}-{os.getpid()}-{time.time_ns()}")
    with open(record, "x") as file:
        file.write(f"{began} {node}\n")
    with open(os.path.join(folder, "lengths")) as file:
        seconds = float(file.read().split()[index])
    while (remaining_s := began + seconds - time.time()) > 0:
        time.sleep(min(BEAT_S, remaining_s))
        os.utime(record)
    with open(record, "a") as file:
        file.write(f"{time.time()}\n")
    with open(os.path.join(folder, "done", str(index)), "w"):
        pass


if __name__ == "__main__":
    main()
