"""The part of ``malletrain show`` on the data caches of a job: where its samples came from. Decides
the words, and when the cache is said to be of no use.
"""

from __future__ import annotations

from rich.console import RenderableType
from rich.text import Text

from malletrain.protocol.sizes import shown
from malletrain.protocol.views import DataCacheView, JobDetail
from malletrain.render.text import plain

PAGE_CACHE_SHARE = 0.5
"""Part of a node's memory that the page cache is assumed to have beside the job's processes."""


def data_caches(detail: JobDetail) -> list[RenderableType]:
    """Return a paragraph for each data set that the job reads through a cache."""
    parts: list[RenderableType] = []
    for cache in detail.data:
        head = Text("\nData ", "bold")
        head.append(f"{plain(cache.name)}: ", "bold")
        head.append(sentence(cache), "default")
        parts.append(head)
        if advice := advice_on(cache):
            parts.append(Text(advice))
    return parts


def sentence(cache: DataCacheView) -> str:
    """Return where the samples came from: ``81 % of 12,000 reads on the node, 9 % from other
    nodes, 10 % from the data set; 1.2 GB were not read from it. …``
    """
    reads = cache.node_hits + cache.peer_hits + cache.source_reads
    if not reads:
        return "no reads yet."
    places = (
        (cache.node_hits, "on the node"),
        (cache.peer_hits, "from other nodes"),
        (cache.source_reads, "from the data set"),
    )
    shares = [f"{100 * count / reads:.0f} % {place}" for count, place in places]
    text = f"{reads:,} reads: {', '.join(shares)}; {shown(cache.hit_bytes)} were not read from it."
    if cache.samples and cache.memory_bytes:
        share = 100 * min(1.0, cache.present / cache.samples)
        text += f" The memory of its nodes has {share:.0f} % of the samples."
    return f"{text} {coverage(cache)}"


def coverage(cache: DataCacheView) -> str:
    """Return how much of the data an epoch reads: without it a share of hits means nothing."""
    if cache.coverage is None:
        return "Whether an epoch reads all samples is not known: the cache was given no sampler."
    each_once = ", each once" if cache.coverage == 1.0 else ""
    return f"An epoch reads {100 * cache.coverage:.3g} % of the samples{each_once}."


def advice_on(cache: DataCacheView) -> str:
    """Return what the owner can do; empty if the cache is of use as it is."""
    if 0 < cache.data_bytes <= PAGE_CACHE_SHARE * cache.node_bytes:
        return (
            f"The data ({shown(cache.data_bytes)}) fit into the page cache of one node "
            f"({shown(cache.node_bytes)} of memory): from the second epoch on a node the cache is "
            "of no use there."
        )
    if cache.unpacked:
        return (
            f"{cache.unpacked:,} reads were of samples that cannot be cached; the log of a worker "
            "names the type."
        )
    return ""
