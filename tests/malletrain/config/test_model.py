import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from malletrain.config.model import Config, ConfigError, load_config, parse_config, scheduler_kinds
from malletrain.config.reference import example_toml, keys, reference_markdown, sections
from tests.draws import cases

ROOT = Path(__file__).parents[3]
LEAST = '[scheduler]\nkind = "local"\n'


def problems(text: str) -> list[tuple[int | None, str, str]]:
    with pytest.raises(ConfigError) as error:
        parse_config(text)
    assert all(str(problem) in str(error.value) for problem in error.value.problems)
    return [(problem.line, problem.key, problem.message) for problem in error.value.problems]


def test_the_least_file_gives_the_defaults():
    config = parse_config(LEAST)
    assert config.daemon.heartbeat == 1.0
    assert config.daemon.agent_timeout == 5.0
    assert config.jobs.log_limit == 64 * 2**20
    assert config.allocation.t_fwd == 120.0
    assert config.state_dir == Path.home() / ".local/state/malletrain"
    assert config.database_url == f"sqlite:///{config.state_dir}/malletrain.db"
    assert config.cluster_dir == config.state_dir / "cluster"


def test_a_configuration_cannot_be_changed():
    with pytest.raises(ValueError, match="frozen"):
        parse_config(LEAST).daemon.log_level = "debug"


def test_paths_are_relative_to_the_file(tmp_path):
    file = tmp_path / "site.toml"
    file.write_text(LEAST + '[scheduler.local]\ntrace = "t.csv"\n[daemon]\nstate_dir = "state"\n')
    config = load_config(file)
    assert config.state_dir == tmp_path / "state"
    assert config.scheduler.local.trace == tmp_path / "t.csv"
    file.write_text(
        LEAST
        + '[daemon]\nstate_dir = "/var/lib/malletrain"\ndatabase = "postgresql+psycopg://u@h/db"\n'
    )
    config = load_config(file)
    assert config.state_dir == Path("/var/lib/malletrain")
    assert config.database_url == "postgresql+psycopg://u@h/db"


def test_a_file_without_a_state_directory_has_that_of_the_commands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "sites" / "site.toml"
    file.parent.mkdir()
    file.write_text(LEAST)
    for value, expected in ((f"{tmp_path}/a", tmp_path / "a"), ("b", tmp_path / "b")):
        monkeypatch.setenv("MALLETRAIN_STATE_DIR", value)
        assert load_config(file).state_dir == expected
    file.write_text(LEAST + '[daemon]\nstate_dir = "/c"\n')
    assert load_config(file).state_dir == Path("/c")
    monkeypatch.delenv("MALLETRAIN_STATE_DIR")
    file.write_text(LEAST)
    assert load_config(file).state_dir == Path.home() / ".local/state/malletrain"


EVERYTHING_WRONG = """\
[deamon]
x = 1
[daemon]
heartbeat = 1
agent_timeout = 5 s
log_level = "verbose"
listen = "127.0.0.1:99999"
adopt_wait = "5 GiB"
t_fwd = "3 s"
state_dir = 5
[scheduler]
kind = "slrm"
poll_interval = "0 s"
local = { nodes = 0, speedup = "2", autostart = "yes", seeed = 3, trace = 7, seed = 1.5 }
[jobs]
max_running = "x"
log_limit = "5 s"
drain-timeout = "1 s"
[allocation]
objective = "speed"
prior_exponent = 2
zebra = 3
"""


def test_all_problems_at_once_with_lines_and_names():
    messages = {(line, key): message for line, key, message in problems(EVERYTHING_WRONG)}
    expected = {
        (1, "deamon"): 'did you mean "daemon"?',
        (4, "daemon.heartbeat"): "1 has no unit",
        (5, ""): 'agent_timeout = "5 s"',
        (
            6,
            "daemon.log_level",
        ): '"verbose" is not known; accepted is "debug", "info", "warning" or "error"',
        (7, "daemon.listen"): "HOST:PORT",
        (8, "daemon.adopt_wait"): 'wrong unit "GiB"',
        (9, "daemon.t_fwd"): 'did you mean "allocation.t_fwd"?',
        (10, "daemon.state_dir"): "path",
        (12, "scheduler.kind"): 'no scheduler "slrm"; accepted is "local"',
        (13, "scheduler.poll_interval"): '"0 s" is too small; accepted is more than 0 s',
        (14, "scheduler.local.nodes"): "accepted is 1 or more",
        (14, "scheduler.local.speedup"): "a number without quotes",
        (14, "scheduler.local.autostart"): "true or false",
        (14, "scheduler.local.seeed"): 'did you mean "seed"?',
        (14, "scheduler.local.trace"): "path",
        (14, "scheduler.local.seed"): "whole number",
        (16, "jobs.max_running"): "whole number",
        (17, "jobs.log_limit"): 'wrong unit "s" (s is a unit of time)',
        (18, "jobs.drain-timeout"): 'did you mean "drain_timeout"?',
        (20, "allocation.objective"): 'accepted is "throughput" or "efficiency"',
        (21, "allocation.prior_exponent"): "too large; accepted is 1",
        (22, "allocation.zebra"): 'accepted is "objective", "t_fwd"',
    }
    assert messages.keys() == expected.keys()
    for place, words in expected.items():
        assert words in messages[place]


@pytest.mark.parametrize(
    ("text", "line", "key", "words"),
    [
        ("", None, "scheduler", 'write [scheduler] and below it "kind"'),
        ("[daemon]\n\n[scheduler]\n", 3, "scheduler.kind", "required"),
        ("scheduler = 3", 1, "scheduler", "3 is not a section; write [scheduler]"),
        ("[[scheduler]]\nkind = 'local'", 1, "scheduler", "not a section"),
        (
            LEAST + "[daemon]\nheartbeat = '10 s'",
            3,
            "daemon.agent_timeout",
            "less than two heartbeats of 10 s",
        ),
        (
            LEAST + "[daemon]\nagent_timeout = '1500 ms'",
            4,
            "daemon.agent_timeout",
            "accepted is 2 s or more",
        ),
        (LEAST + "[daemon]\nlisten = 'tcp://*:66000'", 4, "daemon.listen", "0 to 65535"),
        (LEAST + "[daemon]\nmetrics_listen = '9464'", 4, "daemon.metrics_listen", "HOST:PORT"),
        (LEAST + "[daemon]\ndatabase = '/var/x.db'", 4, "daemon.database", "SQLAlchemy URL"),
        (LEAST + "[daemon]\nstate_dir = ''", 4, "daemon.state_dir", "path"),
        (
            LEAST + "[daemon]\nstate_dir = '~no-such-user-here/x'",
            4,
            "daemon.state_dir",
            "home directory",
        ),
        (LEAST + "[scheduler.lsf]\nqueue = 'x'", 3, "scheduler.lsf", "no such key"),
        (LEAST + "[scheduler.local]\nspeedup = nan", 4, "scheduler.local.speedup", "accepted is"),
        (LEAST + "[[trainer]]\nname = 'a b'", 4, "trainer.0.name", "docs/configuration.md"),
        (LEAST + "[jobs]\nmax_tries = true", 4, "jobs.max_tries", "true is not accepted"),
        (LEAST + 'jobs.max_tries = """\nmany\n"""', 3, "scheduler.jobs", "no such key"),
    ],
)
def test_single_problems(text, line, key, words):
    assert [(problem[0], problem[1]) for problem in problems(text)] == [(line, key)]
    assert words in problems(text)[0][2]


@pytest.mark.parametrize(
    "value",
    ["tcp://127.0.0.1:0", "tcp://0.0.0.0:6000", "tcp://head.example.org:6000", "tcp://[::1]:6000"],
)
def test_addresses(value):
    assert parse_config(LEAST + f"[daemon]\nlisten = '{value}'").daemon.listen == value


def test_no_metrics():
    assert parse_config(LEAST + "[daemon]\nmetrics_listen = ''").daemon.metrics_listen == ""


def test_syntax_errors_do_not_hide_the_rest():
    all_problems = problems("[scheduler]\nkind = local\n[jobs]\nmax_trys = 1\nstop_grace = 5 s\n")
    assert [line for line, _, _ in all_problems] == [
        1,
        2,
        4,
        5,
    ]  # 1: kind is missing once line 2 cannot be read
    assert 'kind = "local"' in all_problems[1][2]
    assert 'did you mean "max_tries"' in all_problems[2][2]


def test_a_file_that_breaks_off_is_checked_up_to_there():
    all_problems = problems("[jobs]\nmax_trys = 1\n[scheduler\nkind = 'local'\n")
    assert [(line, key) for line, key, _ in all_problems] == [(2, "jobs.max_trys"), (3, "")]
    assert "The lines below are checked once this is corrected" in all_problems[1][2]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read: No such file"),
        (b"[daemon]\nx = '\xff'\n", "line 2: The file is not UTF-8"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, content, words):
    file = tmp_path / "site.toml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError) as error:
        load_config(file)
    assert words in str(error.value)
    assert str(error.value).startswith(f"{file}: 1 problem.")


PIECES = [
    'a = """',
    "b = [",
    "]",
    "'''",
    "{",
    "= 1",
    "\x00",
    '"x"."y" = {z = 1}',
    *EVERYTHING_WRONG.splitlines(),
    *LEAST.splitlines(),
]


@settings(max_examples=cases(200), deadline=None)
@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=20), max_size=12))
def test_any_text_gives_a_configuration_or_sentences(lines):
    text = "\n".join(lines)
    all_problems = ()
    try:
        parse_config(text)
    except ConfigError as error:
        all_problems = error.problems or ["no problem at all"]
    for problem in all_problems:
        assert problem.line is None or 1 <= problem.line <= len(text.split("\n"))
        assert problem.message.endswith((".", "?"))
        assert "pydantic" not in str(problem)


def test_written_and_read_again():
    config = parse_config(LEAST + '[daemon]\nheartbeat = "250 ms"\n[jobs]\nlog_limit = "3 kB"\n')
    assert Config.model_validate(config.model_dump(mode="json")) == config


@pytest.mark.parametrize(
    ("section", "name", "other"),
    [
        ("daemon", "metrics_listen", '""'),
        ("nodes", "link_every", '"0 s"'),
        ("nodes", "keep_warm", '"0 s"'),
        ("jobs", "snapshot_memory", "0"),
        ("jobs", "snapshot_memory", "0.0"),
        ("shares", "by", '"none"'),
        ("quotas", "user_nodes", "0"),
        ("quotas", "own", '["user ann 0 3"]'),
    ],
)
def test_off_and_the_other_spelling_mean_the_same(section, name, other):
    off = '["user ann off 3"]' if name == "own" else '"off"'
    new, old = (parse_config(f"{LEAST}[{section}]\n{name} = {value}") for value in (off, other))
    if name == "own":
        assert new.quotas.limit("user", "ann") == old.quotas.limit("user", "ann")
        return
    assert new == old
    written = new.model_dump(mode="json")
    assert written[section][name] == "off"
    assert Config.model_validate(written) == new


def test_batch_schedulers_without_a_limit_of_leases():
    text = '[scheduler]\nkind = "slurm"\n[scheduler.slurm]\n'
    for name in ("max_leases", "max_leases_per_user"):
        assert parse_config(f'{text}{name} = "off"') == parse_config(f"{text}{name} = 0")
    assert parse_config(text).scheduler.slurm.max_leases == 0


@pytest.mark.parametrize(
    ("line", "accepted"),
    [
        ('[nodes]\nkeep_warm = "of"', 'or "1.5 h", or "off".'),
        ('[quotas]\nuser_jobs = "none"', 'a whole number without quotes or unit, or "off".'),
        ('[jobs]\nsnapshot_memory = "none"', 'a number without quotes or unit, or "off".'),
        ('[daemon]\nmetrics_listen = "none"', 'such as "127.0.0.1:9464", or "off".'),
        ("[daemon]\nmetrics_listen = false", 'accepted is text in quotes, or "off".'),
        ('[shares]\nby = "of"', 'accepted is "off", "user", "group" or "account".'),
    ],
)
def test_a_wrong_value_of_a_key_that_can_be_off(line, accepted):
    [(_, _, message)] = problems(LEAST + line)
    assert message.endswith(accepted)


def test_every_key_is_described():
    for name, model in sections():
        assert model.__doc__, name
        for key, info in keys(model):
            assert info.description, f"{name}.{key}"
            assert info.description.endswith("."), f"{name}.{key}"


def test_the_reference_is_what_the_code_says():
    assert (ROOT / "docs/configuration.md").read_text() == reference_markdown(), (
        "docs/configuration.md is old; write it anew with: python -m "
        "malletrain.config.reference > docs/configuration.md"
    )


def test_the_keys_of_batch_schedulers_are_described_once():
    page = reference_markdown()
    assert page.count("| `start_within` |") == page.count("| `submit_rate` |") == 1
    assert page.count("[keys of batch schedulers](#keys-of-batch-schedulers)") == 2
    assert page.index("## [scheduler.pbs]") < page.index("## Keys of batch schedulers")
    assert page.count("| `account` |") == 2  # of a Slurm job, and of a PBS job


def test_the_example_names_every_key_at_its_default():
    example = example_toml()
    assert parse_config(example) == parse_config(LEAST)
    active = re.sub(r"^# (\w+ = |\[\[)", r"\1", example, flags=re.MULTILINE)
    alone = active.replace('users = "..."\n', "")  # which the embedded cluster does not accept
    assert (
        parse_config(alone.replace('= "..."', '= "x"')).allocation == parse_config(LEAST).allocation
    )
    assert {f"{name}.{key}" for name, model in sections() for key, _ in keys(model)} == set(
        _names_in(active)
    )


def _names_in(toml: str):
    section = ""
    for line in toml.splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif match := re.match(r"(\w+) = ", line):
            yield f"{section}.{match[1]}"


@pytest.mark.parametrize(
    "file", sorted((ROOT / "site-configs").glob("*.toml")), ids=lambda file: file.name
)
def test_site_configs_are_valid(file):
    assert load_config(file).scheduler.kind in scheduler_kinds()


@pytest.mark.parametrize(
    "line",
    [
        'database = "Postgresql://m:s3cret@h/m"',
        "database = postgresql://m:s3cret@h/m",
        'database = ["postgresql://m:s3cret@h/m"]',
        'databse = "postgresql://m:s3cret@h/m"',
        'database = "postgresql://m:s3cret@h/m',
        '"database = "postgresql://m:s3cret@h/m"',
    ],
)
def test_a_password_in_a_line_that_is_refused_is_not_shown(line):
    """What is refused goes to terminals and to the journal."""
    refused = problems(LEAST + f"[daemon]\n{line}\n")
    assert refused
    assert "s3cret" not in str(refused)
