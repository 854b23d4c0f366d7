"""Shell text as statements: words after quotes, comments, redirections and simple variables.

Enough of POSIX sh for what people paste: several lines, ``export``, ``&&``, pipes, ``> log 2>&1``,
``$NAME`` of variables set above. Command substitutions stay as they are written.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from autotune.errors import UserError

ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_NAME = re.compile(r"\$(?:\{([A-Za-z_]\w*)(?::?-([^}]*))?\}|([A-Za-z_]\w*))")
_REDIRECTION = re.compile(r"(&|\d*)(>>|>\||>&|<<<|<<-?|<&|[<>])")
_COPIED = re.compile(r"\d+|-")
#: characters that mean themselves, many at once: an environment has tens of thousands
_PLAIN = re.compile(r"[\w./:=,@%+-]+")
_ENDS = ("&&", "||", ";", "|", "&", "\n")
_KEYWORDS = frozenset({"then", "do", "else", "if", "while", "until", "!", "{", "(", "time", "exec"})


@dataclass(slots=True)
class Shell:
    """Variables of a shell as its statements are read."""

    #: what children get
    exported: dict[str, str] = field(default_factory=dict)
    #: set, but not exported
    local: dict[str, str] = field(default_factory=dict)
    #: files whose variables are read by ``source``; their text is not here
    sourced: list[str] = field(default_factory=list)
    export_all: bool = False

    def look(self, name: str) -> str | None:
        """The value of a variable, None where nothing above sets it."""
        return self.local.get(name, self.exported.get(name))

    def assign(self, name: str, value: str, *, export: bool = False) -> None:
        """``NAME=VALUE``, exported where it is already or all are."""
        if export or self.export_all or name in self.exported:
            self.local.pop(name, None)
            self.exported[name] = value
        else:
            self.local[name] = value


@dataclass(frozen=True, slots=True)
class Statement:
    """One simple command: its words, and what its children get beside the words' own prefix."""

    words: tuple[str, ...]
    exported: Mapping[str, str]
    local: Mapping[str, str]


def statements(text: str, shell: Shell, what: str, *, listing: bool = False) -> Iterator[Statement]:
    """Simple commands in order; assignments and exports change ``shell``.

    ``listing``: variables rather than commands, so that a ";" inside a word belongs to it.

    Raises ``UserError`` for an open quote, naming ``what``.
    """
    for words in _split(text, shell, what, listing):
        while words and words[0] in _KEYWORDS:
            words = words[1:]
        if words and not _builtin(words, shell):
            yield Statement(tuple(words), dict(shell.exported), dict(shell.local))


def plain_words(text: str, what: str) -> list[str]:
    """All words of a text that is no script. Raises ``UserError`` for an open quote."""
    return [word for words in _split(text, Shell(), what, False) for word in words]


def _builtin(words: list[str], shell: Shell) -> bool:
    """Apply a statement that only changes variables; whether it was one."""
    first = words[0]
    if first in ("export", "declare", "typeset"):
        for word in words[1:]:
            match = ASSIGNMENT.match(word)
            if match is not None:
                shell.assign(match[1], match[2], export=first == "export" or "-x" in words)
            elif word in shell.local and first == "export":
                shell.assign(word, shell.local[word], export=True)
        return True
    if first == "unset":
        for name in words[1:]:
            shell.exported.pop(name, None)
            shell.local.pop(name, None)
        return True
    if first == "set":
        if "-a" in words or "+a" in words or "allexport" in words:
            shell.export_all = words[1][0] == "-"
        return True
    if first in ("source", "."):
        shell.sourced += words[1:2]
        return True
    matches = [ASSIGNMENT.match(word) for word in words]
    if not all(matches):
        return False
    for match in matches:
        assert match is not None
        shell.assign(match[1], match[2])
    return True


def _split(text: str, shell: Shell, what: str, listing: bool) -> Iterator[list[str]]:
    """Words of each simple command; redirections are left out."""
    words: list[str] = []
    word: str | None = None
    skip_target = False
    position = 0
    text = text.replace("\\\r\n", " ").replace("\\\n", " ")

    def end_word() -> None:
        nonlocal word, skip_target
        if word is not None and not skip_target:
            words.append(word)
        if word is not None:
            skip_target = False
        word = None

    while position < len(text):
        char = text[position]
        plain = _PLAIN.match(text, position)
        # a number before the first letter may belong to a redirection
        if plain is not None and (word is not None or not char.isdigit()):
            word = (word or "") + plain[0]
            position = plain.end()
            continue
        if char in "'\"":
            value, position = _quoted(text, position, shell, what)
            word = (word or "") + value
            continue
        if char == "\\" and position + 1 < len(text):
            word = (word or "") + text[position + 1]
            position += 2
            continue
        if char == "#" and word is None:
            position = _line_end(text, position)
            continue
        end = next((end for end in _ENDS if text.startswith(end, position)), None)
        if end == "&" and text[position : position + 2] == "&>":
            end = None
        if end == ";" and listing and text[position + 1 : position + 2].strip():
            end = None
        if end is not None:
            end_word()
            yield words
            words, skip_target = [], False
            position += len(end)
            continue
        redirection = _REDIRECTION.match(text, position)
        if redirection is not None and (word is None or not redirection[1]):
            end_word()
            position = redirection.end()
            copied = _COPIED.match(text, position)
            if redirection[2] in (">&", "<&") and copied is not None:
                position = copied.end()
            else:
                skip_target = True
            continue
        if char.isspace():
            end_word()
            position += 1
            continue
        if char == "$":
            value, position = _dollar(text, position, shell)
            word = (word or "") + value
            continue
        word = (word or "") + char
        position += 1
    end_word()
    yield words


def _quoted(text: str, start: int, shell: Shell, what: str) -> tuple[str, int]:
    """The text of a quotation that begins at ``start``, and the position behind it."""
    quote, value, position = text[start], "", start + 1
    while position < len(text):
        char = text[position]
        if char == quote:
            return value, position + 1
        follower = text[position + 1 : position + 2]
        if quote == '"' and char == "\\" and follower and follower in '"\\$`':
            value += follower
            position += 2
        elif quote == '"' and char == "$":
            more, position = _dollar(text, position, shell)
            value += more
        else:
            value += char
            position += 1
    raise UserError(f"{what}: No closing quotation ({quote}); quote it as for a shell")


def _dollar(text: str, start: int, shell: Shell) -> tuple[str, int]:
    """``$NAME``, ``${NAME:-default}`` from what is known; anything else as written."""
    if text.startswith("$(", start):
        depth, position = 0, start + 1
        while position < len(text):
            depth += (text[position] == "(") - (text[position] == ")")
            position += 1
            if depth == 0:
                break
        return text[start:position], position
    match = _NAME.match(text, start)
    if match is None:
        return "$", start + 1
    known = shell.look(match[1] or match[3])
    if known is None:
        known = match[2] if match[2] is not None else match[0]
    return known, match.end()


def _line_end(text: str, position: int) -> int:
    end = text.find("\n", position)
    return len(text) if end < 0 else end
