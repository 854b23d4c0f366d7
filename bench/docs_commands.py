"""Runs the commands of the documents again and compares, or renews, the output they show.

    python -m bench.docs_commands docs/29ms-wall.md          # what differs
    python -m bench.docs_commands docs/29ms-wall.md --write  # renew the figures

A block is a fence of kind ``console``, a line ``$ command``, then its output, where a line ``…``
stands for lines left out. Each shown part must stand in the real output, in order, word for word;
numbers may move within ``near``. Line breaks and rules of tables do not count. Only ``autotune`` is
run, in this process.
"""

import io
import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from autotune.cli.main import main as autotune

ROOT = Path(__file__).parents[1]
_BLOCK = re.compile(r"^```console\n\$ (.*?)^```$", re.MULTILINE | re.DOTALL)
_NUMBER = re.compile(r"[+-]?\d[\d,]*(?:\.\d+)?")
#: relative change of a figure that leaves the text around it true
_RELATIVE = 0.25


@dataclass(frozen=True)
class Block:
    """One command and what the document shows of its output."""

    command: str
    shown: tuple[str, ...]

    @property
    def parts(self) -> tuple[tuple[str, ...], ...]:
        """Runs of shown lines between the places where lines were left out."""
        found: list[tuple[str, ...]] = []
        for text in re.split(r"^…$", "\n".join(self.shown), flags=re.MULTILINE):
            if text.strip():
                found.append(tuple(text.strip("\n").split("\n")))
        return tuple(found)


def blocks(text: str) -> list[Block]:
    """Every command of a document. A command goes on after a line that ends in a backslash."""
    found = []
    for match in _BLOCK.finditer(text):
        lines = match[1].rstrip("\n").split("\n")
        words = [lines[0]]
        while words[-1].endswith("\\"):
            words.append(lines[len(words)])
        command = " ".join(word.rstrip("\\").strip() for word in words)
        found.append(Block(command, tuple(lines[len(words) :])))
    return found


def run(command: str) -> tuple[int, list[str]]:
    """(exit code, lines) of an ``autotune`` command; ``NAME=VALUE`` words in front are set."""
    words = shlex.split(command)
    environment = {}
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        environment[name] = value
    if words[0] != "autotune":
        raise ValueError(f"only autotune is run, not {words[0]!r}: {command}")
    out = io.StringIO()
    with _at_root(environment), redirect_stdout(out), redirect_stderr(out):
        try:
            autotune(words[1:])
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
    return code, out.getvalue().replace(f"{ROOT}/", "").rstrip("\n").split("\n")


def differences(block: Block, lines: Sequence[str]) -> list[str]:
    """What the document shows and the output does not, one line each."""
    found, start = [], 0
    tokens = _tokens(lines)
    for part in block.parts:
        place = _find(part, tokens, start)
        if place is None:
            printed = "".join(f"\n  printed: {line}" for line in _closest(part, lines))
            found.append(
                f"$ {block.command}\n  no longer printed: {part[0].strip()[:90]} …{printed}"
            )
        else:
            start = place[1]
    return found


def _closest(part: Sequence[str], lines: Sequence[str]) -> list[str]:
    """What stands in the output instead of those lines of ``part`` that are not there."""
    there = {line.strip() for line in lines}
    missing = [line.strip() for line in part if line.strip() not in there]
    found = [match for line in missing for match in get_close_matches(line, there, 1, 0.4)]
    return list(dict.fromkeys(found))


def renewed(block: Block, lines: Sequence[str]) -> list[str]:
    """The shown lines with the figures of ``lines``. Raises ``ValueError`` where words changed."""
    tokens, start = _tokens(lines), 0
    shown = "\n".join(block.shown)
    for part in block.parts:
        place = _find(part, tokens, start) or _find(part, tokens, start, any_number=True)
        if place is None:
            raise ValueError(f"$ {block.command}\n  rewrite by hand: {part[0].strip()[:90]} …")
        first, start = place
        new = lines[tokens[first][1] : tokens[start - 1][1] + 1]
        shown = shown.replace("\n".join(part), "\n".join(_laid_out(part, new)), 1)
    return shown.split("\n")


def _laid_out(part: Sequence[str], new: Sequence[str]) -> list[str]:
    """``new`` with the empty lines and rules of ``part``, unless lines break elsewhere now."""
    kept = [line.rstrip() for line in new if _tokens([line])]
    if len(kept) != sum(1 for line in part if _tokens([line])):
        return [line.rstrip() for line in new]
    following = iter(kept)
    return [next(following) if _tokens([line]) else line for line in part]


def near(shown: str, real: str) -> bool:
    """Whether two numbers, as written, tell the same."""
    a, b = (float(text.replace(",", "")) for text in (shown, real))
    decimals = len(shown.partition(".")[2])
    # a unit in the first figure that people read: 1, 0.6 of 0.1's, 0.02 of 0.01's
    absolute = {0: 1.0, 1: 0.6}.get(decimals, 0.02)
    return abs(a - b) <= max(_RELATIVE * max(abs(a), abs(b)), absolute)


def _tokens(lines: Sequence[str]) -> list[tuple[str, int]]:
    """(word, number of its line); rules of tables are not words."""
    found = []
    for index, line in enumerate(lines):
        words = re.sub(r"[━─┏┓└┘┡┩╇┴┳┗┛├┤┼╈┻]+", " ", line).split()
        found += [(word, index) for word in words]
    return found


def _find(
    part: Sequence[str], tokens: Sequence[tuple[str, int]], start: int, any_number: bool = False
) -> tuple[int, int] | None:
    """Where the words of ``part`` stand in ``tokens``: (first, one behind the last)."""
    wanted = [word for word, _ in _tokens(part)]
    for first in range(start, len(tokens) - len(wanted) + 1):
        window = tokens[first : first + len(wanted)]
        if all(_same(a, b, any_number) for a, (b, _) in zip(wanted, window, strict=True)):
            return first, first + len(wanted)
    return None


def _same(shown: str, real: str, any_number: bool) -> bool:
    if shown == real:
        return True
    if _NUMBER.sub("#", shown) != _NUMBER.sub("#", real):
        return False
    pairs = zip(_NUMBER.findall(shown), _NUMBER.findall(real), strict=True)
    return any_number or all(near(a, b) for a, b in pairs)


@contextmanager
def _at_root(environment: dict[str, str]) -> Iterator[None]:
    """The clone's root as working directory, with these variables."""
    before, place = dict(os.environ), Path.cwd()
    # a document is as wide as a pipe; pytest's workers set this
    os.environ.pop("COLUMNS", None)
    os.environ.update(environment)
    os.chdir(ROOT)
    try:
        yield
    finally:
        os.chdir(place)
        os.environ.clear()
        os.environ.update(before)


def main(words: Sequence[str]) -> int:
    """Compare (or ``--write``) the documents named; the exit code."""
    write = "--write" in words
    problems = []
    for name in (word for word in words if word != "--write"):
        path = Path(name)
        text = path.read_text(encoding="utf-8")
        for block in blocks(text):
            if not re.match(r"(\w+=\S+ )*autotune ", block.command):
                continue
            _, lines = run(block.command)
            if not write:
                problems += differences(block, lines)
                continue
            try:
                new = renewed(block, lines)
            except ValueError as error:
                problems.append(str(error))
            else:
                text = text.replace("\n".join(block.shown), "\n".join(new), 1)
        if write:
            path.write_text(text, encoding="utf-8")
    print("\n".join(problems) or "all blocks hold")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
