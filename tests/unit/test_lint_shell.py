"""Shell text as a shell reads it: words, redirections, variables, and what children get."""

import shlex
import subprocess

import pytest

from autotune.errors import UserError
from autotune.lint.shell import Shell, plain_words, statements


def last(text: str) -> tuple[tuple[str, ...], dict[str, str], dict[str, str]]:
    """Words, exported and local variables of the last statement."""
    *_, statement = statements(text, Shell(), "--args")
    return statement.words, dict(statement.exported), dict(statement.local)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        pytest.param("a 'b c' \"d e\" f\\ g", ("a", "b c", "d e", "f g"), id="quotes"),
        pytest.param("a --x='{\"k\": 1}' b", ("a", '--x={"k": 1}', "b"), id="json"),
        pytest.param("a b > log 2>&1 &", ("a", "b"), id="redirected"),
        pytest.param("a b &> log", ("a", "b"), id="both-redirected"),
        pytest.param("a </dev/null b 2>>err", ("a", "b"), id="redirection-in-the-middle"),
        pytest.param("a \\\n  b \\\n  c", ("a", "b", "c"), id="continued-lines"),
        pytest.param("a b#c # d", ("a", "b#c"), id="comment"),
        pytest.param("N=4; a $N ${N}x ${M:-5} '$N'", ("a", "4", "4x", "5", "$N"), id="variables"),
        pytest.param("a $(b c) d", ("a", "$(b c)", "d"), id="substitution-is-kept"),
        pytest.param('a "x\\"y$"', ("a", 'x"y$'), id="escaped-quote"),
    ],
)
def test_words_are_those_of_a_shell(text: str, words: tuple[str, ...]) -> None:
    assert last(text)[0] == words


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("export A=1; B=2; PRINT", id="export-and-local"),
        pytest.param("A=1; export A; PRINT", id="exported-later"),
        pytest.param("set -a; A=1; set +a; B=2; PRINT", id="all-exported-for-a-while"),
        pytest.param("export A=1; unset A; PRINT", id="unset"),
        pytest.param("export A=1; A=2; PRINT", id="changed-stays-exported"),
        pytest.param("A=3\nexport B=$A\nPRINT", id="one-from-another"),
        pytest.param("export A='x y' B=2 && PRINT", id="two-on-a-line"),
    ],
)
def test_children_get_what_a_real_shell_hands_on(text: str) -> None:
    exported = last(text)[1]
    program = text.replace("PRINT", "env")
    done = subprocess.run(
        ["sh", "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": "/usr/bin:/bin"},
    )
    lines = [line for line in done.stdout.splitlines() if line[:2] in ("A=", "B=")]
    real = dict(line.split("=", 1) for line in lines)
    assert exported == real


def test_an_open_quote_is_the_users_mistake() -> None:
    with pytest.raises(UserError, match="--args: No closing quotation"):
        list(statements("a 'b", Shell(), "--args"))


def test_a_semicolon_inside_a_listed_value_belongs_to_it() -> None:
    shell = Shell(export_all=True)
    assert not list(statements("A=x;y:z; B=2", shell, "--env", listing=True))
    assert shell.exported == {"A": "x;y:z", "B": "2"}


def test_quoting_by_the_standard_library_is_undone() -> None:
    words = [
        "plain",
        "two words",
        'q"uote',
        "single'quote",
        "$HOME",
        "#no",
        "a;b",
        "x\\y",
        "tab\tx",
    ]
    assert plain_words(shlex.join(words), "--args") == words
