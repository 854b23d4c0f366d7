"""What the documents name is there: files, modules, make targets, commands and their options."""

import importlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from autotune.cli.main import COMMANDS, build_app

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))] + [
    path for top in ("studies", "tests") for path in sorted((ROOT / top).rglob("*.md"))
]
_CODE = re.compile(r"`([^`\n]+)`")
_FENCE = re.compile(r"^```.*?\n(.*?)^```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)\s]*)?\)")
_FILE = re.compile(r"[\w.*-]+(?:/[\w.*-]+)*\.(?:py|yaml|json|jsonl|md|toml|csv|gz)")
_FOLDER = re.compile(r"(?:[\w.-]+/)+")
_MODULE = re.compile(r"(?:autotune|model|engine|kernels|bench)(?:\.\w+)+")
#: files that a command makes where it is run
_MADE = re.compile(
    r"(?:best|gpu\.best|quickstart\.best|machine|host|rows|report|results|questions?|summary)\.\w+"
)


def is_there(name: str) -> bool:
    """The path exists from the root, or is the end of one that does (`cycle.py`, `store/`)."""
    wanted = name.rstrip("/")
    if any(ROOT.glob(wanted)):
        return True
    tops = ("autotune", "bench", "docs", "engine", "kernels", "model", "studies", "tests")
    return any(any((ROOT / top).glob(f"**/{wanted}")) for top in tops)


def dead_names(text: str) -> list[str]:
    """Files, folders and modules in backticks that are not in the tree."""
    dead = []
    for name in sorted(set(_CODE.findall(text))):
        if _FILE.fullmatch(name) or _FOLDER.fullmatch(name):
            if not _MADE.fullmatch(name) and not is_there(name):
                dead.append(name)
        elif _MODULE.fullmatch(name) and not resolves(name):
            dead.append(name)
    return dead


def resolves(dotted: str) -> bool:
    """Whether ``package.module.attribute`` can be imported and looked up."""
    parts = dotted.split(".")
    for split in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:split]))
        except ModuleNotFoundError:
            continue
        for attribute in parts[split:]:
            if not hasattr(found, attribute):
                return False
            found = getattr(found, attribute)
        return True
    return False


def commands(text: str) -> Iterator[list[str]]:
    """Command lines of ``autotune`` and ``engine``, as words, from fences and backticks."""
    lines = [line for block in _FENCE.findall(text) for line in joined(block)]
    for line in [*lines, *_CODE.findall(text)]:
        start = re.match(r"(?:\$ )?(?:\.venv/bin/)?(autotune|engine) (?=[a-z-])", line)
        if start is None:
            continue
        command = line[start.start(1) :].split("  #")[0].replace("…", "").strip()
        try:
            yield shlex.split(command)
        except ValueError:
            continue


def joined(block: str) -> list[str]:
    """Lines of a fence, those that end in a backslash put together."""
    return re.sub(r"\\\n\s*", " ", block).split("\n")


def unknown_parts(words: list[str]) -> list[str]:
    """Sub-commands and options of one command line that the program does not have."""
    if words[0] == "engine":
        from engine.__main__ import app
    else:
        if words[1] not in COMMANDS:
            return [words[1]]
        app = build_app(words[1:])
    command: Any = typer.main.get_command(app)
    rest, path = words[1:], words[0]
    while rest and hasattr(command, "commands"):
        name = rest.pop(0)
        if re.fullmatch(r"[A-Z]+|-.*", name):
            break
        if name not in command.commands:
            return [f"{path} {name}"]
        command, path = command.commands[name], f"{path} {name}"
    known = {"--help"} | {o for p in command.params for o in (*p.opts, *p.secondary_opts)}
    # what follows -- is another program's command line
    own = rest[: rest.index("--")] if "--" in rest else rest
    options = [w.split("=")[0] for w in own if re.match(r"--?[a-z]", w)]
    return [f"{path} {option}" for option in options if option not in known]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_name_is_there(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    assert dead_names(text) == []
    links = [t for t in _LINK.findall(text) if not re.match(r"[a-z]+:", t)]
    assert [t for t in links if not (document.parent / t).exists()] == []
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    code = [*_CODE.findall(text), *(line for f in _FENCE.findall(text) for line in f.split("\n"))]
    made = {m[1] for line in code if (m := re.match(r"make ([a-z][\w-]*)", line))}
    assert made <= targets


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_command_and_option_exists(document: Path) -> None:
    lines = list(commands(document.read_text(encoding="utf-8")))
    assert [part for words in lines for part in unknown_parts(words)] == []


def test_the_readme_and_the_list_of_commands_are_read() -> None:
    """Else the test above proves nothing."""
    for name, least in (("README.md", 10), ("docs/commands.md", 20), ("docs/29ms-wall.md", 5)):
        assert len(list(commands((ROOT / name).read_text(encoding="utf-8")))) >= least, name


@pytest.mark.parametrize(
    ("text", "dead"),
    [
        pytest.param("see `engine/gone.py`", ["engine/gone.py"], id="file"),
        pytest.param("see `gone.py` and `cycle.py`", ["gone.py"], id="bare-file"),
        pytest.param("in `autotune/gone/`", ["autotune/gone/"], id="folder"),
        pytest.param("`model.predictor` and `model.gone`", ["model.gone"], id="module"),
        pytest.param("`model.spec.Gone`", ["model.spec.Gone"], id="attribute"),
        pytest.param("`studies/*.yaml`, `kernels/gone*.py`", ["kernels/gone*.py"], id="pattern"),
    ],
)
def test_a_dead_name_is_found(text: str, dead: list[str]) -> None:
    assert dead_names(text) == dead


@pytest.mark.parametrize(
    ("line", "unknown"),
    [
        pytest.param("autotune gone", ["gone"], id="command"),
        pytest.param("autotune study gone x", ["autotune study gone"], id="sub-command"),
        pytest.param("autotune lint --gone", ["autotune lint --gone"], id="option"),
        pytest.param("engine bench --gone 1", ["engine bench --gone"], id="engine-option"),
        pytest.param("autotune env check -- python -m x --tp 8", [], id="another-program"),
    ],
)
def test_an_unknown_part_is_found(line: str, unknown: list[str]) -> None:
    assert unknown_parts(shlex.split(line)) == unknown
