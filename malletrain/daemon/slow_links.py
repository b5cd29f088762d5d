"""Measures the network between pairs of leased nodes, to find nodes with a slow link.

Decides when a pair is measured: one pair of a class at a time, and no nodes of a job that rescales
or is being profiled. :mod:`malletrain.core.slow_links` decides which pair is next and whose link is
slow, :mod:`malletrain.daemon.slow_nodes` whether a job continues without the node.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field

from malletrain.core.events import JobState
from malletrain.core.slow_links import MIN_PARTNERS, SlowLink, SlowLinks, gap_s
from malletrain.core.slow_nodes import SlowNode
from malletrain.daemon.core import Core
from malletrain.daemon.lease_actions import LeaseActions
from malletrain.daemon.probes import Probes, Results
from malletrain.daemon.sickbay import slow_node_policy
from malletrain.protocol.event_kinds import EventKind
from malletrain.rounds.interface import RoundStage

SEND_S = 0.1
"""Duration of the measurement of one pair, seconds."""
NO_JOB = ""
"""Group of the idle nodes."""


@dataclass
class _Class:
    """The measurements of one class of nodes."""

    links: SlowLinks = field(default_factory=SlowLinks)
    """Results."""
    began: float = float("-inf")
    """Start of the last measurement, seconds."""
    under_way: bool = False
    """Whether a measurement runs."""


class SlowLinkWatch:
    """Measures the links of all nodes of one daemon."""

    def __init__(self, core: Core, lease_actions: LeaseActions, probes: Probes) -> None:
        self._core = core
        self._slow = core.slow
        self._lease_actions = lease_actions
        self._probes = probes
        self._classes: dict[str, _Class] = {}

    def look(self, now: float) -> None:
        """Begin the measurements that are due. Call it about every half second."""
        config = self._core.config
        if slow_node_policy(config) == "off" or not config.nodes.link_every:
            return
        present: dict[str, list[str]] = {}
        for agent in self._core.agents:
            if agent.gone_at is None and agent.unreachable_since is None:
                present.setdefault(agent.node_class, []).append(agent.node)
        self._classes = {name: self._classes.get(name) or _Class() for name in present}
        for name, nodes in present.items():
            class_state = self._classes[name]
            if not class_state.under_way and now - class_state.began >= gap_s(
                len(nodes), config.nodes.link_every
            ):
                class_state.began = now
                class_state.links.keep(nodes)
                self._measure(class_state, nodes, now)

    def _measure(self, class_state: _Class, nodes: list[str], now: float) -> None:
        groups = self._groups(nodes, now)
        chosen = class_state.links.next_pair(groups)
        if chosen is None:
            return
        group, a, b = chosen
        places = self._places(a, b)
        if places is None:
            return

        def done(results: Results) -> None:
            class_state.under_way = False
            result = results.get((a, b))
            at = self._core.clock.now()
            if result is not None and result.reached:
                class_state.links.measured(a, b, group, result.mbit, at)
                self._update_slow_nodes(class_state.links, group, groups[group], (a, b))

        class_state.under_way = True
        self._probes.begin(places, ((a, b),), now, done, SEND_S)

    def _groups(self, nodes: list[str], now: float) -> dict[str, list[str]]:
        """Return job (NO_JOB for idle nodes) → its nodes, for groups that are large enough to
        compare.
        """
        core = self._core
        groups: dict[str, list[str]] = {}
        for node in nodes:
            agent = core.agents.on(node)
            job = (agent.holds if agent else None) or NO_JOB
            if job == NO_JOB or self._settled(job, node):
                groups.setdefault(job, []).append(node)
        slow = self._slow.links(now)
        return {
            group: members
            for group, members in groups.items()
            if len(members) > MIN_PARTNERS or any(node in slow for node in members)
        }

    def _settled(self, job: str, node: str) -> bool:
        """Whether the job trains on the node and does not rescale."""
        run, record = self._core.runs.get(job), self._core.controller.jobs.get(job)
        return (
            run is not None
            and record is not None
            and record.state is JobState.RUNNING
            and not record.rescaling
            and run.rounds.stage is RoundStage.RUNNING
            and node in run.rounds.members
        )

    def _places(self, a: str, b: str) -> dict[str, str] | None:
        """Return the nodes' addresses in the network of their jobs; None if no network is between
        them.
        """
        rounds = self._core.rounds
        fabric = rounds.networks([a, b])
        if fabric is not None and len(fabric.places) > 1:
            places = {node: place.address for node, place in fabric.places.items()}
        else:
            places = {node: rounds.address_of(node) for node in (a, b)}
        if not all(places.values()) or places[a] == places[b]:
            return None
        return None if any(map(_is_loopback, places.values())) else places

    def _update_slow_nodes(
        self, links: SlowLinks, group: str, members: list[str], pair: tuple[str, str]
    ) -> None:
        with self._core.transaction() as now:
            slow = self._slow.links(now)
            for node in pair:
                if (slow_node := slow.get(node)) and links.well(
                    node, slow_node.link_mbit, slow_node.since
                ):
                    self._record_recovery(node, slow_node.link_mbit)
            for node, link in links.slow(group, members, now).items():
                self._record_slow(node, link, group, now, fresh=node not in slow)

    def _record_slow(
        self, node: str, link: SlowLink, group: str, now: float, *, fresh: bool
    ) -> None:
        sentence = link.sentence(node)
        self._slow.remember(node, SlowNode(now, link.times, sentence, link.usual))
        if fresh:
            self._core.audit.record(
                EventKind.NODE_SLOW,
                sentence,
                job=group,
                node=node,
                slowdown=link.times,
                mbit=round(link.mbit, 1),
                usual_mbit=round(link.usual, 1),
            )
            if group == NO_JOB and slow_node_policy(self._core.config) == "swap":
                self._lease_actions.reclaim(
                    (node,), self._core.controller.settings.reclaim_s, sentence
                )

    def _record_recovery(self, node: str, usual: float) -> None:
        self._slow.link_well(node)
        self._core.audit.record(
            EventKind.NODE_NOT_SLOW,
            f"The link of {node} was measured again and is as fast as those of other nodes.",
            node=node,
            usual_mbit=round(usual, 1),
        )


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False
