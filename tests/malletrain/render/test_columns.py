"""Which columns are shown at a width."""

from hypothesis import given
from hypothesis import strategies as st
from rich.text import Text

from malletrain.render.columns import GAP, Column, fit, shorten

NUMBER = Column("N", right=True, drop=3)
NAME = Column("NAME", drop=2, least=6)


def total(shown):
    return sum(shown.values()) + GAP * max(0, len(shown) - 1)


def test_text_is_shortened_before_a_number_goes_and_the_highest_goes_first():
    columns, natural = (Column("ID"), NAME, NUMBER), (3, 20, 9)
    assert fit(columns, natural, 36) == {0: 3, 1: 20, 2: 9}
    assert fit(columns, natural, 22) == {0: 3, 1: 6, 2: 9}
    assert fit(columns, natural, 21) == {0: 3, 1: 16}
    assert fit(columns, natural, 10) == {0: 3}
    assert fit(columns, natural, 1) == {0: 3}  # an id is never cut


def test_a_note_stands_in_the_line_where_there_is_room():
    columns, natural = (Column("ID"), Column("WHY", note=True)), (3, 90)
    assert fit(columns, natural, 95) == {0: 3, 1: 90}
    assert fit(columns, natural, 60) == {0: 3, 1: 55}
    assert fit(columns, natural, 44) == {0: 3}


columns = st.lists(
    st.tuples(st.integers(1, 30), st.integers(0, 9), st.sampled_from([0, 0, 4, 10])),
    min_size=1,
    max_size=9,
)


@given(columns, st.integers(1, 120))
def test_what_is_shown_fits_and_numbers_are_whole(triples, width):
    specs = [Column("", drop=drop, least=least) for _, drop, least in triples]
    natural = [n for n, _, _ in triples]
    shown = fit(specs, natural, width)
    assert total(shown) <= width or not any(specs[k].drop for k in shown)
    for k, each in shown.items():
        assert each == natural[k] or (specs[k].least and specs[k].least <= each < natural[k])
    gone = [specs[k].drop for k in range(len(specs)) if k not in shown]
    assert all(specs[k].drop <= min(gone) for k in shown if gone)


@given(st.text(max_size=40), st.integers(1, 40), st.booleans())
def test_shortened_text_is_no_wider(text, width, middle):
    assert shorten(Text(text), width, middle=middle).cell_len <= max(width, 1)


def test_names_keep_both_ends():
    assert shorten(Text("resnet50-lr0.1-seed12"), 12, middle=True).plain == "resne…seed12"


def test_no_number_in_a_text_is_cut():
    assert shorten(Text("loss 0.5  perplexity 10,718"), 24).plain == "loss 0.5  perplexity …"
    assert shorten(Text("needs 128 nodes"), 8).plain == "needs …"
    assert shorten(Text("resnet50-lr0.1-seed12"), 12).plain == "resnet50-lr…"
