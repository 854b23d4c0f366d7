"""The way of a variable from the shell to the workers of a command line, without running it.

Wrappers (sudo, docker, env -i, ...) may drop it, the server may overwrite it, a launcher that
starts workers from a daemon or a fork server never hands it on, and NCCL's own files may add it.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from autotune.effect.config_files import FileSetting, file_settings
from autotune.effect.server_sets import overwritten, server_environment
from autotune.errors import UserError
from autotune.lint.command import Command, parse_command

_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
#: wrappers that hand the environment on
_KEEPING = frozenset(
    {"numactl", "taskset", "nohup", "nice", "ionice", "time", "stdbuf", "setsid", "chrt", "exec"}
)


@dataclass
class Way:
    """What is known of a launch: the environment at its end, and where names were lost."""

    words: tuple[str, ...]
    env: dict[str, str]
    #: name -> wrapper that dropped or replaced it
    lost: dict[str, str] = field(default_factory=dict)
    steps: list[str] = field(default_factory=lambda: ["shell"])
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A command line, taken apart."""

    engine: str | None
    command: Command | None
    #: how workers are started: spawn, fork, forkserver, ray, exec (one process each), unknown
    start_method: str
    #: what the user asked for, in the shell and on the command line
    asked: Mapping[str, str]
    #: what the workers get, files apart
    env: Mapping[str, str]
    #: name -> (where it was lost or changed, one clause)
    lost: Mapping[str, str]
    files: Mapping[str, FileSetting]
    steps: tuple[str, ...]
    notes: tuple[str, ...]


def read_launch(
    words: Sequence[str], environ: Mapping[str, str] | None = None, system_file: Path | None = None
) -> Launch:
    """Follow a command line. Raises ``UserError`` for an empty one."""
    if not words:
        raise UserError("no command after --; write: autotune env check -- CMD ARGS...")
    shell = dict(os.environ if environ is None else environ)
    way = Way(tuple(words), shell)
    _wrappers(way)
    asked = {**shell, **way.env, **{n: shell.get(n, "") for n in way.lost if n in shell}}
    asked |= _assignments(words)
    engine = _engine(way.words)
    command = None
    lost = dict(way.lost)
    env = dict(way.env)
    if engine in ("sglang", "vllm"):
        command, _ = parse_command(engine, way.words, None)
        for change in overwritten(engine, command, env):
            lost[change.name] = f"overwritten by the server: {change.reason}, to {change.becomes}"
        env |= server_environment(engine, command, env)
    method = _start_method(engine, command, env, way.words)
    if method == "ray":
        way.notes.append(
            "Ray's workers are children of its daemon: only what the server copies reaches them"
        )
    if method == "forkserver":
        way.notes.append("a fork server keeps the environment of the moment it started")
    if engine in ("sglang", "vllm") and env.get("SPT_NOENV") in (None, "", "0"):
        way.notes.append(
            "workers blank their /proc/<pid>/environ (setproctitle): start with SPT_NOENV=1 to look"
        )
    conf_env = {**env} if system_file is None else {**env, "_": ""}
    files, file_notes = (
        file_settings(conf_env) if system_file is None else file_settings(conf_env, system_file)
    )
    return Launch(
        engine=engine,
        command=command,
        start_method=method,
        asked=asked,
        env=env,
        lost=lost,
        files=files,
        steps=(*way.steps, engine or Path(way.words[0]).name if way.words else "?", method),
        notes=(*way.notes, *file_notes),
    )


def _assignments(words: Sequence[str]) -> dict[str, str]:
    """Variables set anywhere on the line: NAME=VALUE, env NAME=VALUE, -e NAME=VALUE."""
    found = {}
    for word in words:
        match = _ASSIGNMENT.match(word)
        if match is not None and match[1].isupper():
            found[match[1]] = match[2]
    return found


def _wrappers(way: Way) -> None:
    """Peel wrappers off the front of the command, one at a time."""
    while way.words:
        word = way.words[0]
        match = _ASSIGNMENT.match(word)
        name = Path(word).name
        if match is not None:
            way.env[match[1]] = match[2]
            way.lost.pop(match[1], None)
            way.words = way.words[1:]
        elif name == "env":
            _env(way)
        elif name == "sudo":
            _sudo(way)
        elif name in ("docker", "podman", "nerdctl") and "run" in way.words[1:3]:
            _container(way, name)
        elif name in ("ssh", "systemd-run", "kubectl", "crontab"):
            _drop(way, name, kept={})
            way.words = ()
            way.notes.append(f"{name} starts the command elsewhere: look at it there")
        elif name in _KEEPING:
            way.steps.append(name)
            way.words = _after_options(way.words[1:])
        else:
            return


def _after_options(words: tuple[str, ...]) -> tuple[str, ...]:
    """Without the options of a wrapper: up to the first word that is a program."""
    for index, word in enumerate(words):
        if word.startswith("-") or re.fullmatch(r"[\d,xXa-fA-F-]+", word):
            continue
        return words[index:]
    return ()


def _env(way: Way) -> None:
    words = list(way.words[1:])
    while words:
        word = words[0]
        match = _ASSIGNMENT.match(word)
        if word in ("-i", "-", "--ignore-environment"):
            _drop(way, "env -i", kept={})
        elif word in ("-u", "--unset") and len(words) > 1:
            if words[1] in way.env:
                way.lost[words[1]] = "env -u"
                del way.env[words[1]]
            words.pop(0)
        elif match is not None:
            way.env[match[1]] = match[2]
            way.lost.pop(match[1], None)
        elif not word.startswith("-"):
            break
        words.pop(0)
    way.steps.append("env")
    way.words = tuple(words)


def _sudo(way: Way) -> None:
    words = list(way.words[1:])
    preserve: set[str] | None = set()
    while words and (words[0].startswith("-") or _ASSIGNMENT.match(words[0])):
        word = words.pop(0)
        match = _ASSIGNMENT.match(word)
        if word in ("-E", "--preserve-env"):
            preserve = None
        elif word.startswith("--preserve-env=") and preserve is not None:
            preserve |= set(word.partition("=")[2].split(","))
        elif word in ("-u", "-g", "--user", "--group") and words:
            words.pop(0)
        elif match is not None and not word.startswith("-"):
            way.env[match[1]] = match[2]
            if preserve is not None:
                preserve.add(match[1])
    if preserve is not None:
        kept = {name: value for name, value in way.env.items() if name in preserve}
        _drop(way, "sudo (no -E)", kept=kept)
    way.steps.append("sudo")
    way.words = tuple(words)


def _container(way: Way, name: str) -> None:
    """Only variables named by -e reach a container; the image is the first bare word after."""
    words = list(way.words[way.words.index("run") + 1 :])
    kept: dict[str, str] = {}
    with_value = {"-e", "--env", "-v", "--volume", "--gpus", "--name", "-p", "--ipc", "--network",
                  "--shm-size", "-w", "--entrypoint", "--env-file", "--ulimit", "--device",
                  "--mount", "-u", "--net", "--cap-add", "--security-opt", "--runtime"}  # fmt: skip
    while words and words[0].startswith("-"):
        word = words.pop(0)
        option, equals, attached = word.partition("=")
        value = attached if equals else words.pop(0) if word in with_value and words else ""
        if option in ("-e", "--env"):
            variable, given, text = value.partition("=")
            if given:
                kept[variable] = text
            elif variable in way.env:
                kept[variable] = way.env[variable]
        if option == "--env-file":
            way.notes.append(f"{name} also reads variables from {value}")
    _drop(way, f"{name} run (no -e NAME)", kept=kept)
    way.env.update(kept)
    way.steps.append(f"{name} run")
    # the image, and behind it the command
    way.words = tuple(words[1:])


def _drop(way: Way, wrapper: str, kept: Mapping[str, str]) -> None:
    for name in way.env:
        if name not in kept:
            way.lost.setdefault(name, wrapper)
    way.env = dict(kept)


def _engine(words: Sequence[str]) -> str | None:
    text = " ".join(words)
    if "sglang" in text.split("--")[0] or "sglang.launch_server" in text:
        return "sglang"
    if any(Path(word).name == "vllm" or word.startswith("vllm.entrypoints") for word in words):
        return "vllm"
    return None


def _start_method(
    engine: str | None, command: Command | None, env: Mapping[str, str], words: Sequence[str]
) -> str:
    if engine == "sglang":
        return "spawn"
    if engine == "vllm" and command is not None:
        if command.text("--distributed-executor-backend") == "ray":
            return "ray"
        if env.get("VLLM_WORKER_MULTIPROC_METHOD") == "spawn" or command.has("--numa-bind"):
            return "spawn"
        return env.get("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    first = Path(words[0]).name if words else ""
    if first in ("torchrun", "mpirun", "mpiexec", "srun"):
        return "exec"
    if first == "ray":
        return "ray"
    return "unknown"
