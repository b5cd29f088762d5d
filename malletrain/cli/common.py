"""Common parts of all commands: options and their values, shell completion, the connection to the
daemon, output, and errors as one sentence with an exit code.

Exit codes: 0 done, 1 refused (by the daemon, the machine or a check), 2 usage (the command line
itself is wrong), 130 stopped with Ctrl-C. :mod:`malletrain.cli.wait` has the exit codes of commands
that wait until a job has ended.

Completion offers names of jobs, requested from the daemon, conda environments, and files. If the
daemon does not answer or a file cannot be read, nothing is offered and no message is printed,
because the user is typing a line.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.shell_completion import CompletionItem

from malletrain.protocol import env

if TYPE_CHECKING:
    from malletrain.client import Connection


REFUSED, USAGE, INTERRUPTED = 1, 2, 130

_NO_ARGUMENTS: Any = getattr(click.exceptions, "NoArgsIsHelpError", ())
"""What click raises for a group without a command; click before 8.2 shows the help itself."""

F = TypeVar("F", bound=Callable[..., Any])


class Refused(click.ClickException):
    """A command was refused; the message is a sentence for the user."""

    exit_code = REFUSED


class DaemonUnreachable(Refused):
    """The daemon could not be reached, or the connection broke before it answered."""


class DaemonBusy(Refused):
    """Too many requests of this user wait for an answer."""


class CommandInterrupted(click.ClickException):
    """Ctrl-C ended a command; the message says what goes on without it."""

    exit_code = INTERRUPTED


class _ReportingCommand(click.Command):
    """A command whose errors are one sentence on stderr, never a traceback.

    With MALLETRAIN_DEBUG set in the environment an unexpected error shows its traceback, for a bug
    report.
    """

    def main(  # type: ignore[override]
        self, args: Sequence[str] | None = None, prog_name: str | None = None, **extra: Any
    ) -> Any:
        """As :meth:`click.Command.main`, with this project's exit codes and error texts."""
        extra.pop("standalone_mode", None)
        try:
            result = super().main(args, prog_name, standalone_mode=False, **extra)
            with contextlib.suppress(AttributeError, ValueError):  # stdout may be closed
                sys.stdout.flush()
            code = result if isinstance(result, int) else 0
        except _NO_ARGUMENTS as error:
            click.echo(error.format_message())
            code = USAGE
        except click.UsageError as error:
            path = error.ctx.command_path if error.ctx else (prog_name or "malletrain")
            say(f"{path}: {usage_sentence(error)} See '{path} --help'.")
            code = USAGE
        except click.ClickException as error:
            say(error.format_message())
            code = error.exit_code
        except click.exceptions.Exit as error:
            code = error.exit_code
        except (click.Abort, KeyboardInterrupt):
            say("Stopped.")
            code = INTERRUPTED
        except Exception as error:
            if os.environ.get(env.DEBUG):
                raise
            say(_unexpected(error))
            code = REFUSED
        sys.exit(code)

    def invoke(self, ctx: click.Context) -> Any:
        """As :meth:`click.Command.invoke`; it is not an error if the reader of the pipe (head,
        less) ends.
        """
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            # Python would complain when it flushes stdout at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            return 0


class ConsoleCommand(_ReportingCommand):
    """A command that is also a console script."""


class CommandGroup(_ReportingCommand, click.Group):
    """A group of commands."""


def usage_sentence(error: click.UsageError) -> str:
    """Return what is wrong with the command line; options that resemble an unknown one come in the
    order of their likeness.
    """
    if not isinstance(error, click.NoSuchOption):
        return error.format_message()
    sentence = f"{error.message.rstrip('.')}."
    if not error.possibilities:
        return sentence
    *others, last = error.possibilities  # click sorts its own sentence by the alphabet
    return f"{sentence} Did you mean {', '.join(others)}{' or ' if others else ''}{last}?"


def _unexpected(error: Exception) -> str:
    """Return the sentence for an error that no command expects."""
    if isinstance(error, FileNotFoundError) and not _current_directory_exists():
        return (
            "The current directory no longer exists; change to another with cd, and run the "
            "command again."
        )
    message = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    return (
        f"Something went wrong inside malletrain ({type(error).__name__}): {message}. Set "
        "MALLETRAIN_DEBUG=1 to see where."
    )


def _current_directory_exists() -> bool:
    try:
        os.getcwd()
    except OSError:
        return False
    return True


@contextlib.contextmanager
def interruptible(sentence: Callable[[], str]) -> Iterator[None]:
    """Have Ctrl-C end the command with a sentence that says what goes on.

    Args:
        sentence: called after Ctrl-C.

    Raises:
        CommandInterrupted: Ctrl-C was pressed.
    """
    try:
        yield
    except KeyboardInterrupt:
        say("")  # the terminal has shown ^C
        raise CommandInterrupted(sentence()) from None


NOT_WATCHED = "Stopped watching."
"""What Ctrl-C says where a command only shows a state again and again."""
MAX_NAMED_JOBS = 5
"""Maximum number of jobs that a sentence names."""


def jobs_go_on(jobs: Sequence[str]) -> str:
    """Return the sentence for Ctrl-C while the unfinished ``jobs``, by their ids, are followed."""
    if not jobs:
        return "Stopped."
    if len(jobs) == 1:
        return f"Job {jobs[0]} goes on; malletrain cancel {jobs[0]} ends it."
    if len(jobs) > MAX_NAMED_JOBS:
        return f"{len(jobs):,} jobs go on; malletrain cancel JOB ends one."
    names = f"{', '.join(jobs[:-1])} and {jobs[-1]}"
    return f"Jobs {names} go on; malletrain cancel {' '.join(jobs)} ends them."


def say(sentence: str) -> None:
    """Print a line on stderr."""
    with contextlib.suppress(BrokenPipeError, ValueError):
        click.echo(sentence, err=True)


def state_dir_option(command: F) -> F:
    """Add ``--state-dir``, the state directory of the daemon."""
    return click.option(
        "--state-dir",
        metavar="DIR",
        type=click.Path(path_type=Path, file_okay=False),
        envvar=env.STATE_DIR,
        show_envvar=True,
        help="State directory of the daemon to talk to.  [default: your own daemon's, else the "
        "site's]",
    )(command)


def config_option(purpose: str) -> Callable[[F], F]:
    """Return a decorator that adds the required option ``--config FILE``; ``purpose``: its
    help."""
    return click.option(
        "--config",
        "config_file",
        required=True,
        metavar="FILE",
        type=click.Path(path_type=Path),
        envvar=env.CONFIG,
        show_envvar=True,
        help=purpose,
    )


def json_option(command: F) -> F:
    """Add ``--json``: data instead of a table."""
    return click.option(
        "--json",
        "as_json",
        is_flag=True,
        help="Print JSON instead of text, with times in seconds since the epoch.",
    )(command)


def connect(state_dir: Path | None) -> Connection:
    """Return a client of the daemon of ``state_dir``. Raises Refused if there is none."""
    from malletrain.client import ClientError, Connection

    try:
        return Connection.of(state_dir)
    except ClientError as error:
        raise DaemonUnreachable(str(error)) from None


@contextlib.contextmanager
def client_of(state_dir: Path | None) -> Any:
    """Yield a client; a refusal of the daemon becomes a sentence and its exit code."""
    from malletrain.client import ClientError

    client = connect(state_dir)
    try:
        yield client
    except ClientError as error:
        raise refusal(error) from None
    finally:
        client.close()


def refusal(error: Any) -> click.ClickException:
    """Return the exception that ends the command, for an error of the client."""
    if error.code == "usage":
        return click.UsageError(str(error), click.get_current_context(silent=True))
    kinds = {"unreachable": DaemonUnreachable, "busy": DaemonBusy}
    return kinds.get(error.code, Refused)(str(error))


def print_json(data: object) -> None:
    """Print ``data`` (views, or types that JSON supports) as one JSON document on stdout."""
    import msgspec

    click.echo(msgspec.json.format(msgspec.json.encode(data), indent=2).decode())


def print_json_line(data: object) -> None:
    """Print ``data`` as JSON on one line, for streams (``--follow --json``)."""
    import msgspec

    click.echo(msgspec.json.encode(data).decode())
    sys.stdout.flush()


def print_text(*renderables: Any) -> None:
    """Print tables and texts on stdout."""
    from malletrain.render.columns import console

    terminal = console()
    if terminal.is_terminal:
        for each in renderables:
            terminal.print(each)
        return
    with terminal.capture() as captured:
        for each in renderables:
            terminal.print(each)
    # Tables pad their lines with blanks to the width of the console; strip them in a file.
    click.echo("\n".join(line.rstrip() for line in captured.get().splitlines()))


COMPLETION_TIMEOUT_S = 1.0
"""Maximum time that a completion waits for the daemon, seconds."""

Completer = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def files(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete files and directories; the shell lists them."""
    return [CompletionItem(incomplete, type="file")]


def folders(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete directories; the shell lists them."""
    return [CompletionItem(incomplete, type="dir")]


def conda_environments(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Complete names of the user's conda environments, from conda's own list."""
    try:
        lines = Path("~/.conda/environments.txt").expanduser().read_text().splitlines()
    except (OSError, ValueError, RuntimeError):
        return []
    names = {Path(line).name: line for line in lines if Path(line).parent.name == "envs"}
    return [CompletionItem(n, help=p) for n, p in names.items() if n.startswith(incomplete)]


def job_names(*, unfinished: bool = False) -> Completer:
    """Return a completer of job names, the newest first, and of ids if the user has begun to type
    one. ``unfinished``: only jobs that have not ended.
    """

    def complete(
        ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        from malletrain.client import ClientError, Connection

        try:
            with Connection.of(
                ctx.params.get("state_dir"), timeout_s=COMPLETION_TIMEOUT_S
            ) as client:
                jobs = client.jobs()
        except ClientError:
            return []
        previous = ctx.params.get(param.name or "") or ()
        offered: dict[str, str] = {}
        for job in reversed(jobs):
            if unfinished and job.ended is not None:
                continue
            for word in (job.name, *([job.id] if incomplete else [])):
                if word.startswith(incomplete) and word not in previous:
                    # a name means the newest job that has it
                    offered.setdefault(word, f"{job.state}, job {job.id}")
        return [CompletionItem(word, help=description) for word, description in offered.items()]

    return complete


DATE_FORMS = ("%Y-%m-%d", "%Y-%m-%dT%H:%M", "%Y-%m-%d %H:%M", "%Y-%m-%dT%H:%M:%S")


def past_time(text: str) -> float:
    """Return the seconds since the epoch of ``"2 d"`` (ago), ``2026-01-31`` or
    ``2026-01-31T08:00``, local time.

    Raises:
        click.BadParameter: the text is neither.
    """
    from malletrain.config.units import UnitError, parse_duration

    for form in DATE_FORMS:
        try:
            return datetime.datetime.strptime(text.strip(), form).astimezone().timestamp()
        except ValueError:
            continue
    try:
        return time.time() - parse_duration(text)
    except UnitError:
        raise click.BadParameter(
            f'\'{text}\' is no time; write how long ago it was, such as "2 d" or "90 min", or a '
            "date, such as 2026-01-31 or 2026-01-31T08:00."
        ) from None
