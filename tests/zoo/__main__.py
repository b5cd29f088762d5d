"""``python -m tests.zoo``: changes the nodes of scripts at every boundary, and shows a table."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import defaultdict
from pathlib import Path


def main() -> int:
    """Run the cases that the command line names; 1 when one fails."""
    # Workers import this module anew; torch is for the driver alone.
    from tests.zoo.cases import Outcome, Zoo
    from tests.zoo.catalogue import SCRIPTS
    from tests.zoo.known_failures import reason
    from tests.zoo.worker import preload

    parser = argparse.ArgumentParser(prog="python -m tests.zoo", description=__doc__)
    parser.add_argument("--mode", choices=("restart", "live"), help="scripts of this mode only")
    parser.add_argument("--script", default="", help="scripts whose name contains this")
    parser.add_argument("--change", default="", help="this change only; none: undisturbed runs")
    parser.add_argument("--boundary", default="", help="boundaries whose name contains this")
    parser.add_argument("--every", type=int, default=1, help="only each so-many-th boundary")
    parser.add_argument("--list", action="store_true", help="names of scripts, and nothing more")
    options = parser.parse_args()
    chosen = [
        script
        for name, script in SCRIPTS.items()
        if options.script in name and options.mode in (None, script.mode)
    ]
    if options.list:
        print("\n".join(script.name for script in chosen))
        return 0
    preload(*sorted({script.target.partition(":")[0] for script in chosen if not script.missing}))
    outcomes: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="zoo") as root:
        zoo = Zoo(Path(root))
        for script in chosen:
            if script.missing:
                print(f"{script.name}: {script.needs} is not installed")
                continue
            changes = [options.change] if options.change else list(zoo.changes(script))
            for change in changes:
                wanted = "" if change == "none" else change
                for outcome in zoo.outcomes(script, wanted, options.boundary, options.every):
                    outcomes[script.name, change].append(outcome)
                    _show(outcome, reason(outcome))
    _table(outcomes)
    return int(any(o.problems and not reason(o) for own in outcomes.values() for o in own))


def _show(outcome: object, known: str) -> None:
    from tests.zoo.cases import Outcome

    assert isinstance(outcome, Outcome)
    if outcome.problems:
        state = f"known failure ({known})" if known else "FAILED"
        problems = "\n    ".join(outcome.problems[:4])
        print(f"{outcome.script} {outcome.change} at {outcome.point} ({outcome.boundary}): {state}")
        print(f"    {problems}", flush=True)


def _table(outcomes: dict[tuple[str, str], list]) -> None:  # type: ignore[type-arg]
    print(f"\n{'script':<36} {'change':<14} {'passed':>6} {'failed':>6} {'refused':>7}")
    refusals = {}
    for (script, change), own in outcomes.items():
        failed = sum(bool(outcome.problems) for outcome in own)
        refused = sum(bool(outcome.refusal) for outcome in own)
        passed = len(own) - failed - refused
        print(f"{script:<36} {change:<14} {passed:>6} {failed:>6} {refused:>7}")
        refusals.update((script, outcome.refusal) for outcome in own if outcome.refusal)
    for script, sentence in refusals.items():
        print(f"{script} is refused: {sentence}")


if __name__ == "__main__":
    sys.exit(main())
