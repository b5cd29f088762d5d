"""Many seeds, or one of them with its trace.

python -m tests.dst --seed 7 --trace
python -m tests.dst --seeds 10000 [--first 0] [--seconds 3600]
"""

from __future__ import annotations

import argparse
import sys
import time
from random import SystemRandom

from tests.dst.faults import KINDS
from tests.dst.world import MODES, live


def main() -> int:
    """Exit code 1 when an invariant was broken."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--seed", type=int, help="this one")
    parser.add_argument("--trace", action="store_true", help="say everything that happens")
    parser.add_argument("--seeds", type=int, default=200, help="so many, one after the other")
    parser.add_argument("--first", type=int, help="the first of them (default: a fresh one)")
    parser.add_argument("--seconds", type=float, help="begin none after so long")
    parser.add_argument("--only", nargs="*", choices=sorted(KINDS), help="these faults only")
    parser.add_argument(
        "--modes", nargs="*", choices=sorted(set(MODES)), help="jobs of these modes only"
    )
    parser.add_argument(
        "--profiles", action=argparse.BooleanOptionalAction, help="of sites that profile only"
    )
    parser.add_argument(
        "--layouts", action="store_true", help="jobs in restart mode look for the best layout"
    )
    options = parser.parse_args()
    chosen = (options.modes, options.profiles, options.layouts)
    if options.seed is not None:
        shown = print if options.trace else None
        outcome = live(options.seed, options.only, shown, *chosen)
        print(
            f"seed {outcome.seed}: {outcome.trace[:16]}, {outcome.lasted_s:.1f} s, "
            f"{outcome.jobs}, {outcome.happened}"
        )
        for sentence in outcome.broken:
            print(f"  broken {sentence}")
        return bool(outcome.broken)
    first = SystemRandom().randrange(2**31) if options.first is None else options.first
    began, failed, done, virtual_s = time.monotonic(), [], 0, 0.0
    for seed in range(first, first + options.seeds):
        if options.seconds is not None and time.monotonic() - began > options.seconds:
            break
        outcome = live(seed, options.only, None, *chosen)
        done, virtual_s = done + 1, virtual_s + outcome.lasted_s
        if outcome.broken:
            failed.append(seed)
            print(
                f"seed {seed} broken {outcome.broken[0]}\n"
                f"  again: python -m tests.dst --seed {seed} --trace",
                flush=True,
            )
    took = time.process_time()
    print(
        f"{done} seeds from {first}, {virtual_s:.0f} s of virtual time in {took:.0f} s of CPU; "
        f"broken: {', '.join(map(str, failed)) or 'none'}"
    )
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
