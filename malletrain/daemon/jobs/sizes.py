"""Decides on which kind of slots a job runs whose sizes count slots or GPUs. Pure.

The sizes of a job are numbers of leases. ``--slots`` and ``--gpus`` say which leases: slots of one
kind, slots of a kind with one GPU. What could mean two kinds is refused with a sentence that names
the option for each. ``--nodes`` counts leases of any one kind or class, nodes or slots; without
``--kind`` the allocator chooses it.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from malletrain.config.slots import SlotSection
from malletrain.daemon.jobs.admission import RequestRefused
from malletrain.protocol.messages import JobSpec


def with_kind(spec: JobSpec, kinds: Sequence[SlotSection]) -> JobSpec:
    """Return the job with the kind of slots that its sizes count; unchanged if they count nodes.

    Args:
        spec: the job; its ``node_class`` exists here.
        kinds: kinds of slots of the site; empty: leases are whole nodes.

    Raises:
        RequestRefused: the site has no such slots, or has several and none is named.
    """
    if spec.counts == "slots":
        name = _kind_of_slots(spec, kinds)
    elif spec.counts == "gpus":
        name = _kind_of_gpus(spec, kinds)
    else:
        return spec
    return msgspec.structs.replace(spec, node_class=name)


def _kind_of_slots(spec: JobSpec, kinds: Sequence[SlotSection]) -> str:
    named = _named(spec, kinds)
    if named is not None:
        return named.name
    if len(kinds) > 1:
        raise RequestRefused(
            f"This site has slots of several kinds, {_listed(kinds)}; name one, such as "
            f"--slots {_size(spec)} --kind {kinds[0].name}.",
            "usage",
        )
    return kinds[0].name


def _kind_of_gpus(spec: JobSpec, kinds: Sequence[SlotSection]) -> str:
    named = _named(spec, kinds)
    if named is None:
        single = [kind for kind in kinds if kind.gpus == 1]
        if len(single) > 1:
            raise RequestRefused(
                f"This site has several kinds of slots with one GPU, {_listed(single)}; name one, "
                f"such as --gpus {_size(spec)} --kind {single[0].name}.",
                "usage",
            )
        with_gpus = single or [kind for kind in kinds if kind.gpus]
        if not with_gpus:
            raise RequestRefused(
                f"No slots of this site have GPUs ({_listed(kinds)}); --slots {_size(spec)} --kind "
                f"{kinds[0].name} asks for slots without.",
                "usage",
            )
        named = with_gpus[0]
    if named.gpus == 1:
        return named.name
    if not named.gpus:
        raise RequestRefused(
            f"Slots of kind {named.name} have no GPU; for slots without GPUs give --slots "
            f"{_size(spec)} --kind {named.name}.",
            "usage",
        )
    # Not rounded: the job would have other numbers of GPUs than it asks for.
    low = -(-spec.min_nodes // named.gpus)
    high = max(low, spec.max_nodes // named.gpus)
    raise RequestRefused(
        f"Slots of kind {named.name} have {named.gpus} GPUs each, and --gpus counts slots of one "
        f"GPU; give --slots {_range(low, high)} --kind {named.name} for "
        f"{_range(low * named.gpus, high * named.gpus)} GPUs.",
        "usage",
    )


def _named(spec: JobSpec, kinds: Sequence[SlotSection]) -> SlotSection | None:
    """Return the kind that the job names; None if it names none."""
    size = _size(spec)
    if not kinds:
        raise RequestRefused(
            f"This site leases whole nodes and has no slots, so that {spec.size_option} is not "
            "possible; give --nodes MIN:MAX"
            + (", and the GPUs of a node have a process each." if spec.counts == "gpus" else "."),
            "usage",
        )
    if not spec.node_class:
        return None
    for kind in kinds:
        if kind.name == spec.node_class:
            return kind
    raise RequestRefused(
        f"Kind {spec.node_class} is a class of whole nodes and not of slots ({_listed(kinds)}); "
        f"give --nodes {size} --kind {spec.node_class}.",
        "usage",
    )


def _listed(kinds: Sequence[SlotSection]) -> str:
    return ", ".join(kind.name for kind in kinds)


def _size(spec: JobSpec) -> str:
    return _range(spec.min_nodes, spec.max_nodes)


def _range(low: int, high: int) -> str:
    return str(low) if low == high else f"{low}:{high}"
