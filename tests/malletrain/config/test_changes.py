from malletrain.config.model import changes, parse_config, with_changes
from malletrain.daemon.api.changes import AT_ONCE, NEXT_JOBS

LEAST = '[scheduler]\nkind = "local"\n'


def test_a_change_is_told_as_it_is_written_in_the_file():
    before = parse_config(LEAST + '[jobs]\nretry_window = "60 s"\n')
    after = parse_config(
        LEAST + '[jobs]\nretry_window = "2 h"\n[daemon]\noperators = ["ann"]\n'
        'database = "postgresql://m:secret@h/m"\n[gaps]\nuse_planned = true\n'
    )
    differences = changes(before, after)
    assert differences["jobs.retry_window"] == "1 min -> 2 h"
    assert differences["daemon.operators"] == "[] -> ['ann']"
    assert differences["daemon.database"] == "changed"
    assert "secret" not in str(differences)
    assert changes(after, after) == {}


def test_only_what_is_named_is_taken_over():
    before = parse_config(LEAST)
    after = parse_config(
        LEAST + '[jobs]\nmax_running = 3\nmax_tries = 9\n[gaps]\nexclude = ["n1"]\n'
    )
    mixed = with_changes(before, after, {"jobs.max_running", "gaps.exclude"})
    assert (mixed.jobs.max_running, mixed.gaps.exclude) == (3, ["n1"])
    assert mixed.jobs.max_tries == before.jobs.max_tries
    assert set(changes(mixed, after)) == {"jobs.max_tries"}


def test_what_a_daemon_takes_over_are_keys():
    config = parse_config(LEAST)
    for name in AT_ONCE | NEXT_JOBS:
        section, key = name.split(".")
        assert hasattr(getattr(config, section), key)
    assert not AT_ONCE & NEXT_JOBS
