"""The command line: ``malletrain COMMAND``. One module per family of commands; this one only
collects them. Runs on the user's machine.

Modules of commands import only click at their top, so that ``malletrain --help`` and shell
completion are fast.
"""

from __future__ import annotations

import click

from malletrain import __version__
from malletrain.cli.assess import assess
from malletrain.cli.changes import drain, exclude, extend, pause, reload, requeue, resume, scale
from malletrain.cli.check import check
from malletrain.cli.common import CommandGroup
from malletrain.cli.daemon import agent, cluster, daemon, key, shipped
from malletrain.cli.db import db
from malletrain.cli.demo import demo
from malletrain.cli.exec import exec_
from malletrain.cli.export import cp, export
from malletrain.cli.history import events, usage
from malletrain.cli.logs import logs
from malletrain.cli.map import map_
from malletrain.cli.services import members, worth
from malletrain.cli.simulate import simulate
from malletrain.cli.status import nodes, show, status
from malletrain.cli.submit import cancel, submit
from malletrain.cli.sweep import sweep
from malletrain.cli.tasks import retry, tasks
from malletrain.cli.top import top
from malletrain.cli.wait import wait
from malletrain.cli.web import web


@click.group(
    cls=CommandGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(__version__, prog_name="malletrain")
def main() -> None:
    """Train neural networks on supercomputer nodes that would otherwise be idle.

    A daemon holds idle nodes as long as the main scheduler does not need them, and runs malleable
    training jobs on them. To start your own daemon, see 'malletrain daemon --help'; to see the
    whole system at work on this machine, run 'malletrain demo'.

    \b
    A first job:
      malletrain submit --nodes 1:4 train.py --epochs 10
      malletrain status
      malletrain logs train -f
      malletrain top

    \b
    Shell completion (bash; zsh and fish alike):
      eval "$(_MALLETRAIN_COMPLETE=bash_source malletrain)"

    \b
    Exit codes: 0 done, 1 refused, 2 usage, 130 stopped with Ctrl-C. 'wait', 'logs -f' and
    'status JOB --watch' end as the job did: 0 completed, 1 failed, 3 cancelled. 'exec' ends as
    its command did.
    """


for _command in (
    submit,
    map_,
    status,
    show,
    logs,
    wait,
    cancel,
    tasks,
    retry,
    requeue,
    sweep,
    extend,
    scale,
    export,
    cp,
    exec_,
    members,
    worth,
    nodes,
    events,
    usage,
    pause,
    reload,
    resume,
    drain,
    exclude,
    top,
    web,
    daemon,
    db,
    check,
    cluster,
    key,
    assess,
    simulate,
    demo,
    shipped,
    agent,
):
    main.add_command(_command)
