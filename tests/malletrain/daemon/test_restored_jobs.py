"""What a daemon that starts takes in hand: read at once, it is what reading job by job finds."""

import asyncio
import itertools
import shutil

import msgspec
import pytest

from malletrain.config.model import parse_config
from malletrain.core.events import JobSubmitted
from malletrain.daemon.jobs.repository import decode_spec
from malletrain.protocol import messages
from malletrain.store.records import CurveRow, GoalRow, JobRow, ProfileRow
from malletrain.store.store import Store
from tests.malletrain.daemon.engines import make_engine
from tests.malletrain.daemon.test_curves import MEASURED

pytestmark = pytest.mark.slow

MODES = ("restart", "live", "service")
KNOWN = ("nothing", "a key", "a curve", "garbage")
GOALS = ("none", "stated", "kept", "standing")
AFTER = ("", "completed", "failed", "open", "unknown")


def fill(store, script):
    """A job for each combination of mode, stored profile, goals, dependency and past."""
    others = {
        state: store.add_job(JobRow(store.new_job_id(), "b", "ada", "{}", state)).id
        for state in ("completed", "failed")
    }
    first = store.new_job_id()
    others |= {"open": first, "unknown": "j99999"}
    store.add_job(JobRow(first, "first", "ada", written(script, mode="restart"), "queued"))
    store.put_curve(CurveRow("known", "gpu", 4, MEASURED.to_dict(), first, 5.0))
    kinds = itertools.product(MODES, KNOWN, GOALS, AFTER, (None, 12.0))
    for number, (mode, knowledge, goals, after, started) in enumerate(kinds):
        curve = {"1": 1.0, "2": 1.9} if mode == "service" or number % 5 == 0 else None
        spec = written(
            script,
            mode=mode,
            curve=curve,
            args=(f"--deep={number % 3}",),
            profile_key="mine" if number % 2 else "",
            sweep="s/1" if number % 4 == 1 else "",
            budget_nh=3.0 if goals == "stated" else None,
            after=(others[after],) if after else (),
        )
        state = "queued" if started is None else "suspended"
        row = JobRow(
            store.new_job_id(), "a", "ada", spec, state, started=started, samples=float(number)
        )
        store.add_job(row)
        if knowledge != "nothing":
            learned = {"a curve": MEASURED.to_dict(), "garbage": {"no": "curve"}}.get(knowledge, {})
            key = "known" if number % 3 else "other"
            store.put_profile(ProfileRow(row.id, key, "gpu", learned))
        if goals in ("kept", "standing"):
            standing = "on_track" if goals == "standing" else ""
            store.goals.put(GoalRow(row.id, None, 7.0, 1e6, 0, 2.0, 3.0, standing))


def written(script, **more):
    spec = messages.JobSpec(
        "a", "ada", script, "/", "python", min_nodes=1, max_nodes=4, goal="throughput", **more
    )
    return msgspec.json.encode(spec).decode()


def restored(folder, config, take):
    """The events that the controller gets of the jobs, and what is stored of them then."""

    async def live():
        with Store.open(f"sqlite:///{folder}/m.db") as store:
            engine = make_engine(config, store)
            fed, feed = [], engine.transactions.feed

            def fed_with(event):
                fed.append(event)
                feed(event)

            engine.transactions.feed = fed_with
            engine.state.controller.hold(engine.state.clock.now() + 3600.0)
            take(engine)
            engine.close()
            jobs = list(engine.state.runs)
            return fed, [(store.profile(job), store.goals.of(job)) for job in jobs], jobs

    return asyncio.run(live())


def one_by_one(engine):
    """As it was done when each job had queries of its own."""
    with engine.transactions.begin():
        for row in engine.state.store.list_jobs(["queued", "suspended"]):
            spec = decode_spec(row.spec)
            before = [engine.state.store.get_job(job) for job in spec.after]
            awaits = any(each is not None and each.state != "completed" for each in before)
            if row.started is not None or not awaits:
                engine.jobs.add(row, spec)


@pytest.mark.parametrize("profiled", ["true", "false"])
def test_many_jobs_at_once_are_what_each_is_alone(tmp_path, profiled):
    script = tmp_path / "train.py"
    script.write_text("print(1)\n")
    for folder in ("one", "many"):
        (tmp_path / folder).mkdir()
    with Store.open(f"sqlite:///{tmp_path}/one/m.db") as store, store.transaction():
        fill(store, str(script))
    shutil.copy(tmp_path / "one" / "m.db", tmp_path / "many" / "m.db")
    config = parse_config(
        f'[daemon]\nstate_dir = "{tmp_path}/state"\n[scheduler]\nkind = "local"\n'
        f"[profiling]\nenabled = {profiled}\n"
    )
    one = restored(tmp_path / "one", config, one_by_one)
    many = restored(tmp_path / "many", config, lambda engine: engine.jobs.restore())
    assert many == one
    event_of = {event.job: event for event in many[0] if isinstance(event, JobSubmitted)}
    assert set(event_of) == set(many[2])
    with_scaling = [event.scaling is not None for event in event_of.values()]
    assert any(with_scaling) == (profiled == "true")
    assert len(event_of) == 1 + len(MODES) * len(KNOWN) * len(GOALS) * (len(AFTER) * 2 - 2)


def test_a_start_with_more_jobs_asks_the_database_no_more(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("print(1)\n")
    query_counts = []
    for number in (3, 300):
        folder = tmp_path / str(number)
        folder.mkdir()
        with Store.open(f"sqlite:///{folder}/m.db") as store, store.transaction():
            for _ in range(number):
                job = store.new_job_id()
                store.add_job(JobRow(job, "a", "ada", written(str(script)), "queued"))
                store.put_profile(ProfileRow(job, "known", "gpu"))
        config = parse_config(
            f'[daemon]\nstate_dir = "{folder}/state"\n[scheduler]\nkind = "local"\n'
        )
        queries = []

        def counted(engine, queries=queries):
            with engine.state.store.transaction() as connection:
                driver = connection.connection.driver_connection
                driver.set_trace_callback(queries.append)
                engine.jobs.restore()
                driver.set_trace_callback(None)

        restored(folder, config, counted)
        query_counts.append(len([query for query in queries if query.startswith("SELECT")]))
    assert query_counts[0] == query_counts[1] > 0
