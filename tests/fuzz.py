"""The random search: runs the property tests and state machines with fresh seeds until the time is
over.

    python -m tests.fuzz [--seconds 600] [--seed 7] [pytest's arguments]

Each pass prints its seed. ``--seed`` repeats one pass with the same cases in the same order. A case
that it finds becomes an explicit example of its test.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import time


def one_pass(seed: int, arguments: list[str]) -> int:
    """Run every test with random draws with this seed. Return pytest's exit status."""
    print(f"seed {seed}: once more with  make fuzz FUZZ_SEED={seed}", flush=True)
    argv = [sys.executable, "-m", "pytest", "-q", "--hypothesis-profile=fuzz"]
    argv += [f"--hypothesis-seed={seed}", "-m", "hypothesis or any_seed", *arguments]
    return subprocess.run(argv, check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=600.0, help="begin no pass after these")
    parser.add_argument("--seed", default="", help="one pass with this seed")
    options, arguments = parser.parse_known_args()
    if options.seed:
        return one_pass(int(options.seed), arguments)
    end, passes, failed = time.monotonic() + options.seconds, 0, []
    while time.monotonic() < end:
        seed = random.SystemRandom().randrange(2**31)
        if one_pass(seed, [*arguments, "-n", str(os.cpu_count() or 1)]):
            failed.append(seed)
        passes += 1
    print(f"{passes} passes; failed with seeds: {', '.join(map(str, failed)) or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
