"""A database that was lost is told from one that is new."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from malletrain.config.model import parse_config
from malletrain.daemon.site.startup import refusals, remember_database
from malletrain.store import copies
from malletrain.store.store import Store

PAGE = 4096


def gone(database):
    emptied(database)
    database.unlink()


def emptied(database):
    copies.vacuum(f"sqlite:///{database}")  # what is in its log is in the file after this
    for side in copies.SIDE_FILES:
        Path(f"{database}{side}").unlink(missing_ok=True)
    database.write_bytes(b"")


def cut_off(database):
    copies.vacuum(f"sqlite:///{database}")
    os.truncate(database, database.stat().st_size // 2 // PAGE * PAGE)


def overwritten(database):
    copies.vacuum(f"sqlite:///{database}")
    with database.open("r+b") as file:
        for at in range(2 * PAGE, database.stat().st_size, 2 * PAGE):
            file.seek(at)
            file.write(b"\xa5" * PAGE)


def half_written(database):
    database.write_bytes(database.read_bytes()[:100])


def of_a_later_version(database):
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("UPDATE alembic_version SET version_num = 9999")
        connection.commit()


def config_and_database(folder, database="malletrain.db"):
    config = parse_config(
        f"""
        [daemon]
        state_dir = "{folder}/state"
        metrics_listen = ""
        database = "sqlite:///{folder}/state/{database}"
        [scheduler]
        kind = "local"
        """
    )
    return config, config.state_dir / database


def used(folder):
    config, database = config_and_database(folder)
    assert refusals(config) == []
    with Store.open(config.database_url):
        remember_database(config)
    assert refusals(config) == []
    return config, database


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (gone, "is empty or not there"),
        (emptied, "is empty or not there"),
        (half_written, "malletrain db restore --config FILE COPY"),
        (cut_off, "malletrain db restore --config FILE COPY"),
        (overwritten, "malletrain db restore --config FILE COPY"),
        (of_a_later_version, "was written by a later malletrain"),
    ],
)
def test_what_is_not_the_database_of_before_is_refused(tmp_path, damage, words):
    config, database = used(tmp_path)
    copy = tmp_path / "copy.db"
    copies.backup(config.database_url, copy)
    damage(database)
    [sentence] = refusals(config)
    assert words in sentence
    copies.restore(config.database_url, copy)
    assert refusals(config) == []


def test_another_database_may_be_new(tmp_path):
    used(tmp_path)
    config, _ = config_and_database(tmp_path, "other.db")
    assert refusals(config) == []


def test_without_its_file_it_is_begun_anew(tmp_path):
    config, database = used(tmp_path)
    emptied(database)
    (config.state_dir / "database").unlink()
    assert refusals(config) == []


def test_its_password_is_not_written_down(tmp_path):
    config, _ = used(tmp_path)
    url = "postgresql+psycopg://malletrain:secret@db/malletrain"
    config = config.model_copy(
        update={"daemon": config.daemon.model_copy(update={"database": url})}
    )
    remember_database(config)
    text = (config.state_dir / "database").read_text()
    assert "secret" not in text
    assert "@db/malletrain" in text


def test_a_check_tells_a_database_of_a_later_version(tmp_path):
    config, database = used(tmp_path)
    of_a_later_version(database)
    assert "later malletrain" in copies.check(config.database_url)
