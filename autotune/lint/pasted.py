"""What people paste, brought into one form: the server's words, its environment, its version.

Takes options alone, shell lines and scripts, ``docker run``, a docker-compose or Kubernetes YAML, a
systemd unit, a Dockerfile, and a JSON list of words.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Any

from autotune.errors import UserError
from autotune.lint.containers import Container, container_of, containers_in_yaml, image_version
from autotune.lint.programs import is_client, program_index, starts_server
from autotune.lint.python_calls import read_python
from autotune.lint.shell import ASSIGNMENT, Shell, Statement, plain_words, statements

_SHELLS = frozenset({"bash", "sh", "zsh", "dash"})
#: words in front of a program that are no program themselves
_FRONT = frozenset(
    {
        "sudo", "env", "nohup", "numactl", "taskset", "nice", "ionice", "time", "stdbuf", "setsid",
        "chrt", "exec", "timeout", "python", "python3", "uv", "uvx", "poetry", "pixi", "conda",
        "micromamba", "run", "srun", "-m", "torchrun", "accelerate", "mpirun", "ray", "docker",
    }
)  # fmt: skip
_YAML_KEY = re.compile(
    r"""^\s*(-\s+)?["']?(args|extraArgs|extra_args|command|image|containers|services|"""
    r"""environment|env|apiVersion)"""
    r"""["']?\s*:(\s|$)""",
    re.MULTILINE,
)
_UNIT = re.compile(r"^\s*ExecStart\s*=", re.MULTILINE)
_DOCKERFILE = re.compile(r"^\s*(ENTRYPOINT|CMD)\s", re.MULTILINE)
_DOCKERFILE_FROM = re.compile(r"^\s*FROM\s+(\S+)", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pasted:
    """The server's command line, wrappers included, and what came with it."""

    words: tuple[str, ...] = ()
    #: variables set beside the words: exports above, a unit's Environment=
    env: Mapping[str, str] = field(default_factory=dict)
    #: variables that a script sets without exporting them
    not_exported: Mapping[str, str] = field(default_factory=dict)
    #: files that add variables and were not given
    files: tuple[str, ...] = ()
    #: the server's version by the tag of its image
    version: str | None = None
    #: the container that it runs in, None outside of one
    container: Container | None = None
    #: program in front of the options that is no entry point known here
    program: str | None = None
    num_servers: int = 1
    #: variables that a Python text sets after the first communicator was made
    late: Mapping[str, str] = field(default_factory=dict)


def read_pasted(engine: str, text: str, outer: Mapping[str, str]) -> Pasted:
    """Take a text apart; ``outer`` is the calling shell's environment.

    Raises ``UserError`` for an open quote, YAML that cannot be read, or a client's command line.
    """
    if engine == "engine":
        # knob=value words are no shell assignments here
        return Pasted(words=tuple(plain_words(text, "--args")))
    stripped = text.strip()
    if stripped.startswith("["):
        words = _json_words(stripped)
        if words is not None:
            return _of_words(engine, words, {}, {})
    python = read_python(text)
    if python is not None:
        return Pasted(words=python.words, env=python.env, late=python.late)
    if _UNIT.search(text):
        return _unit(engine, text)
    if "\n" in stripped and _YAML_KEY.search(text):
        return _yaml(engine, text)
    if _DOCKERFILE.search(text) and "\n" in stripped:
        return _dockerfile(engine, text)
    return _script(engine, text, outer)


def _json_words(text: str) -> list[str] | None:
    try:
        values = json.loads(text)
    except ValueError:
        return None
    if isinstance(values, list) and all(isinstance(value, str) for value in values):
        return values
    return None


def _script(engine: str, text: str, outer: Mapping[str, str]) -> Pasted:
    """Shell text: the first statement that starts a server, else the one with options."""
    shell = Shell(exported=dict(outer))
    found = list(_flattened(engine, statements(text, shell, "--args"), shell))
    if not found:
        return Pasted(env=_new(shell.exported, outer), files=tuple(shell.sourced))
    servers = [s for s in found if starts_server(engine, s.words)]
    if not servers and any(is_client(engine, s.words) for s in found):
        raise UserError(
            "--args: this is a client or a benchmark, which starts no server; give the server's "
            "own command line"
        )
    chosen = servers or [s for s in found if any(w.startswith("-") for w in s.words)] or found
    first = chosen[0]
    pasted = _of_words(engine, first.words, _new(first.exported, outer), first.local)
    return replace(pasted, files=(*shell.sourced, *pasted.files), num_servers=max(len(servers), 1))


def _flattened(engine: str, found: Any, shell: Shell) -> Any:
    """Statements, with those inside ``bash -c "…"`` in place of the call."""
    for statement in found:
        inner = _inner_script(statement.words) or _quoted_command(engine, statement.words)
        if inner is None:
            yield statement
            continue
        front = statement.words[: len(statement.words) - inner[1]]
        own = Shell(exported=dict(statement.exported))
        for one in statements(inner[0], own, "--args"):
            # a container or wrapper in front still counts
            yield Statement((*front, *one.words), one.exported, one.local)
        shell.sourced += own.sourced


def _inner_script(words: Sequence[str]) -> tuple[str, int] | None:
    """The script of ``bash -c SCRIPT`` and the number of words it and its call take."""
    for index, word in enumerate(words[:-1]):
        if PurePath(word).name in _SHELLS and re.fullmatch(r"-[a-z]*c", words[index + 1]):
            script = words[index + 2 : index + 3]
            return (script[0], len(words) - index) if script else None
    return None


def _quoted_command(engine: str, words: Sequence[str]) -> tuple[str, int] | None:
    """A server's line quoted as one word of tmux, ssh, screen, watch, ...; as ``_inner_script``."""
    for index, word in enumerate(words):
        if not re.search(r"\s", word) or "{" in word:
            continue
        own = (plain_words(part, "--args") for part in re.split(r"&&|;|\n", word))
        if any(starts_server(engine, part) for part in own):
            return word, len(words) - index
    return None


def _of_words(
    engine: str, words: Sequence[str], env: Mapping[str, str], local: Mapping[str, str]
) -> Pasted:
    """One statement, its container taken off where there is one."""
    container = container_of(words)
    if container is None:
        return Pasted(
            words=tuple(words), env=env, not_exported=_of_interest(local),
            program=_odd_program(engine, words),
        )  # fmt: skip
    inside = container.command
    return Pasted(
        words=tuple(words),
        env=env,
        files=container.env_files,
        version=image_version(container.image, engine),
        container=container,
        program=_odd_program(engine, inside),
    )


def _yaml(engine: str, text: str) -> Pasted:
    """Compose or Kubernetes: the container whose image or words name the server."""
    found = containers_in_yaml(text)
    if not found:
        raise UserError(
            "--args: no container with args, command or image in this YAML; give the server's "
            "command line"
        )
    naming = [
        one for one in found
        if engine in one.image.lower() or starts_server(engine, one.command)
    ]  # fmt: skip
    one = (naming or found)[0]
    words, local = one.command, {}
    inner = _inner_script(words)
    env: dict[str, str] = {}
    if inner is not None:
        script = _script(engine, inner[0], one.env)
        words, local, env = script.words, dict(script.not_exported), dict(script.env)
    return Pasted(
        words=tuple(words), env=env, not_exported=local, files=one.env_files,
        version=image_version(one.image, engine), container=one,
        program=_odd_program(engine, words), num_servers=max(len(naming), 1),
    )  # fmt: skip


def _unit(engine: str, text: str) -> Pasted:
    """A systemd unit: ExecStart with Environment= and EnvironmentFile=."""
    env: dict[str, str] = {}
    files: list[str] = []
    line = ""
    for row in text.replace("\\\n", " ").splitlines():
        key, equals, value = row.strip().partition("=")
        if not equals or row.lstrip().startswith(("#", ";")):
            continue
        if key.strip() == "Environment":
            env |= dict(_unit_assignments(value))
        elif key.strip() == "EnvironmentFile":
            files.append(value.strip().lstrip("-"))
        elif key.strip() == "ExecStart":
            line = value.strip().lstrip("@-:+!")
    pasted = _script(engine, line, env)
    return replace(pasted, env={**env, **pasted.env}, files=(*files, *pasted.files))


def _unit_assignments(text: str) -> list[tuple[str, str]]:
    """``"A=1" "B=x y" C=3`` of one Environment= line."""
    quoted = re.findall(r'"([^"]*)"|\'([^\']*)\'|(\S+)', text)
    words = ["".join(parts) for parts in quoted]
    return [(m[1], m[2]) for word in words if (m := ASSIGNMENT.match(word))]


def _dockerfile(engine: str, text: str) -> Pasted:
    """ENV, ENTRYPOINT and CMD of a Dockerfile."""
    env: dict[str, str] = {}
    parts: dict[str, list[str]] = {}
    for row in text.replace("\\\n", " ").splitlines():
        key, _, value = row.strip().partition(" ")
        if key.upper() == "ENV":
            pairs = _unit_assignments(value)
            name, _, rest = value.strip().partition(" ")
            env |= dict(pairs) if pairs else {name: rest.strip()}
        elif key.upper() in ("ENTRYPOINT", "CMD"):
            parts[key.upper()] = _json_words(value.strip()) or plain_words(value, "--args")
    words = parts.get("ENTRYPOINT", []) + parts.get("CMD", [])
    base = _DOCKERFILE_FROM.search(text)
    return Pasted(
        words=tuple(words), env=env, program=_odd_program(engine, words),
        version=image_version(base[1], engine) if base else None,
    )  # fmt: skip


def _odd_program(engine: str, words: Sequence[str]) -> str | None:
    """A script or launcher in front of the options that is not the server's own entry point."""
    if program_index(engine, words) is not None:
        return None
    for word in words:
        if word.startswith("-") and word != "-m":
            return None
        name = PurePath(word).name
        if re.search(r"\.(py|sh)$", name) or name in ("torchrun", "accelerate", "deepspeed"):
            return name
        if ASSIGNMENT.match(word) is None and name not in _FRONT:
            return None
    return None


def _new(exported: Mapping[str, str], outer: Mapping[str, str]) -> dict[str, str]:
    """What the text itself exports."""
    return {name: value for name, value in exported.items() if outer.get(name) != value}


def _of_interest(local: Mapping[str, str]) -> dict[str, str]:
    prefixes = ("NCCL_", "CUDA_", "SGLANG_", "SGL_", "VLLM_", "TORCH_", "PYTORCH_", "SPT_")
    return {name: value for name, value in local.items() if name.startswith(prefixes)}
