"""Commands for leases of the embedded cluster, and what tests ask about them."""

import json
import sys

from scavenger.interface import LeaseRequest
from tests.waiting import until

PY = sys.executable
SLEEP = ("sleep", "600")
STUBBORN = (
    PY,
    "-S",
    "-c",
    "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nopen('ready', "
    "'w')\ntime.sleep(600)",
)
# A child in a session of its own that ignores SIGTERM, and one with an empty environment; the first
# process leaves on SIGTERM.
PARENT = (
    PY,
    "-S",
    "-c",
    "import signal, subprocess, sys, time, os\n"
    "stubborn = 'import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    "time.sleep(600)'\n"
    "a = subprocess.Popen([sys.executable, '-S', '-c', stubborn], start_new_session=True)\n"
    "b = subprocess.Popen([sys.executable, '-S', '-c', stubborn], env={})\n"
    "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n"
    "open('ready.tmp', 'w').write(f'{a.pid} {b.pid}')\n"
    "os.rename('ready.tmp', 'ready')\n"
    "time.sleep(600)\n",
)


def lease_of(scavenger, lease_id):
    return next(x for x in scavenger.poll().leases if x.id == lease_id)


def record_of(scavenger, lease_id):
    return json.loads(scavenger.layout.state.read_text())["leases"][lease_id]


def take(scavenger, lease_id, node, argv=SLEEP, **options):
    (lease,) = scavenger.take([LeaseRequest(lease_id, node, tuple(argv), **options)])
    return lease


def wait_clean(scavenger, lease_id):
    until(lambda: record_of(scavenger, lease_id)["clean"], f"lease {lease_id} to be cleared away")
    return record_of(scavenger, lease_id)


def wait_ready(scavenger, lease_id):
    path = scavenger.layout.lease_directory(lease_id) / "ready"
    until(path.exists, f"the command of {lease_id} to be ready")
    return path.read_text()
