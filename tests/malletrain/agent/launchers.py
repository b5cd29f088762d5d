"""Launchers for agents in tests, that need no torch, and what brings them into a round."""

from __future__ import annotations

from malletrain.protocol import messages
from tests.malletrain.agent.node_side import fake_python, spec

# A launcher whose workers are itself: joins rounds for ever, prints to the log of its rank and
# answers drains.
OBEDIENT = """
from malletrain.protocol import flags as flags_file
from malletrain.protocol import worker_channel as local
out = local.Outbox(os.environ["MALLETRAIN_SOCKET"])
flags = flags_file.FlagsReader(os.environ["MALLETRAIN_FLAGS"])
say("ready")
def who():
    return local.Sender(order.job, generation, round_.group_rank, os.getpid())
def keep_environment():  # whole, and before "running" is said: tests read it then
    path = os.path.join(order.spec.workdir, f"env-{generation}")
    with open(path + "-", "w") as file:
        file.write("\\n".join(f"{k}={v}" for k, v in os.environ.items()))
    os.replace(path + "-", path)
round_ = join(keep_environment)
print("launcher speaking", flush=True)
served = 0
while True:
    with open(log_path(round_.group_rank), "ab") as log:
        log.write(b"line of round %d\\n" % generation)
    out.send(local.encode(local.Capable(who())))
    out.send(local.encode(local.ScriptMetric(who(), "accuracy", 0.5)))
    for step in range(1, 10**9):
        out.send(local.encode(local.WorkerProgress(who(), step * 32.0, step, 32.0, 1.0, 1.0 + step)))
        number = flags.drain_request()
        if flags.loss_expected_ms():
            out.send(local.encode(local.ScriptMetric(who(), "loss", flags.loss_expected_ms())))
        if flags.advised_batch():
            out.send(local.encode(local.ScriptMetric(who(), "batch", flags.advised_batch())))
        if number and number != served:
            served = number
            out.send(local.encode(local.DrainDone(who(), number, True)))
        newer = [m for m in end.receive(0.02) if isinstance(m, messages.Round)]
        for name in ("succeed", "fail", "leave"):
            if os.path.exists(os.path.join(order.spec.workdir, name)):
                os.unlink(os.path.join(order.spec.workdir, name))
                if name == "leave":
                    sys.exit("left of its own accord")
                if name == "succeed":
                    say("succeeded")
                else:
                    say("failed", messages.Failure(round_.group_rank, 1, time.time()))
                newer = [next_message(messages.Round)]
        if newer:
            round_ = newer[-1]
            generation = round_.generation
            say("running")
            break
"""  # noqa: E501

# A launcher with a double-forked helper that is deaf to SIGTERM, as is the launcher itself.
STUBBORN = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(600)
    os._exit(0)
os.wait()
say("ready")
while True:
    end.receive(1.0)
"""


def assign(daemon, tmp_path, body, job="j1", node="n0", **fields):
    settings = {
        name: fields.pop(name) for name in ("stop_grace_s", "join_timeout_s") if name in fields
    }
    daemon.send(
        node,
        messages.Assign(
            job, spec(tmp_path, python=fake_python(tmp_path, body), **fields), **settings
        ),
    )


def running(daemon, tmp_path, body=OBEDIENT, job="j1", generation=1, node="n0", **fields):
    """Bring a job into its first round."""
    assign(daemon, tmp_path, body, job, node, **fields)
    daemon.expect(node, messages.Phase, phase="ready", job=job)
    daemon.send(node, messages.Round(job, generation, 0, 1))
    daemon.expect(node, messages.Phase, phase="running", job=job, generation=generation)


def is_clean(agent):
    return not agent.job_pids() and not list(agent.run_dir.iterdir())
