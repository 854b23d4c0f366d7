"""The way of a variable from the shell to the workers of a command line, without running it.

Wrappers (sudo, docker, env -i, ...) may drop it, the server may overwrite it, a launcher that
starts workers from a daemon or a fork server never hands it on, and NCCL's own files may add it.
"""

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from autotune.effect.config_files import FileSetting, file_settings
from autotune.effect.server_sets import overwritten, server_environment
from autotune.effect.way import ASSIGNMENT, Way
from autotune.effect.wrappers import peel
from autotune.errors import UserError
from autotune.lint.command import Command, parse_command

#: steps behind which other programs are installed
_ELSEWHERE = ("docker", "podman", "nerdctl", "apptainer", "singularity", "ssh", "kubectl")


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
    #: why nothing certain can be said of the workers' environment, one clause
    unsure: str | None = None
    #: names that arrive all the same
    sure: frozenset[str] = frozenset()


def read_launch(
    words: Sequence[str], environ: Mapping[str, str] | None = None, system_file: Path | None = None
) -> Launch:
    """Follow a command line. Raises ``UserError`` for an empty one."""
    if not words:
        raise UserError("no command after --; write: autotune env check -- CMD ARGS...")
    shell = dict(os.environ if environ is None else environ)
    way = Way(tuple(words), dict(shell))
    peel(way)
    asked = {**shell, **way.env, **way.replaced, **_assignments(words)}
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
        way.steps.append("Ray")
        way.unsure = way.unsure or (
            "Ray's workers are children of its daemon, and only what the server copies reaches them"
        )
    if method == "forkserver":
        way.notes.append("a fork server keeps the environment of the moment it started")
    if engine in ("sglang", "vllm") and env.get("SPT_NOENV") in (None, "", "0"):
        way.notes.append(
            "workers blank their /proc/<pid>/environ (setproctitle): start with SPT_NOENV=1 to look"
        )
    here = way.words and not any(step.split()[0] in _ELSEWHERE for step in way.steps)
    if here and shutil.which(way.words[0]) is None and not Path(way.words[0]).exists():
        way.notes.append(f"{way.words[0]} is not found on this host")
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
        steps=(*way.steps, *([engine or Path(way.words[0]).name] if way.words else []), method),
        notes=(*way.notes, *file_notes),
        unsure=way.unsure,
        sure=frozenset(way.sure),
    )


def _assignments(words: Sequence[str]) -> dict[str, str]:
    """Variables set anywhere on the line: NAME=VALUE, env NAME=VALUE, -e NAME=VALUE."""
    found = {}
    for word in words:
        match = ASSIGNMENT.match(word)
        if match is not None and match[1].isupper():
            found[match[1]] = match[2]
    return found


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
    launchers = ("torchrun", "mpirun", "mpiexec", "srun", "accelerate", "deepspeed", "horovodrun")
    if first in launchers or any(word.startswith("torch.distributed.") for word in words):
        return "exec"
    return "unknown"
