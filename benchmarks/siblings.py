"""Measures how well the training time of one model predicts that of another from their numbers of
parameters, which is the basis of priors from other jobs.

    python -m benchmarks.siblings nasbench101_sample30k.csv.gz [--json FILE]

The table needs columns trainable_parameters and training_time_s_108ep (NAS-Bench-101). Pairs of
cells are drawn at random; the error of ``time · (parameters ratio)^exponent`` is reported by the
difference of their parameters in octaves. The prior of ``jpa.reuse`` is based on it.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import math
import random
import sys
from collections.abc import Sequence
from pathlib import Path

OCTAVES = ((0, 0.05), (0.05, 0.5), (0.5, 1), (1, 2), (2, 3), (3, 4))
EXPONENTS = (0.0, 0.42, 0.5, 1.0)


def read(path: Path) -> list[tuple[float, float]]:
    """Return (log2 parameters, ln seconds) by cell. Raises SystemExit with a sentence if the table
    cannot be read.
    """
    try:
        with gzip.open(path, "rt", newline="") as file:
            rows = [
                (float(r["trainable_parameters"]), float(r["training_time_s_108ep"]))
                for r in csv.DictReader(file)
            ]
    except (OSError, KeyError, ValueError) as error:
        needs = "it needs columns trainable_parameters and training_time_s_108ep"
        raise SystemExit(f"The table {path} cannot be read ({error!r}); {needs}.") from error
    return [(math.log2(p), math.log(t)) for p, t in rows if p > 0 and t > 0]


def errors(
    cells: Sequence[tuple[float, float]], pairs: int, seed: int
) -> dict[str, dict[str, float]]:
    """Return the root mean square error of ln time by exponent and distance."""
    rng = random.Random(seed)
    sums: dict[tuple[float, tuple[float, float]], tuple[float, int]] = {}
    for _ in range(pairs):
        (p, t), (q, u) = rng.choice(cells), rng.choice(cells)
        band = next((b for b in OCTAVES if b[0] <= abs(p - q) < b[1]), None)
        if band is None:
            continue
        for exponent in EXPONENTS:
            off = (t - u) - exponent * (p - q) * math.log(2)
            total, count = sums.get((exponent, band), (0.0, 0))
            sums[exponent, band] = (total + off * off, count + 1)
    return {
        str(exponent): {
            f"{low}-{high}": math.sqrt(
                sums[exponent, (low, high)][0] / sums[exponent, (low, high)][1]
            )
            for low, high in OCTAVES
            if (exponent, (low, high)) in sums
        }
        for exponent in EXPONENTS
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table, and write everything to ``--json``."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("table", type=Path)
    parser.add_argument("--pairs", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    cells = read(options.table)
    mean_p, mean_t = (sum(c[i] for c in cells) / len(cells) for i in (0, 1))
    slope = (
        sum((p - mean_p) * (t - mean_t) for p, t in cells)
        / sum((p - mean_p) ** 2 for p, _ in cells)
        / math.log(2)
    )
    by_exponent = errors(cells, options.pairs, options.seed)
    sys.stdout.write(
        f"{len(cells)} cells; time goes with parameters^{slope:.2f}. Root mean square error of "
        "ln time by octaves apart:\n"
    )
    sys.stdout.write("exponent" + "".join(f"{f'{low}-{high}':>10}" for low, high in OCTAVES) + "\n")
    for exponent, row in by_exponent.items():
        sys.stdout.write(
            f"{exponent:>8}" + "".join(f"{value:>10.3f}" for value in row.values()) + "\n"
        )
    if options.json:
        options.json.write_text(
            json.dumps({"cells": len(cells), "slope": slope, "rms": by_exponent}, indent=1)
        )


if __name__ == "__main__":
    main()
