import pytest

from tests.malletrain.rounds.checked import check_transitions


@pytest.fixture(autouse=True)
def transitions(monkeypatch):
    check_transitions(monkeypatch)
