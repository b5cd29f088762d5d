"""A script that ends is left alone: nodes may change while its processes write their results. One
in the code after an epoch is, too, until that code has run.
"""

from __future__ import annotations

import signal

import pytest

from tests.integration.embedded import gone, site

# Each line it writes says what a process did, its rank and its round.
COMMON = """
import os, sys, time
import torch
import malletrain
def note(what):
    with open("notes", "a") as file:
        file.write(f"{what} {rank()} of round {os.environ['MALLETRAIN_GENERATION']}\\n")
def wait_for(name):
    while not os.path.exists(name):
        time.sleep(0.02)
model = torch.nn.Linear(4, 1)
sampler = malletrain.ElasticSampler(64, global_batch_size=16)
"""
RESTART = (
    COMMON
    + """
rank = lambda: os.environ["RANK"]
snapshot = malletrain.Snapshot("run.pt", model=model, sampler=sampler)
snapshot.restore()
note("begun")
for epoch in sampler.epochs(2):
    for batch in sampler:
        time.sleep(0.01)
        sampler.advance()
        malletrain.report(len(batch))
        snapshot.step()
note("trained")
wait_for("write")
note("written")
"""
)
LIVE = (
    COMMON
    + """
from malletrain import elastic
rank = lambda: run.rank
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = elastic.Run(model=model, optimizer=optimizer, sampler=sampler)
net = run.ddp(model)
note("begun")
loader = torch.utils.data.DataLoader(torch.zeros(64, 4), batch_sampler=sampler)
for epoch in sampler.epochs(2):
    for batch in run.batches(loader):
        with run.step():
            optimizer.zero_grad()
            (net(batch).mean() * run.loss_weight).backward()
            optimizer.step()
note("trained")
wait_for("write")
note("written")
"""
)
# Rank 0 writes the results, and the others have none.
LIVE_RESULTS = LIVE.replace("run = elastic.Run(", 'run = elastic.Run(snapshot="run.pt", ').replace(
    'wait_for("write")',
    """
if rank() == 0:
    note(f"on {os.environ['MALLETRAIN_NODE']}")
    wait_for("write")
""",
)
# Nothing says when it has trained enough: rank 1 is done before rank 0.
PLAIN = """
import os, time, malletrain
def note(what):
    with open("notes", "a") as file:
        file.write(f"{what} {os.environ['RANK']} of round {os.environ['MALLETRAIN_GENERATION']}\\n")
note("begun")
malletrain.report(1)
note("trained")
while os.environ["RANK"] == "0" and not os.path.exists("write"):
    time.sleep(0.02)
note("written")
"""
EVALUATES = (
    COMMON
    + """
rank = lambda: os.environ["RANK"]
from malletrain.protocol.flags import FlagsReader
snapshot = malletrain.Snapshot("run.pt", model=model, sampler=sampler)
snapshot.restore()
note("begun")
flags = FlagsReader(os.environ["MALLETRAIN_FLAGS"])
for epoch in sampler.epochs(2):
    for batch in sampler:
        sampler.advance()
        malletrain.report(len(batch))
        # The change may be announced only after the evaluation. Without this the four steps may be
        # over before that, and the change waits for the next evaluation.
        while epoch and rank() == "0" and os.environ["MALLETRAIN_GENERATION"] == "1":
            if flags.drain_request():
                break
            time.sleep(0.01)
        snapshot.step()
    note(f"evaluates {epoch}")
    wait_for(f"evaluate-{epoch}")
    note(f"evaluated {epoch}")
"""
)
# Both ranks wait in their third step. Momentum makes the weights depend on the order of the steps,
# and all numbers are exact on any number of ranks. The node that "go" names waits until it has
# heard that round 2 is over.
IN_A_STEP = (
    COMMON.replace("batch_size=16", "batch_size=16, shuffle=False")
    + """
from malletrain import elastic
rank = lambda: run.rank
torch.nn.init.zeros_(model.weight)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
run = elastic.Run(model=model, optimizer=optimizer, sampler=sampler)
net = run.ddp(model)
data = torch.arange(64.0).reshape(-1, 1).repeat(1, 4)
loader = torch.utils.data.DataLoader(data, batch_sampler=sampler)
for epoch in sampler.epochs(2):
    for batch in run.batches(loader):
        with run.step() as step:
            optimizer.zero_grad()
            if step.generation == 1 and run.steps_done == 2:
                note("waits")
                wait_for("go")
                taken = open("go").read() == os.environ["MALLETRAIN_NODE"]
                while taken and 2 not in run.membership._aborted:
                    time.sleep(0.02)
            (net(batch).mean() * run.loss_weight).backward()
            optimizer.step()
        if not step.aborted:
            note(f"step {run.steps_done}:")
note(f"weights {model.weight[0].tolist()} after {run.steps_done} steps:")
"""
)
SCRIPTS = {"restart": RESTART, "live": LIVE, "plain": PLAIN}
WAITS = "a rescale waits for that"
ONCE = sorted(
    f"{what} {rank} of round 1" for what in ("begun", "trained", "written") for rank in (0, 1)
)


def at_its_end(made, kind, **spec):
    """A job on two nodes whose script is in the code after its training, as the daemon knows."""
    script = made.script("train.py", SCRIPTS[kind])
    mode = "live" if kind == "live" else "restart"
    job = made.submit(script, nodes=(2, 3), mode=mode, profile=False, **spec)
    made.until(lambda: noted(made, "trained") >= 2, "two ranks have trained")
    made.until(lambda: "about to exit" in made.job(job).reason, "the daemon knows that")
    return job


def noted(made, what):
    path = made.work / "notes"
    return path.read_text().count(what) if path.exists() else 0


def notes(made):
    return sorted((made.work / "notes").read_text().splitlines())


@pytest.fixture(scope="module")
def standing(tmp_path_factory):
    """Two nodes, so that a job has them both and a third one comes when the test wants it."""
    with site(tmp_path_factory.mktemp("standing"), nodes=2) as made:
        yield made


def scale(made, job, low, high):
    with made.client() as client:
        client.call("scale", {"job": job, "min_nodes": low, "max_nodes": high}, changes=True)
    made.until(lambda: made.events("job-rescaled", job=job), "the change is planned")


@pytest.mark.thorough
@pytest.mark.parametrize("kind", SCRIPTS)
def test_a_planned_change_is_dropped_when_the_script_is_done(shared, kind):
    job = at_its_end(shared, kind)
    scale(shared, job, 1, 1)
    (shared.work / "write").touch()
    shared.until_state(job, "completed", "failed")
    assert notes(shared) == ONCE
    assert shared.job(job).state == "completed"
    assert len(shared.events("round-formed", job=job)) == 1


@pytest.mark.thorough
def test_a_daemon_that_starts_again_leaves_the_script_alone(shared):
    job = at_its_end(shared, "restart")
    shared.kill_daemon()
    (shared.work / "write").touch()
    shared.until(lambda: notes(shared) == ONCE, "everything is written")
    shared.start_daemon()
    shared.until_state(job, "completed", "failed")
    assert notes(shared) == ONCE
    assert shared.job(job).state == "completed"


def test_a_node_that_is_taken_gives_the_script_its_grace(shared):
    job = at_its_end(shared, "restart")
    last = shared.job(job).nodes[-1]
    shared.agents()[last].send_signal(signal.SIGTERM)
    shared.until(lambda: shared.events("job-suspended", job=job), "the other node is too few")
    (shared.work / "write").touch()
    shared.until_state(job, "completed", "failed")
    assert notes(shared) == ONCE
    assert shared.job(job).state == "completed"


def test_a_live_job_that_loses_the_node_that_writes_its_results_writes_them_on_another(shared):
    script = shared.script("train.py", LIVE_RESULTS)
    job = shared.submit(script, nodes=(2, 2), mode="live", profile=False)
    shared.until(
        lambda: noted(shared, " 0 of round") == 3 and noted(shared, "written 1 of"), "they end"
    )
    with shared.client() as client:  # one node is enough to go on
        client.call("scale", {"job": job, "min_nodes": 1, "max_nodes": 2}, changes=True)
    (writer,) = (line.split()[1] for line in notes(shared) if line.startswith("on "))
    agent = shared.agents()[writer]
    processes = agent.children(recursive=True)
    agent.kill()
    shared.until(
        lambda: noted(shared, "begun") == 3 or shared.job(job).ended, "the other node begins again"
    )
    shared.until(lambda: all(map(gone, processes)), "the first one writes nothing any more")
    (shared.work / "write").touch()
    ended = shared.until_state(job, "completed", "failed")
    assert ended.state == "completed", ended.reason
    assert noted(shared, "written 0 of") == 1
    assert not shared.events("workers-failed", job=job), "that uses up no try"


def test_a_planned_change_waits_for_an_evaluation(shared):
    script = shared.script("train.py", EVALUATES)
    job = shared.submit(script, nodes=(2, 2), profile=False)
    shared.until(lambda: noted(shared, "evaluates 0 1") == 1, "two ranks evaluate")
    shared.until(lambda: WAITS in shared.job(job).reason, "the daemon knows that")
    scale(shared, job, 1, 1)
    (shared.work / "evaluate-0").touch()
    shared.until(lambda: noted(shared, "evaluates 1 0 of round 2"), "the change was made")
    (shared.work / "evaluate-1").touch()
    shared.until_state(job, "completed", "failed")
    # Rank 1 waits for nobody: the script has no collective.
    assert [line for line in notes(shared) if " 0 of round" in line] == [
        "begun 0 of round 1",
        "begun 0 of round 2",
        "evaluated 0 0 of round 1",
        "evaluated 1 0 of round 2",
        "evaluates 0 0 of round 1",
        "evaluates 1 0 of round 2",
    ]


# A module of a package, whose names are not those of a file.
MODULE = """
import os, sys, time
from package.names import VALUE
assert (__name__, __package__) == ("__main__", "package"), (__name__, __package__)
assert sys.path[0] == os.getcwd() and sys.argv[0] == __file__, (sys.path[0], sys.argv)
import malletrain
if os.environ.get("MALLETRAIN_LIVE"):
    import torch
    from malletrain import elastic
    model = torch.nn.Linear(2, 1)
    run = elastic.Run(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in run.steps(2):
        with run.step(samples=1):
            pass
malletrain.report(1)
open(f"ran-{VALUE}-{sys.argv[1]}", "w").close()
"""
WAYS = {
    "restart": {},
    "cold": {"env": {"MALLETRAIN_PRELOAD": "0"}},
    "live": {"mode": "live"},
    "torchrun": {"launcher": "torchrun"},
}


def test_a_module_runs_in_every_way(shared):
    package = shared.work / "package"
    package.mkdir()
    (package / "names.py").write_text("VALUE = 'torch'\n")
    (package / "train.py").write_text(MODULE + "# torch\n")
    jobs = [
        shared.submit(package / "train.py", way, module="package.train", profile=False, **spec)
        for way, spec in WAYS.items()
    ]
    for way, job in zip(WAYS, jobs, strict=True):
        ended = shared.until_state(job, "completed", "failed")
        assert ended.state == "completed", (way, ended.reason, shared.show(job).failure)
        assert (shared.work / f"ran-torch-{way}").exists()


def test_one_process_of_a_node_that_is_done_makes_a_change_wait(shared):
    job = at_its_end(shared, "plain", nproc_per_node=2)  # four processes, of which one writes
    scale(shared, job, 1, 1)
    (shared.work / "write").touch()
    assert shared.until_state(job, "completed", "failed").state == "completed"
    assert len(notes(shared)) == 12
    assert len(shared.events("round-formed", job=job)) == 1


def weights_of_in_a_step():
    """The weights after an undisturbed run of that script."""
    weight = velocity = 0.0
    for mean in (7.5, 23.5, 39.5, 55.5) * 2:
        velocity = 0.5 * velocity + mean
        weight -= 0.5 * velocity
    return [weight] * 4


@pytest.mark.parametrize(
    "signum", [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.thorough)]
)
def test_a_leaver_that_is_planned_again_within_a_step_goes_on_with_its_state(shared, signum):
    """The job shrinks to one node, which is taken before the group of both has ended its step."""

    def newest_round():
        return shared.events("round-formed", job=job)[-1].data["members"]

    script = shared.script("train.py", IN_A_STEP)
    job = shared.submit(script, nodes=(2, 2), mode="live", profile=False)
    shared.until(lambda: noted(shared, "waits") == 2, "both ranks are in a step")
    both = newest_round()
    scale(shared, job, 1, 1)
    shared.until(lambda: len(newest_round()) == 1, "one node leaves")
    (taken,) = newest_round()
    (leaver,) = set(both) - {taken}
    shared.agents()[taken].send_signal(signum)
    shared.until(lambda: newest_round() == [leaver] or shared.job(job).ended, "it is planned again")
    (shared.work / "go.new").write_text(taken)
    (shared.work / "go.new").replace(shared.work / "go")
    ended = shared.until_state(job, "completed", "failed")
    assert (ended.state, ended.tries) == ("completed", 0), ended.reason
    assert not shared.events("workers-failed", job=job)
    ends = [line for line in notes(shared) if line.startswith("weights")]
    assert ends == [f"weights {weights_of_in_a_step()} after 8 steps: 0 of round 3"]
    steps = [line for line in notes(shared) if line.startswith("step") and "of round 3" in line]
    first = 5 if signum == signal.SIGTERM else 3  # a step is made again if a peer is lost in it
    assert steps == [f"step {number}: 0 of round 3" for number in range(first, 9)]
    assert not noted(shared, "of round 2"), "the node that is taken does not train on alone"
    assert ended.samples <= 128
