"""Fixture: a store in a folder of its own."""

import pytest

from malletrain.store.store import JobRow, Store


@pytest.fixture
def url(tmp_path):
    return f"sqlite:///{tmp_path}/malletrain.db"


@pytest.fixture
def store(url):
    with Store.open(url) as opened:
        yield opened


def new_job(store: Store, name: str = "job", **fields) -> JobRow:
    return store.add_job(
        JobRow(store.new_job_id(), name, "ada", '{"script": "train.py"}', "queued", **fields)
    )
