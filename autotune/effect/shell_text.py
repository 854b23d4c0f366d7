"""Shell text on the way to a command: ``bash -c "..."``, and launch scripts that can be read.

A reading, not a shell: assignments, ``export``, ``unset`` and the last command count, in order;
conditions and loops are read as if they ran. What depends on a variable is left open.
"""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from autotune.effect.way import ASSIGNMENT, Way

_MAX_SCRIPT_BYTES = 1 << 20
_ENDS = frozenset({";", "&&", "||", "|", "&", "\n", "(", ")", "{", "}"})
_KEYWORDS = frozenset({"if", "then", "else", "elif", "fi", "for", "do", "done", "while", "case",
                       "esac", "in", "function", "[", "[[", "!"})  # fmt: skip
#: commands of a script that are not the one that it is for
_BESIDE = frozenset({"echo", "printf", "cd", "set", "source", ".", "ulimit", "mkdir", "sleep",
                     "trap", "wait", "module", "test", "true", "rm", "cp", "ls", "date", "exit",
                     "return", "shift", "hostname", "nvidia-smi", "which", "read", "local",
                     "shopt", "umask", "eval", "cat", "tee"})  # fmt: skip


def follow_shell_text(way: Way, text: str, source: str) -> None:
    """Apply what ``text`` does to the environment; its last command is followed."""
    exported = set(way.env)
    several = "\n" in text.strip()
    last = source
    for number, segment in _segments(text):
        where = f"{source}, line {number}" if several else source
        word, rest = segment[0], segment[1:]
        if word in ("export", "declare", "typeset"):
            for part in rest:
                match = ASSIGNMENT.match(part)
                if match is not None:
                    exported.add(match[1])
                    _assign(way, match[1], match[2], where)
                elif part.startswith("-n"):
                    continue
                elif not part.startswith("-"):
                    exported.add(part)
        elif word == "unset":
            for name in rest:
                way.unset(name, f"unset by {where}")
        elif all(ASSIGNMENT.match(part) for part in segment):
            # a plain assignment reaches children only where the name is exported already
            for part in segment:
                name, _, value = part.partition("=")
                if name in exported:
                    _assign(way, name, value, where)
        elif word not in _BESIDE:
            way.words, last = tuple(segment), where
    prefix = [part for part in way.words if ASSIGNMENT.match(part)]
    if prefix and way.words[: len(prefix)] == tuple(prefix):
        for part in prefix:
            name, _, value = part.partition("=")
            _assign(way, name, value, last)
        way.words = way.words[len(prefix) :]


def _assign(way: Way, name: str, value: str, where: str) -> None:
    if "$" in value or "`" in value:
        default = re.fullmatch(r"\$\{" + re.escape(name) + r":?[-=](.*)\}", value)
        if default is not None:
            # keeps what is set
            if name not in way.env:
                way.set(name, default[1])
        elif name.startswith(("NCCL_", "CUDA_")) and value not in (f"${name}", f"${{{name}}}"):
            way.notes.append(f"{where} sets {name}={value}: what that is depends on the run")
        return
    way.set(name, value, where)


def follow_script(way: Way, word: str) -> bool:
    """Follow a shell script that can be read here; False where ``word`` is none."""
    path = Path(word)
    try:
        if not path.is_file() or path.stat().st_size > _MAX_SCRIPT_BYTES:
            return False
        data = path.read_bytes()
    except OSError:
        return False
    first = data.split(b"\n", 1)[0]
    is_shell = bool(re.match(rb"#!.*\b(ba|da|z|k)?sh\b", first))
    if not (is_shell or path.suffix in (".sh", ".bash")):
        return False
    before = way.words
    way.words = ()
    follow_shell_text(way, data.decode("utf-8", "replace"), path.name)
    if way.words[:1] == before[:1]:
        # a script that starts itself again
        way.words = ()
    return True


def _segments(text: str) -> Iterator[tuple[int, list[str]]]:
    """(line, words) of simple commands; a line that shlex cannot take apart is left out."""
    for number, line in _logical_lines(text):
        lexer = shlex.shlex(line, posix=True, punctuation_chars="();&|")
        lexer.whitespace_split = True
        lexer.commenters = "#"
        try:
            tokens = list(lexer)
        except ValueError:
            # an open quote: the line goes on elsewhere
            continue
        current: list[str] = []
        for token in [*tokens, ";"]:
            if token in _ENDS or set(token) <= set("();&|"):
                while current and current[0] in _KEYWORDS:
                    current.pop(0)
                if current:
                    yield number, current
                current = []
            else:
                current.append(token)


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines with those that a backslash continues, and the number of their first."""
    begun, joined = 0, ""
    for number, line in enumerate(text.splitlines(), 1):
        begun = begun or number
        joined += line.removesuffix("\\")
        if line.endswith("\\"):
            joined += " "
            continue
        yield begun, joined
        begun, joined = 0, ""
    if joined:
        yield begun, joined
