import pytest

from malletrain.submission.curve_file import read_curve
from malletrain.submission.error import SpecError


@pytest.mark.parametrize(
    "text",
    ["nodes,samples_per_s\n2,8\n1,4.5\n", '{"2": 8, "1": 4.5}', "[[2, 8], [1, 4.5]]"],
)
def test_points_in_any_order(tmp_path, text):
    (tmp_path / "curve").write_text(text)
    assert list(read_curve(tmp_path / "curve").items()) == [("1", 4.5), ("2", 8.0)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "lists no size; accepted is"),
        ("{}", "lists no size"),
        ("nodes,samples_per_s\n2,8\n2,9\n", "line 3: 2 nodes are named twice"),
        ("[[1, 2], [1, 3]]", "1 nodes are named twice; name each size once"),
        ('{"2": 8, "2": 9}', "2 nodes are named twice"),
        ('{"0": 1}', "0 is not a number of nodes; sizes are whole numbers from 1 to 100,000"),
        ("[[100001, 1]]", "100001 is not a number of nodes; sizes are whole numbers from 1 to 1"),
        (f"[[1, 1{'0' * 400}]]", "is not a pair of numbers"),
        (f'{{"1": 1{"0" * 400}}}', "is not a pair of numbers"),
        (f"nodes,samples_per_s\n1,{'1' * 200_000}\n", "This is not valid CSV"),
        ('{"1": -1}', "-1 is not a throughput"),
        ("1,2\n", 'The first line is "1,2"'),
        ("[1]", "1 is not a pair of numbers"),
    ],
)
def test_what_is_no_curve(tmp_path, text, words):
    (tmp_path / "curve").write_text(text)
    with pytest.raises(SpecError, match=words):
        read_curve(tmp_path / "curve")
