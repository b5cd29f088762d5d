"""``malletrain check``: checks what works with a configuration before anything is started.

:mod:`malletrain.daemon.site.startup` tests what would prevent a start, as it does in the daemon.
Each test uses the daemon's own code and leaves nothing behind. Prints one line per test: whether it
works, and if not, what to do.

Three functions also report what the configuration amounts to. :func:`accounting`: the effects of
minimum charges and lease lengths. :func:`shares`: which shares are counted, and with which weights.
:func:`trainers`: which jobs are planned together, on which nodes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from malletrain.cli.check_users import users
from malletrain.cli.common import REFUSED, config_option, json_option, print_json, print_text
from malletrain.cli.daemon import load, missing
from malletrain.protocol.counting import counted

if TYPE_CHECKING:
    from malletrain.config.model import Config
    from malletrain.protocol.views import NetworkView


def accounting(config: Config) -> Iterator[tuple[bool | None, str]]:
    """Report the minimum charge, the minimum length and the power of nodes."""
    from malletrain.config.units import show_duration
    from malletrain.core.gaps import least_horizon_s
    from malletrain.daemon.site.settings import controller_settings

    settings = controller_settings(config)
    min_gap_s, charge_s = least_horizon_s(settings), settings.min_charge_s
    expected_s = config.gaps.expected_length
    batch = config.scheduler.kind != "local"
    where = f"[scheduler.{config.scheduler.kind}]"
    if settings.due_s:
        why = "costs that much anyway" if charge_s >= settings.min_lease_s else "the site wants"
        due = show_duration(settings.due_s)
        yield (
            True,
            f"Gaps expected to last less than {show_duration(min_gap_s)} are not leased; a lease "
            f"is kept for {due}, which {why}, while its user has work for it.",
        )
        if batch and expected_s < settings.due_s:
            yield (
                None,
                f"A gap is expected to last {show_duration(expected_s)} until the site's own were "
                f"seen (expected_length in [gaps]), so at first no gap younger than some minutes "
                "may be leased.",
            )
    else:
        yield True, "Leases are given back as soon as no job needs them (no min_charge)."
    limit_s = getattr(config.scheduler.table, "time_limit", None)
    if limit_s is not None and limit_s < settings.due_s:
        yield (
            False,
            f"Leases last {show_duration(limit_s)} at most (time_limit in {where}), which is less "
            f"than min_charge in [accounting] or min_lease in {where}; make time_limit longer.",
        )
    watts = config.accounting.watts_by_class
    if watts:
        classes = {"default", *config.gaps.classes}
        unknown = sorted(watts.keys() - classes)
        if unknown:
            yield (
                False,
                f"watts in [accounting] names {', '.join(unknown)}, which is no class of nodes; "
                f"classes are {', '.join(sorted(classes))} (classes in [gaps]).",
            )
        elif missing := sorted(set(config.gaps.classes) - watts.keys()):
            yield (
                None,
                f"watts in [accounting] does not name {', '.join(missing)}, so kWh do not include "
                "these nodes.",
            )
        else:
            yield True, "Usage and metrics report kWh by node class."


MAX_SHOWN_WEIGHTS = 5


def shares(config: Config) -> Iterator[tuple[bool | None, str]]:
    """Report weights and accounts, and check Slurm's associations."""
    from malletrain.daemon.engine.parties import Parties
    from malletrain.daemon.site.backends import slurm_associations

    section = config.shares
    limits = config.quotas.account_nodes or config.quotas.account_jobs
    parties = Parties(config)
    if section.weights_from == "slurm":
        associations = slurm_associations(config)  # errors are reported as a finding
        parties.learned(associations)
        yield True, f"Slurm names the accounts of {counted(len(associations.accounts), 'user')}."
    elif (section.by == "account" or limits) and not section.account_of:
        yield (
            None,
            "No user is in an account, so accounts make no difference; name the users of each "
            '(accounts in [shares]), or have Slurm asked (weights_from = "slurm").',
        )
    if section.by == "off":
        yield True, "Nobody's share is counted (by in [shares])."
        return
    weights = sorted(parties.weights().items(), key=lambda item: (-item[1], item[0]))
    named = ", ".join(f"{name} {weight:.3g}" for name, weight in weights[:MAX_SHOWN_WEIGHTS])
    more = (
        f" and {len(weights) - MAX_SHOWN_WEIGHTS} more" if len(weights) > MAX_SHOWN_WEIGHTS else ""
    )
    others = f"others {section.others:g}"
    yield (
        True,
        f"Shares are counted by {section.by}, with these weights: "
        f"{f'{named}{more}, ' if named else ''}{others}.",
    )


def trainers(config: Config) -> Iterator[tuple[bool | None, str]]:
    """Report each trainer, and possible mistakes."""
    from malletrain.core.pools import REST
    from malletrain.daemon.site.settings import trainers as made

    if not config.trainer:
        yield True, "There is one plan for all jobs (no [[trainer]])."
        return
    sections = {section.name: section for section in config.trainer}
    for trainer in made(config):
        section = sections.get(trainer.name)
        named = [
            f"{kind} {', '.join(names)}"
            for kind in ("users", "accounts", "groups")
            if section is not None and (names := getattr(section, kind))
        ]
        whose = " and ".join(named) or "whom no other trainer names"
        yield True, f"{trainer.phrase()}; its jobs are those of {whose}."
    if not config.daemon.several_users and len(made(config)) > 1:
        yield (
            None,
            "This daemon serves one user, so all jobs are of one trainer; with users or munge in "
            "[daemon] it serves several.",
        )
    classes = {name for trainer in made(config) for name in trainer.node_classes or ()}
    if all(trainer.node_classes for trainer in made(config)) and (
        unused := sorted(set(config.gaps.classes) - classes)
    ):
        yield (
            None,
            f"Nodes of {', '.join(unused)} (classes in [gaps]) belong to no trainer, so no job "
            "runs there; name them in node_classes of a [[trainer]].",
        )
    accounts = [name for section in config.trainer for name in section.accounts]
    unknown = sorted(set(accounts) - set(config.shares.account_of.values()))
    if unknown and config.shares.weights_from == "here":
        yield (
            None,
            f"Nobody is in account {', '.join(unknown)}; name the users of each account (accounts "
            'in [shares]), or have Slurm asked (weights_from = "slurm").',
        )
    if config.shares.by != "off":
        yield (
            None,
            "Shares are counted over the nodes of all trainers; use weights for parties of one "
            f"trainer ({REST} or another) only.",
        )


Finding = tuple[str, bool | None, str]
"""(what was tested, whether it works or None: works but needs attention, a sentence)"""
Test = tuple[str, "Callable[[Config], Iterator[tuple[bool | None, str]]]"]


@click.command()
@config_option("Configuration of the site (TOML).")
@click.option(
    "--user",
    metavar="NAME",
    help="If the daemon serves several users: try submissions as this user. Default: the first "
    "user in the list of [daemon] users; none if users are known to MUNGE only.",
)
@click.option(
    "--lease",
    "trial",
    is_flag=True,
    help="Also test one whole lease: poll, submit, wait for its start, give it back. Uses "
    "an idle node for some seconds, for minutes if the main scheduler is slow.",
)
@json_option
def check(config_file: Path, user: str | None, trial: bool, as_json: bool) -> None:
    """Check what works with a configuration, and what to do if it does not. Starts nothing unless
    --lease is given; on PBS a held job is submitted and deleted.

    Tested are: the file itself (all its problems at once, with their lines), the state directory,
    whether a daemon runs there already, keys, addresses, the database, the main scheduler, its
    users (if there are several), the network of the jobs, whether agents report from the leases of
    a running daemon, what a leaving node can hand over in time, allocation, accounting, shares and
    trainers. Exit code 1 if a test fails.

    \b
    Examples:
      malletrain check --config site.toml
      malletrain check --config site.toml --lease    with a lease, taken to its end
    """
    config = load(config_file)
    findings: list[Finding] = [("configuration", True, f"{config_file} is valid.")]
    try:
        findings += _startup(config)
    except ModuleNotFoundError as error:
        raise missing(error) from None
    more: tuple[Test, ...] = (*MORE_TESTS, ("users", partial(users, name=user)))
    if trial:
        more = (*more, ("lease", partial(trial_lease, user=user)))
    for name, test in more:
        try:
            findings += [(name, works, sentence) for works, sentence in test(config)]
        except ModuleNotFoundError as error:
            findings.append((name, False, str(missing(error))))
        except Exception as error:  # a test must never hide the others
            findings.append(
                (name, False, f"{' '.join(str(error).split()) or type(error).__name__}")
            )
    findings = list(dict.fromkeys(findings))
    good = all(works is not False for _, works, _ in findings)
    if as_json:
        print_json(
            {
                "ok": good,
                "findings": [
                    {"what": w, "works": ok is not False, "look": ok is None, "sentence": s}
                    for w, ok, s in findings
                ],
            }
        )
    else:
        _print(findings)
    if not good:
        click.get_current_context().exit(REFUSED)


def _print(findings: list[Finding]) -> None:
    from rich.text import Text

    from malletrain.render.columns import Column, FittedTable

    answers = {
        True: Text("OK", "green"),
        None: Text("look", "bold yellow"),
        False: Text("would not work", "bold red"),
    }
    table = FittedTable(
        Column("VERDICT"), Column("WHAT"), Column("SENTENCE", note=True), header=False
    )
    for name, works, sentence in findings:
        table.add_row(answers[works], name, Text(sentence))
    print_text(table)


def privacy(config: Config) -> Iterator[tuple[bool, str]]:
    """Check that other users cannot enter the state directory."""
    path = config.state_dir
    if path.is_dir() and path.stat().st_mode & 0o077:
        yield (
            False,
            f"Others may enter {path}, where keys and environments lie; run: chmod 700 {path}",
        )


def database_place(config: Config) -> Iterator[tuple[None, str]]:
    """Tells that an SQLite database lies on a network file system."""
    from malletrain.store.database import MOUNTS, NETWORK_FILE_SYSTEMS, file_system_type, parse_url

    url = parse_url(config.database_url)
    in_file = url.get_backend_name() == "sqlite" and url.database not in (None, "", ":memory:")
    if not in_file or not MOUNTS.exists():
        return
    path = Path(str(url.database)).resolve()
    kind = file_system_type(path, MOUNTS.read_text("utf-8", "replace"))
    if kind in NETWORK_FILE_SYSTEMS:
        yield (
            None,
            f"{path} lies on a network file system ({kind}), where only one host may open an "
            "SQLite database: run `malletrain db` on this host, and no second daemon on another "
            "one, because the lock may not work between hosts. Better set database in [daemon] to "
            "a file on a local disk (sqlite:////var/lib/malletrain/malletrain.db), or to "
            "PostgreSQL.",
        )


def scheduler(config: Config) -> Iterator[tuple[bool | None, str]]:
    """Yield the results of the main scheduler's backend, which tests its commands."""
    from malletrain.daemon.site.backends import backend

    yield from backend(config).check(config)


def trial_lease(config: Config, user: str | None) -> Iterator[tuple[bool | None, str]]:
    """Tests one lease of the main scheduler from submission to end, as the daemon does it."""
    from malletrain.daemon.site.backends import backend
    from scavenger.batch.check import try_lease, use_trial_prefix
    from scavenger.batch.scavenger import BatchScavenger

    scheduler_backend = backend(config)
    scavenger = scheduler_backend.connect(config)
    if not isinstance(scavenger, BatchScavenger):
        yield True, "The embedded cluster is MalleTrain's own; no lease of it was tried."
        return
    owner = user if scavenger.settings.submit_as else None
    if scavenger.settings.submit_as and owner is None:
        yield False, "Leases are taken as their users here; name one: --lease --user NAME."
        return
    scheduler_backend.prepare(config)
    use_trial_prefix(scavenger)
    yield from try_lease(scavenger, owner)


def failed_starts(config: Config) -> Iterator[tuple[bool | None, str]]:
    """Report the leases of a running daemon from which no agent reports."""
    from malletrain.client import ClientError, Connection
    from malletrain.daemon.site.backends import agent_program

    try:
        with Connection.of(config.state_dir) as client:
            status = client.status()
    except ClientError:
        yield True, "No daemon runs here, so it has no leases; --lease tests one."
        return
    works = None if status.nodes_leased else False  # some agents report: not all is broken
    for sentence in status.failed_starts:
        yield (
            works,
            f"{sentence} Try it on that node as the owner of the lease: "
            f"{agent_program()[0]} -c 'import malletrain'",
        )
    if not status.failed_starts:
        yield True, "Agents report from the leases of the running daemon."


def allocation(config: Config) -> Iterator[tuple[bool | None, str]]:
    """Check that plans can start jobs."""
    from malletrain.daemon.site.settings import controller_settings

    if config.allocation.policy == "freetrain":
        yield (
            None,
            "Plans are made as FreeTrain makes them, to compare with: no job is profiled, and one "
            "whose owner states no curve is taken to scale as nodes to the power of "
            f"{config.allocation.prior_exponent:g} (policy in [allocation]).",
        )
        return
    settings = controller_settings(config)
    caution = settings.planning.caution(settings.starvation_s)
    if caution is None:
        yield True, "A start pays for itself within the forward-looking time."
    else:
        yield (
            None,
            f"{caution} The keys are t_fwd and start in [allocation], and starvation in [jobs].",
        )


def network(config: Config) -> Iterator[tuple[bool | None, str]]:
    """Report the network of the jobs, and its bandwidth as measured by a running daemon."""
    from malletrain.client import ClientError, Connection

    interfaces = [config.nodes.interface, *config.nodes.interface_of]
    named = ", ".join(text for text in interfaces if text)
    if not named:
        yield True, "Jobs use the network by which their nodes reach the daemon."
        return
    views: tuple[NetworkView, ...] = ()
    with contextlib.suppress(ClientError), Connection.of(config.state_dir) as client:
        views = client.status().networks
    if not views:
        yield (
            True,
            f"Jobs use {named}. Its bandwidth is measured between the first two nodes of a class "
            "that are leased at the same time.",
        )
    for view in views:
        yield view.reached, f"Jobs use {named}. {view.sentence}"


def hand_over(config: Config) -> Iterator[tuple[bool | None, str]]:
    """Check whether leaving nodes can hand over their part of a snapshot in memory."""
    from malletrain.client import ClientError, Connection
    from malletrain.daemon.site.backends import notice_of

    slowest, late = 0.0, dict[str, str]()
    with contextlib.suppress(ClientError), Connection.of(config.state_dir) as client:
        status = client.status()
        slowest = min((one.mbit for one in status.networks if one.mbit), default=0.0)
        late = status.late
    if config.jobs.snapshot_memory:
        yield True, notice_of(config, slowest).room()
    for job, sentence in late.items():
        yield None, f"{job}: {sentence}"


def _startup(config: Config) -> Iterator[Finding]:
    """Yield problems that would prevent the daemon from starting."""
    from malletrain.daemon.site.startup import ADDRESS, startup_findings

    answers = _daemon_answers(config)
    yield from startup_findings(config, (ADDRESS,) if answers else ())
    if answers:
        yield (
            ADDRESS,
            True,
            "A daemon runs in this state directory and answers, so the addresses are in use by "
            "that daemon.",
        )


def _daemon_answers(config: Config) -> bool:
    from malletrain.client import ClientError, Connection

    try:
        with Connection.of(config.state_dir) as client:
            client.status()
    except ClientError:
        return False
    return True


MORE_TESTS: tuple[Test, ...] = (
    ("state directory", privacy),
    ("database", database_place),
    ("main scheduler", scheduler),
    ("network", network),
    ("leases", failed_starts),
    ("hand-over", hand_over),
    ("allocation", allocation),
    ("accounting", accounting),
    ("shares", shares),
    ("trainers", trainers),
)
"""Tests besides those at the daemon's start."""
