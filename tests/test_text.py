import pytest

from sandmask._text import counted, described, first_line, in_shell, printable, printable_lines


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Caf\u00e9 \u732b\u00a0\U0001f431", "Caf\u00e9 \u732b\u00a0\U0001f431"),
        ("a\x1b[2Jb", r"a\x1b[2Jb"),
        ("a\r\n\tb\x07", r"a\r\n\tb\x07"),
        ("\x9b31m", r"\x9b31m"),
        ("gpj\u202egnp.", r"gpj\u202egnp."),
        ("not \udcff UTF-8", r"not \xff UTF-8"),
    ],
)
def test_only_what_acts_on_a_terminal_is_escaped(text: str, expected: str) -> None:
    assert printable(text) == expected


def test_things_are_counted_in_words() -> None:
    assert [counted(*each) for each in ((1, "class"), (0, "class"), (1200, "run"))] == [
        "1 class",
        "0 classes",
        "1,200 runs",
    ]


def test_paths_in_commands_can_be_copied() -> None:
    assert in_shell("runs/my sweep") == "'runs/my sweep'"
    assert in_shell("runs/sweep") == "runs/sweep"


def test_lines_may_stay() -> None:
    assert printable_lines("a\nb\x1b") == "a\nb\\x1b"


@pytest.mark.parametrize(
    ("error", "line", "with_type"),
    [
        (ValueError("\n no such file\nmore"), "no such file", "ValueError: no such file"),
        (AssertionError(), "AssertionError", "AssertionError"),
        (
            SyntaxError("invalid syntax", ("a.py", 3, 1, "x =")),
            "invalid syntax (a.py, line 3)",
            "SyntaxError: invalid syntax",
        ),
    ],
)
def test_errors_are_told_in_one_line(error: Exception, line: str, with_type: str) -> None:
    assert first_line(error) == line
    assert described(error) == with_type
