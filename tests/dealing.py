"""Orders the tests so that several workers end at the same time.

``--dist worksteal`` gives each worker a contiguous part with an equal number of tests; a worker
that is done takes tests from the others. Every part begins with its share of the slow modules. A
module is not divided, because its fixtures are made once in each worker that needs them. Modules
that need a fork server with torch begin only half of the parts: each worker that starts one
imports torch and its compiler for it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping


def deal(
    sizes: Mapping[str, int], slow: Collection[str], workers: int, forking: Collection[str] = ()
) -> list[str]:
    """Return the modules in order.

    Args:
        sizes: module → number of its tests, in the order of collection.
        slow: modules whose tests take seconds.
        workers: number of parts.
        forking: modules of these that need a fork server with torch.
    """
    parts: list[list[str]] = [[] for _ in range(max(1, workers))]
    half = parts[: (len(parts) + 1) // 2]
    ordered = sorted((name for name in sizes if name in slow), key=lambda name: name not in forking)
    for module in ordered:
        min(half if module in forking else parts, key=len).append(module)
    counts = [sum(sizes[module] for module in part) for part in parts]
    fast = [name for name in sizes if name not in slow]
    for module in sorted(fast, key=lambda name: -sizes[name]):
        least = counts.index(min(counts))
        parts[least].append(module)
        counts[least] += sizes[module]
    return [module for part in parts for module in part]
