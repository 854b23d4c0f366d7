"""A command line and an environment as text, taken apart as the server's own parser would.

Takes whole shell lines (``NCCL_PROTO=LL numactl -N0 python -m sglang.launch_server --tp 8 …``) or
the options alone.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autotune.errors import UserError
from autotune.lint.containers import yaml_environment
from autotune.lint.flags import SGLANG_ALIASES, VLLM_ALIASES, Resolved, resolve_option
from autotune.lint.programs import program_index
from autotune.lint.shell import ASSIGNMENT, Shell, statements
from autotune.lint.versions import Version

ENGINES = ("sglang", "vllm", "engine")
_NUMBER = re.compile(r"-\d+(\.\d+)?$")
#: vLLM options that take no value: the next bare word is the model
_SWITCH = re.compile(r"--(no-)?(enable|disable|enforce|trust|async|skip|use|return)-")


@dataclass(frozen=True, slots=True)
class Option:
    """One option: canonical name, values, and how it was written."""

    name: str
    values: tuple[str, ...]
    written: str

    @property
    def text(self) -> str:
        """As one word list for a message."""
        return " ".join((self.written, *self.values))


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """Options in order, words without option, and how odd option names resolved."""

    engine: str
    options: tuple[Option, ...] = ()
    positionals: tuple[str, ...] = ()
    #: names that this version does not take as they are
    odd: tuple[Resolved, ...] = ()
    #: JSON-valued options (speculative-config, compilation-config), dotted forms merged in
    configs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    #: printed by a server: every argument is there, defaults included, and all names are its own
    printed: bool = False
    #: JSON-valued option -> why it is no JSON object
    bad_json: Mapping[str, str] = field(default_factory=dict)

    def option(self, *names: str) -> Option | None:
        """The last occurrence of any of the names, None without."""
        found = [option for option in self.options if option.name in names]
        return found[-1] if found else None

    def text(self, *names: str) -> str | None:
        """Its (first) value; "" for a switch; None without it."""
        option = self.option(*names)
        if option is None:
            return None
        return option.values[0] if option.values else ""

    def has(self, *names: str) -> bool:
        """Whether a switch is given, and not as false."""
        text = self.text(*names)
        return text is not None and text.lower() not in ("false", "0", "no")

    def number(self, *names: str) -> int | None:
        """Its whole number; None without, or where it is none (the server refuses that itself)."""
        text = self.text(*names)
        try:
            return None if text is None else int(text)
        except ValueError:
            return None

    def numbers(self, *names: str) -> tuple[int, ...]:
        """All whole numbers of a list-valued option."""
        option = self.option(*names)
        words = " ".join(option.values) if option is not None else ""
        return tuple(int(word) for word in re.findall(r"\d+", words))

    def config(self, name: str) -> Mapping[str, Any]:
        """A JSON-valued option, empty without."""
        return self.configs.get(name, {})


def parse_env(text: str) -> dict[str, str]:
    """Variables of a text -> mapping.

    Takes words, lines, ``export`` lines, files with comments, and YAML's ``NAME: value`` or name
    and value pairs. Raises ``UserError`` naming a word that is no assignment.
    """
    listed = yaml_environment(text)
    if listed is not None:
        return listed
    shell = Shell(export_all=True)
    for statement in statements(text, shell, "--env", listing=True):
        for word in statement.words:
            match = ASSIGNMENT.match(word)
            if match is not None:
                shell.assign(match[1], match[2])
            elif word not in ("env", "-e", "--env"):
                raise UserError(f"--env: {word!r} is no NAME=VALUE")
    return shell.exported


def parse_command(
    engine: str, words: Sequence[str], version: Version | None
) -> tuple[Command, dict[str, str]]:
    """The command and the variables set before the program.

    Raises ``UserError`` for an unknown engine.
    """
    if engine not in ENGINES:
        raise UserError(f"unknown engine {engine!r}; known: {', '.join(ENGINES)}")
    env, rest = _program(engine, list(words))
    options: list[Option] = []
    odd: list[Resolved] = []
    configs: dict[str, dict[str, Any]] = {}
    bad: dict[str, str] = {}
    positionals: list[str] = []
    index = 0
    while index < len(rest):
        word = rest[index]
        index += 1
        if not _is_option(word):
            positionals.append(word)
            continue
        written, equals, attached = word.partition("=")
        values = [attached] if equals else []
        takes_rest = not equals and not (engine == "vllm" and _SWITCH.match(written))
        while takes_rest and index < len(rest) and not _is_option(rest[index]):
            values.append(rest[index])
            index += 1
        name, resolved = _canonical(engine, written, version)
        if resolved is not None:
            odd.append(resolved)
        base, dot, key = name.partition(".")
        if dot or base in _JSON_OPTIONS:
            problem = _merge(configs.setdefault(base, {}), key, " ".join(values))
            if problem is not None:
                bad[base] = problem
        options.append(Option(base, tuple(values), written))
    command = Command(
        engine=engine,
        options=tuple(options),
        positionals=tuple(positionals),
        odd=tuple(odd),
        configs=configs,
        bad_json=bad,
    )
    return command, env


_JSON_OPTIONS = (
    "--speculative-config",
    "--compilation-config",
    "--attention-config",
    "--cuda-graph-config",
)


def _is_option(word: str) -> bool:
    return word.startswith("-") and len(word) > 1 and _NUMBER.match(word) is None


def _program(engine: str, words: list[str]) -> tuple[dict[str, str], list[str]]:
    """Variables in front, and the words after the program (and its "serve")."""
    index = program_index(engine, words)
    start = 0 if index is None else index + 1
    if index is None:
        while start < len(words) and ASSIGNMENT.match(words[start]) and engine != "engine":
            start += 1
    env = {}
    for word in words[:start]:
        match = ASSIGNMENT.match(word)
        if match is not None and (engine != "engine" or match[1].isupper()):
            env[match[1]] = match[2]
    rest = words[start:]
    if rest and rest[0] in ("serve", "generate", "bench"):
        rest = rest[1:]
    return env, rest


def _canonical(engine: str, written: str, version: Version | None) -> tuple[str, Resolved | None]:
    """Canonical name, and how it resolved where that needs a word."""
    if engine == "engine":
        return written, None
    base, dot, key = written.partition(".") if engine == "vllm" else (written, "", "")
    aliases = SGLANG_ALIASES
    if engine == "vllm":
        if re.fullmatch(r"-O\d", base):
            return "--compilation-config.mode", None
        aliases = VLLM_ALIASES
        base = aliases.get(base, base)
        if base.startswith("--"):
            base = base.replace("_", "-")
    if not base.startswith("--"):
        return base + dot + key, None
    resolved = resolve_option(engine, base, version)
    if resolved.status == "known":
        return resolved.name + dot + key, None
    return aliases.get(base, base) + dot + key, resolved


def _merge(config: dict[str, Any], key: str, text: str) -> str | None:
    """Put a JSON text, or one dotted value, into ``config``; returns the problem."""
    if key:
        try:
            config[key] = json.loads(text)
        except ValueError:
            config[key] = text
        return None
    try:
        value = json.loads(text)
    except ValueError as error:
        return str(error)
    if isinstance(value, dict):
        config.update(value)
    elif isinstance(value, int):
        config["mode"] = value
    else:
        return f"a JSON object is expected, not {text[:40]}"
    return None
