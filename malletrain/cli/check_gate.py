"""The part of ``malletrain check`` for ``malletrain-lease``: whether it restricts the daemon's
account to leases, and whether it accepts the leases of this site.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from malletrain.config.model import Config

GATE = "malletrain-lease"
TRY_S = 20.0


def gate(config: Config, name: str | None) -> Iterator[tuple[bool | None, str]]:
    """Checks that it is in submit_as, and that it accepts a lease of the user ``name``."""
    at = [n for n, word in enumerate(config.submit_as) if Path(word).name == GATE]
    if not at:
        yield (
            None,
            "Whoever has the account of the daemon can submit any job as the users and end all of "
            f"theirs; with {GATE} in submit_as, leases only (docs/several-users.md).",
        )
        return
    if at != [len(config.submit_as) - 1]:
        yield False, f"{GATE} must be the last word of submit_as: it is told the command."
        return
    if name is None:
        yield (
            None,
            f"Whether leases get through {GATE} was not tried, as no user is listed; name one "
            "with --user.",
        )
        return
    argv, script = submission(config, name)
    prefix = [word.replace("{owner}", name) for word in config.submit_as]
    try:
        process = subprocess.run(
            [*prefix, "--try", *argv], input=script, capture_output=True, timeout=TRY_S
        )
        stderr = " ".join(process.stderr.decode("utf-8", "replace").split())
        why = (stderr or f"status {process.returncode}") if process.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        why = str(error)
    if why:
        yield False, f"A lease of {name} does not get through: {why} Change {GATE}.conf."
    else:
        yield True, f"As others the daemon's account can submit and end leases only ({GATE})."


def submission(config: Config, owner: str) -> tuple[list[str], bytes]:
    """Returns the command and batch script of a lease of ``owner``, as the scavenger submits it.
    Raises SchedulerError if the site's batch script cannot be read.
    """
    from malletrain.daemon.site.backends import agent_program, pbs_settings, slurm_settings
    from malletrain.protocol import env
    from scavenger.batch.lease_script import lease_script
    from scavenger.batch.submission import LeaseSpec
    from scavenger.pbs.job import qsub
    from scavenger.slurm.job import batch_script, sbatch

    agent = (*agent_program(), "--endpoint", "tcp://head:1", "--server-key", "x", "--lease", "l1")
    environment = {env.LEASE_KEY: "x", env.LEASE: "l1"}
    if config.scheduler.kind == "slurm":
        s = slurm_settings(config)
        one = LeaseSpec(
            f"{s.prefix}l1", "n1", agent, environment, 3600.0, 30.0, None, True, "l1", owner
        )
        return sbatch(s, one, False), batch_script(s.template, one.argv, one.env, False, True)
    p = pbs_settings(config)
    one = LeaseSpec(
        f"{p.prefix}l1", "n1", agent, environment, 3600.0, 30.0, None, True, "l1", owner
    )
    select = ":".join(filter(None, ("1:host=n1:ncpus=1", p.lease.select)))
    rerunnable = p.lease.rerunnable != "no"
    words = qsub(p, name=one.name, select=select, limit_s=one.limit_s, rerunnable=rerunnable)
    return words, lease_script(p.template, one.part)
