"""What arrives from a socket: honest messages come through whole, forged ones are refused with a
sentence.
"""

from __future__ import annotations

import datetime
import math

import msgspec
import pytest
from msgspec import inspect

from malletrain.protocol import messages, wire
from malletrain.protocol.launcher_channel import LaunchOrder
from malletrain.protocol.payloads import Notification, SoftwareEnvironment
from malletrain.protocol.views import RankTimesView

HONEST = [
    messages.Hello(
        "n1",
        "l1",
        "10.0.0.1",
        77,
        8,
        "gpu a100",
        12.5,
        messages.Assignment("j1", "failed", 3, (messages.Failure(2, -9, 1.7e9, "Killed"),)),
    ),
    messages.Heartbeat("abcd1234-3", 10**10),
    messages.Phase(
        messages.Assignment("j1", "running", 4, address="tcp://10.0.0.1:4000"), "the last\nlines"
    ),
    messages.StoreUp("j1", 3, "n1", 65535),
    messages.Drained("j1", 3, False, "No worker here takes snapshots."),
    messages.Worth("j1", {1: 0.0, 16: 1e9}),
    messages.TaskPull("j1", "f00d", 8, 24, (messages.HeldTask(3, 1, True),), 2),
    messages.TaskResults(
        "j1", "f00d", (messages.TaskResult(3, 1, -9, 1.7e9, 1.7e9, "Killed"),), 24, 2
    ),
    messages.TaskQuery("j1"),
    messages.TaskItems("j1", 3, (messages.TaskItem(4, 1, ("a b", "{7}")),)),
    messages.TaskAck("j1", ((3, 1),)),
    messages.TaskStop("j1", ((3, 1),)),
    messages.Released("j1"),
    messages.Leaving(0.0),
    messages.Progress("j1", 3, 1023, 4_194_304, 1e12, 10**9, 4096.0, 1.7e9, 1.7e9),
    messages.Mark("j1", 3, 0, "import", 1.7e9),
    messages.Metric("j1", 0, "loss", -1e300),
    messages.Notice(
        "j1",
        0,
        "snapshot",
        "",
        {
            "saved": True,
            "path": "/tmp/s",
            "bytes": 2**40,
            "seconds": 0.5,
            "samples": 1e9,
            "steps": 3,
        },
    ),
    messages.Notice("j1", 0, "profile", "", {"parameters": 70 * 10**9, "flops_per_sample": None}),
    messages.LogChunk("j1", 3, "rank1023", "n1", 2**50, b"\0\xff"),
    messages.LogChunk("j1", 0, "launcher", "n1", 0, b""),
    messages.LogChunk("j1", 0, "service", "n1", 0, b""),
    wire.request("0123456789abcdef0123456789abcdef", "events", {"since": 0, "job": None}),
]


@pytest.mark.parametrize("message", HONEST, ids=lambda m: type(m).__name__)
def test_what_is_sent_arrives(message):
    assert wire.decode(wire.encode(message)) == message
    tag, payload = wire.encode(message)
    newer = [tag, msgspec.msgpack.encode({**msgspec.msgpack.decode(payload), "surprise": [1]})]
    with pytest.raises(wire.WireError, match="unknown field `surprise`"):
        wire.decode(newer)
    assert wire.decode(newer, newer=True) == message


def test_what_an_agent_does_not_know_of_a_newer_daemon_is_left_out_wherever_it_stands():
    spec = messages.JobSpec(
        "j",
        "ann",
        "/x.py",
        "/",
        "python",
        software=SoftwareEnvironment(modules=("cuda",)),
        notify=(Notification("ann@x", "mail", ("end",)),),
        links={"surprise": "http://n1"},
    )
    message = messages.Assign("j1", spec)
    body = msgspec.msgpack.decode(msgspec.msgpack.encode(message))
    inner = body["spec"]
    for part in (body, inner, inner["software"], inner["notify"][0]):
        part["surprise"] = {"a": 1}
    newer = [wire.PROTOCOL, msgspec.msgpack.encode(body)]
    assert wire.decode(newer, newer=True) == message
    body["job"] = 7
    with pytest.raises(wire.WireError, match="Expected `str`, got `int`"):
        wire.decode([wire.PROTOCOL, msgspec.msgpack.encode(body)], newer=True)


def parts_of(kind):
    """Return the types of which a type directly consists."""
    values = []
    for name in kind.__struct_fields__:
        value = getattr(kind, name)
        values += value if isinstance(value, tuple) else [value]
    types = [value.type if isinstance(value, inspect.Field) else value for value in values]
    return [one for one in types if isinstance(one, inspect.Type)]


def types_in(kind):
    """Return the type and all types in it, each once."""
    by_id, pending = {}, [kind]
    while pending:
        one = pending.pop()
        if id(one) not in by_id:
            by_id[id(one)] = one
            pending += parts_of(one)
    return list(by_id.values())


def unsearched_structs(kind):
    """Return the structs in ``kind`` that known_fields does not reach."""
    containers = (inspect.StructType, inspect.UnionType, inspect.ListType, inspect.VarTupleType)
    structs = []
    for one in types_in(kind):
        parts = [] if isinstance(one, containers) else parts_of(one)
        if isinstance(one, inspect.DictType):
            parts = [one.key_type]
        inner = [each for part in parts for each in types_in(part)]
        structs += [each.cls for each in inner if isinstance(each, inspect.StructType)]
    return structs


def test_every_struct_in_a_message_is_searched_for_unknown_fields():
    struct = messages.HeldTask
    assert unsearched_structs(inspect.type_info(tuple[struct, int])) == [struct]
    assert unsearched_structs(inspect.type_info(dict[struct, str])) == [struct]
    assert unsearched_structs(inspect.type_info(list[dict[str, struct]])) == []
    assert unsearched_structs(inspect.type_info(messages.AnyMessage)) == []


def always_sent(kind):
    """Return the structs with names of fields in ``kind`` that send fields at their defaults."""
    structs = [one.cls for one in types_in(kind) if isinstance(one, inspect.StructType)]
    return [
        struct.__name__
        for struct in structs
        if struct.__struct_defaults__
        and not struct.__struct_config__.array_like
        and not struct.__struct_config__.omit_defaults
    ]


def test_no_part_of_a_message_or_of_an_order_sends_a_field_at_its_default():
    assert always_sent(inspect.type_info(RankTimesView)) == ["RankTimesView"]
    assert always_sent(inspect.type_info(messages.AnyMessage)) == []
    assert always_sent(inspect.type_info(LaunchOrder)) == []


BIG = 2**64 - 1
FORGED = [
    ("hello", {"node": "n\x1fbob", "lease": "l1", "host": "h", "pid": 1}),
    ("hello", {"node": "n1", "lease": "l1", "host": "h", "pid": 1, "node_class": "default\x1fbob"}),
    ("hello", {"node": "n" * 256, "lease": "l1", "host": "h", "pid": 1}),
    ("hello", {"node": "n1", "lease": "l1", "host": "h", "pid": 1, "gone_in_s": math.nan}),
    (
        "hello",
        {
            "node": "n1",
            "lease": "l1",
            "host": "h",
            "pid": 1,
            "networks": [{"interface": "ib0", "address": "10.1.0.1", "bits": 24}] * 65,
        },
    ),
    ("leaving", {"in_s": math.nan}),
    ("leaving", {"in_s": math.inf}),
    ("leaving", {"in_s": -1.0}),
    ("phase", {"assignment": {"job": "j1", "phase": "failed", "generation": -1}}),
    (
        "phase",
        {
            "assignment": {
                "job": "j1",
                "phase": "failed",
                "failures": [{"rank": BIG, "exitcode": 1, "time": 1.0}],
            }
        },
    ),
    (
        "phase",
        {
            "assignment": {
                "job": "j1",
                "phase": "failed",
                "failures": [{"rank": 1, "exitcode": 1, "time": math.nan}],
            }
        },
    ),
    ("phase", {"assignment": {"job": "j1", "phase": "x" * 65}}),
    ("storeup", {"job": "j1", "generation": 1, "host": "h", "port": 65536}),
    ("drained", {"job": "j1", "generation": 1, "saved": True, "sentence": "x" * 8193}),
    *(
        (
            "progress",
            {
                "job": "j1",
                "generation": 1,
                "rank": 0,
                "pid": 1,
                "samples": 1.0,
                "steps": 1,
                "batch": 1.0,
                "first": 1.0,
                "last": 1.0,
                **c,
            },
        )
        for c in (
            {"generation": BIG},
            {"generation": -1},
            {"rank": 2**63},
            {"pid": BIG},
            {"steps": BIG},
            {"samples": math.nan},
            {"samples": math.inf},
            {"samples": 1e16},
            {"samples": -1.0},
            {"batch": math.nan},
            {"first": -1.0},
            {"last": math.inf},
            {"job": "j" * 65},
        )
    ),
    ("mark", {"job": "j1", "generation": 1, "rank": 0, "name": "n" * 65, "time": 1.0}),
    ("metric", {"job": "j1", "rank": 0, "name": "n" * 8193, "value": 1.0}),
    *(
        ("notice", {"job": "j1", "rank": 0, "kind": "snapshot", "sentence": "", "data": data})
        for data in (
            {"a": b"bytes"},
            {"a": datetime.datetime(2026, 1, 1, tzinfo=datetime.timezone.utc)},
            {"a": {"nested": 1}},
            {"a": {(1, 2): 3}},
            {1: 2},
            {"a": BIG},
            {"a": math.inf},
            {"a": "x" * 8193},
            {str(i): i for i in range(65)},
        )
    ),
    *(
        (
            "logchunk",
            {
                "job": "j1",
                "generation": 1,
                "stream": "rank0",
                "node": "n1",
                "offset": 0,
                "data": b"x",
                **c,
            },
        )
        for c in (
            {"offset": BIG},
            {"offset": -1},
            {"generation": BIG},
            {"stream": ".."},
            {"stream": "rank"},
            {"stream": "rank0\n"},
            {"stream": "rank0/../x"},
            {"stream": "rank٣"},
            {"node": "n\0"},
        )
    ),
    ("request", {"id": "x" * 65, "op": "jobs"}),
    ("request", {"id": "x", "op": "o" * 65}),
]


@pytest.mark.parametrize(
    ("kind", "fields"), FORGED, ids=lambda x: x if isinstance(x, str) else repr(x)[-60:]
)
def test_what_no_honest_process_sends_is_refused(kind, fields):
    with pytest.raises(wire.WireError, match="does not fit the protocol"):
        wire.decode([wire.PROTOCOL, msgspec.msgpack.encode({"type": kind, **fields})])


@pytest.mark.parametrize(
    ("say", "most", "field"),
    [
        (lambda n: messages.Probed(1, (messages.ProbeResult("n1", True),) * n), 256, "results"),
        (
            lambda n: messages.Phase(
                messages.Assignment("j1", "failed", 3, (messages.Failure(2, -9, 1.0),) * n)
            ),
            4096,
            "failures",
        ),
    ],
    ids=["probed", "failures"],
)
def test_no_more_is_said_at_once_than_a_node_can_have(say, most, field):
    assert wire.decode(wire.encode(say(most))) == say(most)
    with pytest.raises(wire.WireError, match=field):
        wire.decode(wire.encode(say(most + 1)))


@pytest.mark.parametrize(
    "message",
    [{"type": "heartbeat", "boot": "b", "x" * 10**6: 1}, {"type": "x" * 10**6}],
    ids=["field", "type"],
)
def test_what_was_wrong_is_said_in_few_words(message):
    with pytest.raises(wire.WireError) as refused:
        wire.decode([wire.PROTOCOL, msgspec.msgpack.encode(message)])
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize(
    "data",
    [2**64, object(), "\udc80", "x" * wire.MAX_MESSAGE_BYTES],
    ids=["large", "object", "surrogate", "long"],
)
def test_what_cannot_be_sent_is_said_so(data):
    with pytest.raises(wire.WireError):
        wire.encode(messages.Reply("1", True, data))


def test_a_file_name_that_is_no_text_is_said_so_in_words_of_its_owner():
    with pytest.raises(wire.WireError) as refused:
        wire.request("1", "submit", {"script": "/home/ann/caf\udce9.py"})
    assert str(refused.value).startswith(r"'/home/ann/caf\udce9.py' is not UTF-8 text. Rename")
