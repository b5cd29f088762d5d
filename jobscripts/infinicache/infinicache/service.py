"""A cache node as a service job of MalleTrain: one process on each node, which follows the
membership and drains before it leaves.

The addresses and the secret come from :mod:`malletrain.membership`. Outside MalleTrain the process
is a cache of one node. With ``--worth`` the proxy of the first slot reports to MalleTrain what
nodes are worth to the cache: it asks all proxies how much an amount of memory would serve
(:mod:`infinicache.demand`), and reports the values for the whole service when they have changed
enough.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import re
import signal
import socket
import sys
from bisect import bisect_left
from collections.abc import Mapping, Sequence

from infinicache.connection import CallFailed, ConnectionLost
from infinicache.demand import worth
from infinicache.node import CacheNode
from infinicache.objects import CacheError
from malletrain import membership
from malletrain.waits import time_limit

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
SHARE_OF_NOTICE = 0.9


def parse_size(text: str) -> int:
    """Return the bytes of ``"512M"``, or of ``"50%"`` of the memory that is available on this node
    now. Raises ValueError, with the accepted forms.
    """
    if match := re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*%\s*", text):
        share = float(match[1]) / 100
        if 0 < share <= 1:
            return int(share * os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)i?B?\s*", text, re.IGNORECASE)
    if match and float(match[1]) > 0:
        return int(float(match[1]) * _UNITS[match[2].upper()])
    raise ValueError(
        f'"{text}" is not a size; accepted is a number with K, M, G or T, such as 512M, or a '
        "share of what is free, as 50%."
    )


REPORT_INTERVAL_S = 30.0
MIN_OBSERVED_S = 300.0
"""Minimum time of observation before values are reported, seconds. A cache that has just started
has no hits.
"""
MIN_CHANGE = 0.1
"""Minimum change of a value that is reported, as a share of the largest value."""
MIN_VALUE = 1e-3
"""Value of memory that serves nothing, samples/s. With it the cache keeps nodes that nobody else
wants, and observes whether that changes.
"""
log = logging.getLogger("infinicache")


async def report_values(
    node: CacheNode,
    group: membership.Membership,
    per_gb: float,
    *,
    every_s: float = REPORT_INTERVAL_S,
    observed_s: float = MIN_OBSERVED_S,
) -> None:
    """Report the values of nodes to MalleTrain until cancelled.

    Args:
        node: this process of the cache.
        group: its membership.
        per_gb: worth of a gigabyte served from memory, samples.
        every_s: interval of the reports, seconds.
        observed_s: minimum time of observation, seconds.
    """
    previous: dict[int, float] = {}
    while True:
        await asyncio.sleep(every_s)
        if node.proxies()[:1] != [node.address]:
            previous = {}  # another one speaks
            continue
        try:
            curves = await node.demand(observed_s)
        except (ConnectionLost, CallFailed) as error:
            log.info("the demand is not known: %s", error)
            continue
        if not curves:
            continue
        values = worth(curves, per_gb, node.for_objects)
        values = {size: max(MIN_VALUE, value) for size, value in values.items()}
        if has_changed(previous, values):
            group.set_values(values)
            previous = values
            print(f"nodes are worth {values}", flush=True)


def has_changed(old: Mapping[int, float], new: Mapping[int, float]) -> bool:
    """Return whether the values have changed enough to be reported."""
    if not old:
        return True
    largest = max(*old.values(), *new.values(), MIN_VALUE)
    return any(abs(at(new, k) - at(old, k)) > MIN_CHANGE * largest for k in {*old, *new})


def at(values: Mapping[int, float], size: int) -> float:
    """Return the value of ``size`` nodes as a plan reads it: linear between sizes, constant beyond
    the last.
    """
    sizes = sorted(values)
    i = bisect_left(sizes, size)
    if i == len(sizes):
        return values[sizes[-1]]
    low, low_value = (sizes[i - 1], values[sizes[i - 1]]) if i else (0, 0.0)
    high = sizes[i]
    return low_value + (values[high] - low_value) * (size - low) / (high - low)


def listen_address(host: str) -> str:
    """Return the address of a host name or address at which to listen: IPv6 if it has no IPv4.

    Raises:
        CacheError: it has none.
    """
    with contextlib.suppress(OSError, UnicodeError):
        return socket.gethostbyname(host)
    try:
        infos = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise CacheError(
            f'"{host}", the name of this node in MALLETRAIN_HOST, has no address: {error}.'
        ) from None
    return str(infos[0][4][0])


async def serve(
    capacity: int,
    proxies: int,
    port: int,
    move_bytes_s: float,
    backup_s: float = 0.0,
    reserve: float = 0.0,
    worth_per_gb: float = 0.0,
) -> None:
    """Run the node until the process is ended, or has drained and been released.

    Args:
        capacity: memory for chunks, bytes.
        proxies: number of members that are proxies.
        port: port to listen at; 0: any.
        move_bytes_s: rate of repair and rebalancing, bytes per second.
        backup_s: interval of the copies to a peer, seconds; 0: never.
        reserve: share of the memory that puts leave free.
        worth_per_gb: worth of a gigabyte served from memory, samples; 0: values are not reported.
    """
    host = listen_address(membership.host())
    node = CacheNode(
        capacity,
        membership.job_key(),
        host=host,
        port=port,
        proxies=proxies,
        move_bytes_s=move_bytes_s,
        backup_s=backup_s,
        reserve=reserve,
    )
    group = membership.join(node.address)
    node.name = group.me.node
    over = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, over.set)
    print(f"serving {capacity >> 20} MiB at {node.address}", flush=True)
    follower = asyncio.create_task(_follow(node, group))
    ended = asyncio.create_task(over.wait())
    tasks = [follower, ended]
    if worth_per_gb > 0:
        tasks.append(asyncio.create_task(report_values(node, group, worth_per_gb)))
    await asyncio.wait([follower, ended], return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await node.close()


async def _follow(node: CacheNode, group: membership.Membership) -> None:
    draining: asyncio.Task[None] | None = None
    async for change in group.watch():
        members = group.members
        node.view(
            [m.address for m in members],
            [m.address for m in members if m.leaving],
            group.view_number,
            {
                m.address: m.expected_remaining_s
                for m in members
                if m.expected_remaining_s is not None
            },
        )
        if change.kind == membership.LEAVING and change.member == group.me and draining is None:
            draining = asyncio.create_task(_drain(node, group))
        elif (
            change.kind == membership.STAYING and change.member == group.me and draining is not None
        ):
            draining.cancel()
            draining = None


async def _drain(node: CacheNode, group: membership.Membership) -> None:
    limit = group.me.seconds_left * SHARE_OF_NOTICE
    try:
        async with time_limit(limit):
            moved = await node.drain()
        print(f"drained: {moved} bytes handed over, {node.store.used} left behind", flush=True)
    except asyncio.TimeoutError:
        print(f"not drained within {limit:.1f} s: {node.store.used} bytes left behind", flush=True)
    except (CacheError, ConnectionError, RuntimeError) as error:
        print(f"not drained: {error}", flush=True)
    group.report_drained()


def main(arguments: Sequence[str] | None = None) -> int:
    """The process of one node."""
    parser = argparse.ArgumentParser(prog="infinicache-node", description="One node of the cache.")
    parser.add_argument(
        "--memory",
        default="50%",
        help="memory for chunks: 512M, 8G, or a share of what is free, such as 50%% (default)",
    )
    parser.add_argument(
        "--proxies",
        type=int,
        default=1,
        help="members that are proxies, the same number on all nodes (default 1)",
    )
    parser.add_argument("--port", type=int, default=0, help="port to listen on (default: any)")
    parser.add_argument(
        "--move-rate",
        default="200M",
        help="bytes per second for repair and rebalancing of one pool (default 200M)",
    )
    parser.add_argument(
        "--backup",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="copy what is new to a peer this often; half of the memory is for copies then "
        "(default: never)",
    )
    parser.add_argument(
        "--reserve",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="share of the memory that puts leave free for what leavers hand over (default 0)",
    )
    parser.add_argument(
        "--worth",
        type=float,
        default=0.0,
        metavar="SAMPLES",
        help="what a gigabyte served from memory is worth, in samples of the training beside it: "
        "the cache tells MalleTrain what nodes are worth to it (submit with --value auto)",
    )
    options = parser.parse_args(arguments)
    try:
        capacity, rate = parse_size(options.memory), parse_size(options.move_rate)
    except ValueError as error:
        parser.error(str(error))
    if not 0 <= options.backup < 1e9:
        parser.error(
            f"{options.backup:g} s between backups is not possible; accepted is 0 for none, or "
            "a number of seconds."
        )
    if not 0 <= options.reserve < 1:
        parser.error(f"A reserve of {options.reserve:g} is not possible; accepted is 0 to below 1.")
    if not 0 <= options.worth < 1e12:
        parser.error(
            f"{options.worth:g} samples a gigabyte are not possible; accepted is a number from 0."
        )
    if options.proxies < 1:
        parser.error(f"{options.proxies} proxies are not possible; accepted is 1 or more.")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    try:
        asyncio.run(
            serve(
                capacity,
                options.proxies,
                options.port,
                rate,
                options.backup,
                options.reserve,
                options.worth,
            )
        )
    except CacheError as error:
        print(f"infinicache-node: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(
            f"infinicache-node: port {options.port} cannot be opened: {error.strerror}.",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
