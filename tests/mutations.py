"""Messages that no part of the product makes: valid messages, generated from their types, with
changes in one or several places.

Everything is drawn from one :class:`random.Random`, so that a seed determines the sequence.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from malletrain.protocol import messages, wire

NUMBERS = (0, 1, -1, 2, 255, 2**31, 2**32, 2**53, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, -(2**63))
FLOATS = (0.0, -0.0, 1e-308, 5e-324, 1e15, 1e308, -1e308, float("inf"), float("-inf"), float("nan"))
TEXTS = ("", "\0", "x" * 64, "x" * 256, "x" * 70_000, "../../etc", "j1", "١", "a\nb", "%s")

MOST_GROWN = 10_000
"""Maximum size of a list that is still repeated, bytes. 300 times that is more than a receiver
accepts.
"""


@functools.cache
def _fields(kind: type) -> tuple[msgspec.inspect.Field, ...]:
    """Cached, because resolving the annotations of a type takes milliseconds."""
    info = msgspec.inspect.type_info(kind)
    assert isinstance(info, msgspec.inspect.StructType)
    return info.fields


class Mutator:
    """Draws messages of certain types.

    Args:
        types: the types.
        names: texts with a meaning for the receiver, such as ids of jobs.
        without: fields that are left out.
    """

    def __init__(
        self,
        rng: random.Random,
        types: Sequence[type],
        names: Sequence[str] = ("j1",),
        without: Sequence[str] = (),
    ) -> None:
        self.rng = rng
        self.types = tuple(types)
        self._names = tuple(names)
        self._without = frozenset(without)

    def frames(self) -> list[bytes]:
        """Return the frames of one message. One message in ten is unchanged."""
        rng = self.rng
        kind = rng.choice(self.types)
        fields = self.fields(kind)
        for _ in range(rng.choice((0, 1, 1, 1, 1, 2, 2, 3, 3, 5))):
            self.change(fields)
        fields = {name: value for name, value in fields.items() if name not in self._without}
        payload = msgspec.msgpack.encode({"type": kind.__struct_config__.tag, **fields})
        if rng.random() < 0.1:
            payload = self._damaged(payload)
        if rng.random() < 0.02:
            return rng.choice(
                ([b""], [payload], [wire.PROTOCOL, payload, b""], [b"MT0", payload], [b"", b""])
            )
        return [wire.PROTOCOL, payload]

    def fields(self, kind: type) -> dict[str, Any]:
        """Return a valid value of this kind, sometimes with optional fields."""
        made = {}
        for field in _fields(kind):
            if field.required or self.rng.random() < 0.4:
                made[field.encode_name] = self._value(field.type)
        return made

    def _value(self, info: Any, depth: int = 0) -> Any:
        rng, kinds = self.rng, msgspec.inspect
        if isinstance(info, kinds.UnionType):
            return self._value(rng.choice(info.types), depth)
        if isinstance(info, kinds.IntType):
            low, high = info.ge or 0, info.le if info.le is not None else 2**53
            return rng.choice((low, high, rng.randint(low, min(high, low + 4))))
        if isinstance(info, kinds.FloatType):
            low, high = info.ge or 0.0, info.le if info.le is not None else 1e9
            return rng.choice((low, high, rng.uniform(max(low, 0.0), min(high, 2e9))))
        if isinstance(info, kinds.StrType):
            return rng.choice(self._names) if rng.random() < 0.8 else rng.choice(TEXTS)
        if isinstance(info, kinds.BytesType):
            return rng.randbytes(rng.choice((0, 1, 100, 5000)))
        if isinstance(info, kinds.BoolType):
            return rng.random() < 0.5
        if isinstance(info, kinds.EnumType):
            return rng.choice([member.value for member in info.cls])
        if isinstance(info, kinds.LiteralType):
            return rng.choice(info.values)
        if isinstance(info, kinds.StructType) and depth < 4:
            return {
                f.encode_name: self._value(f.type, depth + 1)
                for f in info.fields
                if f.required or rng.random() < 0.4
            }
        if isinstance(info, kinds.VarTupleType | kinds.ListType | kinds.CollectionType):
            return [self._value(info.item_type, depth + 1) for _ in range(rng.choice((0, 1, 3)))]
        if isinstance(info, kinds.TupleType):
            return [self._value(item, depth + 1) for item in info.item_types]
        if isinstance(info, kinds.DictType):
            return {
                str(self._value(info.key_type, depth + 1)): self._value(info.value_type, depth + 1)
                for _ in range(rng.choice((0, 1, 3)))
            }
        return self.oddity() if isinstance(info, kinds.AnyType) else None

    def oddity(self, depth: int = 0) -> Any:
        """Return a value that a field may not expect."""
        rng = self.rng
        draws: tuple[Callable[[], Any], ...] = (
            lambda: rng.choice(NUMBERS),
            lambda: rng.choice(FLOATS),
            lambda: rng.choice(TEXTS),
            lambda: rng.choice(self._names),
            lambda: rng.choice((None, True, False, b"", b"\xff" * 40)),
            lambda: [] if depth > 3 else [self.oddity(depth + 1) for _ in range(rng.randrange(4))],
            lambda: {} if depth > 3 else {rng.choice(TEXTS): self.oddity(depth + 1)},
        )
        return rng.choice(draws)()

    def change(self, fields: dict[str, Any]) -> None:
        """Make one change, at the top level or further inside."""
        rng = self.rng
        if not fields or rng.random() < 0.05:
            fields[rng.choice(("type", "x", "owner", ""))] = self.oddity()
            return
        name = rng.choice(list(fields))
        inner = fields[name]
        if isinstance(inner, dict) and inner and rng.random() < 0.6:
            self.change(inner)
        elif rng.random() < 0.15:
            del fields[name]
        elif isinstance(inner, list) and inner and rng.random() < 0.5:
            # Lists of lists grow only once: a message of gigabytes would only burden the sender.
            small = len(msgspec.msgpack.encode(inner)) <= MOST_GROWN
            fields[name] = inner * (rng.choice((2, 300)) if small else 1)
        else:
            fields[name] = self.oddity()

    def _damaged(self, payload: bytes) -> bytes:
        rng = self.rng
        data = bytearray(payload)
        for _ in range(rng.choice((1, 1, 2, 8))):
            if not data:
                break
            at = rng.randrange(len(data))
            match rng.randrange(4):
                case 0:
                    data[at] = rng.randrange(256)
                case 1:
                    del data[at:]
                case 2:
                    data[at:at] = b"\x91" * rng.choice((1, 50, 2000))  # lists within lists
                case _:
                    data[at:at] = rng.choice((b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff"))
        return bytes(data)


def of_agents() -> tuple[type, ...]:
    """Return messages that an agent may send, and messages that only others may send."""
    return (*_members(messages.AgentMessage), messages.Assign, messages.Reply, messages.Request)


def of_daemons() -> tuple[type, ...]:
    """Return messages that a daemon may send, except orders to start or end something."""
    dangerous = (messages.Assign, messages.Goodbye, messages.WarmUp)
    return tuple(t for t in _members(messages.DaemonMessage) if t not in dangerous)


def _members(union: Any) -> tuple[type, ...]:
    return tuple(union.__args__)


OPERATIONS = (
    *("submit", "cancel", "jobs", "job", "nodes", "events", "logs", "members", "metrics", "news"),
    "worth",
    *("status", "usage", "scale", "weigh", "extend", "pause", "resume", "drain", "exclude"),
    *("login", "nothing", ""),
)
PARAMETERS = (
    *("spec", "jobs", "job", "ended", "explain", "since", "limit", "wait_s", "stream", "cursor"),
    *("names", "most", "until", "credential", "min_nodes", "max_nodes", "weight", "nodes", "node"),
    *("release", "deadline", "budget_nh", "x", "values", "next_each", "next_count", "expires_s"),
)


def request(mutator: Mutator, job: str) -> list[bytes]:
    """Return a request of a client: an operation with parameters that are almost right or entirely
    wrong.
    """
    rng = mutator.rng
    params = {rng.choice(PARAMETERS): mutator.oddity() for _ in range(rng.randrange(4))}
    op = rng.choice(OPERATIONS)
    if rng.random() < 0.7:
        params["job"] = job
    if op == "submit":
        params["spec"] = mutator.fields(messages.JobSpec)
        mutator.change(params["spec"])
    if op in ("events", "news"):
        params["wait_s"] = 0.0
    return [
        wire.PROTOCOL,
        msgspec.msgpack.encode(
            {
                "type": messages.Request.__struct_config__.tag,
                "id": rng.choice(("a", "b")),
                "op": op,
                "params": params,
            }
        ),
    ]
