from pathlib import Path

from malletrain.protocol.event_kinds import EventKind, LeaseStatus, event_reference

ROOT = Path(__file__).parents[3]


def test_the_page_is_what_the_tables_say():
    assert (ROOT / "docs/events.md").read_text() == event_reference(), (
        "docs/events.md is old; write it anew with: python -m malletrain.protocol.event_kinds > "
        "docs/events.md"
    )


def test_a_kind_is_its_word_wherever_text_is_expected():
    assert EventKind.NODE_LOST == "node-lost"
    assert f"{EventKind.NODE_LOST}" == str(EventKind.NODE_LOST) == "node-lost"
    assert {EventKind.NODE_LOST: 1}["node-lost"] == 1
    assert EventKind("node-lost") is EventKind.NODE_LOST
    assert LeaseStatus.ENDED == "ended"


def test_every_word_is_explained_in_sentences():
    for word in [*EventKind, *LeaseStatus]:
        assert word.meaning.endswith((".", ".)")), word
