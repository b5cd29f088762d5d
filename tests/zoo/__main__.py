"""``python -m tests.zoo``: changes the nodes of scripts at every boundary, and shows a table."""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from itertools import chain
from pathlib import Path

from tests.zoo.cases import CHANGES, Outcome
from tests.zoo.catalogue import SCRIPTS
from tests.zoo.known_failures import reason, resolved
from tests.zoo.pool import Part, run_parts
from tests.zoo.record import RecordFile


def main() -> int:
    """Run the cases that the command line names; 1 when one fails, or one that is known to fail
    passes.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.zoo", description=__doc__)
    parser.add_argument("--mode", choices=("restart", "live"), help="scripts of this mode only")
    parser.add_argument(
        "--script", action="append", help="scripts whose name contains this, may be repeated"
    )
    parser.add_argument(
        "--change", action="append", help="this change only, may be repeated; none: undisturbed"
    )
    parser.add_argument("--boundary", default="", help="boundaries whose name contains this")
    parser.add_argument("--every", type=int, default=1, help="only each so-many-th boundary")
    parser.add_argument("--first", type=int, default=0, help="number of the first one of these")
    parser.add_argument("--jobs", type=int, default=1, help="cases that run at the same time")
    parser.add_argument(
        "--each",
        action="store_true",
        help="also boundaries that are one with the boundary before, because the process does "
        "nothing between them that another one notices",
    )
    parser.add_argument(
        "--record",
        type=Path,
        metavar="FILE",
        help="append the outcomes of each script and change to FILE, and leave out those that it "
        "has for the same code",
    )
    parser.add_argument("--list", action="store_true", help="names of scripts, and nothing more")
    options = parser.parse_args()
    chosen = [
        script
        for name, script in SCRIPTS.items()
        if any(part in name for part in options.script or [""])
        and options.mode in (None, script.mode)
    ]
    if options.list:
        print("\n".join(script.name for script in chosen))
        return 0
    parts = []
    for script in chosen:
        if script.missing:
            print(f"{script.name}: {script.needs} is not installed")
            continue
        for change in CHANGES[script.mode]:
            if not options.change or change in options.change:
                narrowed = (options.boundary, options.every, options.first, options.each)
                parts.append(Part(script.name, change, *narrowed))
        if options.change == ["none"]:
            parts.append(Part(script.name, "", "", 1, 0))
    outcomes: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
    surprises: list[str] = []
    record = RecordFile(options.record) if options.record else None
    recorded = [(part, record.outcomes(part)) for part in parts] if record else []
    before = [(part, own) for part, own in recorded if own is not None]
    due = [part for part in parts if part not in dict(before)]
    for part, own in chain(before, run_parts(due, options.jobs, record.add if record else None)):
        outcomes[part.script, part.change] = own
        for outcome in own:
            _show(outcome, reason(outcome))
        print(f"{part.script} {part.change}: {len(own)} cases are over", flush=True)
        surprises += resolved(own, part.is_whole)
    _table({(part.script, part.change): outcomes[part.script, part.change] for part in parts})
    print("\n".join(surprises))
    failed = any(o.problems and not reason(o) for own in outcomes.values() for o in own)
    return int(failed or bool(surprises))


def _show(outcome: Outcome, failure_reason: str) -> None:
    at = f"{outcome.script} {outcome.change} at {outcome.point} ({outcome.boundary})"
    if outcome.problems:
        state = f"known failure ({failure_reason})" if failure_reason else "FAILED"
        problems = "\n    ".join(outcome.problems[:4])
        print(f"{at}: {state}\n    {problems}", flush=True)


def _table(outcomes: dict[tuple[str, str], list[Outcome]]) -> None:
    print("\nboundaries of each script and change:")
    print(f"{'script':<36} {'change':<14} {'passed':>6} {'failed':>6} {'refused':>7}")
    refusals: dict[str, str] = {}
    for (script, change), own in outcomes.items():
        failed = sum(outcome.boundaries for outcome in own if outcome.problems)
        refused = sum(
            outcome.boundaries for outcome in own if outcome.refusal and not outcome.problems
        )
        passed = sum(outcome.boundaries for outcome in own) - failed - refused
        print(f"{script:<36} {change or 'none':<14} {passed:>6} {failed:>6} {refused:>7}")
        refusals.update(
            (script, outcome.refusal) for outcome in own if outcome.refusal and not outcome.problems
        )
    for script, sentence in refusals.items():
        print(f"{script} is refused: {sentence}")


if __name__ == "__main__":
    sys.exit(main())
