from malletrain.config.tomlfile import read_toml

TEXT = '''\
# a comment
top = 1

[a]  # header
x = [
  1, # one
  2,
]
"quoted key" = """
[not.a.header]
"""
y.z = 3

  [a.b]
k = { l = 1, m = { n = 2 } }
[[rows]]
one = 1
[[rows]]
two = 2
'''


def test_lines_of_keys():
    toml = read_toml(TEXT)
    assert toml.problems == ()
    assert toml.lines == {
        ("top",): 2,
        ("a",): 4,
        ("a", "x"): 5,
        ("a", "quoted key"): 9,
        ("a", "y"): 12,
        ("a", "y", "z"): 12,
        ("a", "b"): 14,
        ("a", "b", "k"): 15,
        ("a", "b", "k", "l"): 15,
        ("a", "b", "k", "m"): 15,
        ("a", "b", "k", "m", "n"): 15,
        ("rows",): 16,
        ("rows", "0"): 16,
        ("rows", "0", "one"): 17,
        ("rows", "1"): 18,
        ("rows", "1", "two"): 19,
    }


def test_the_line_of_a_key_that_is_not_there_is_that_of_its_table():
    toml = read_toml(TEXT)
    assert toml.line_of(("a", "b", "missing")) == 14
    assert toml.line_of(("missing",)) is None


def test_lines_count_alike_with_other_line_ends():
    assert read_toml(TEXT.replace("\n", "\r\n")).lines == read_toml(TEXT).lines


def test_bad_lines_are_reported_and_left_out():
    toml = read_toml("a = 1\nb = two\nc = 3\nd = 5 min\n")
    assert toml.data == {"a": 1, "c": 3}
    assert [problem.line for problem in toml.problems] == [2, 4]
    assert 'b = "two"' in toml.problems[0].message
    assert 'd = "5 min"' in toml.problems[1].message
    assert toml.complete


def test_a_line_that_changes_what_follows_ends_the_reading():
    toml = read_toml("a = 1\nb = [\n1, 2\nc = 3\n[d]\n")
    assert toml.data == {"a": 1}
    assert not toml.complete
    assert len(toml.problems) == 1


def test_a_key_given_twice():
    toml = read_toml("a = 1\na = 2\nb = 3\n")
    assert toml.data == {"a": 1, "b": 3}
    assert [(problem.line, "overwrite" in problem.message) for problem in toml.problems] == [
        (2, True)
    ]


def test_deep_nesting_is_a_problem_and_no_crash():
    toml = read_toml("a = " + "[" * 100_000)
    assert len(toml.problems) == 1
    assert toml.data == {}


def test_many_bad_lines_are_not_all_listed():
    assert len(read_toml("a = !\n" * 100).problems) == 10
