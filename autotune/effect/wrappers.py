"""Programs in front of a command: which hand the environment on, which drop it, which may.

Rules of each program as its manual states them: env(1), sudo(8), docker run, srun(1) --export,
apptainer --cleanenv, systemd-run(1), su(1); others pass on what they have.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from autotune.effect.shell_text import follow_script, follow_shell_text
from autotune.effect.way import ASSIGNMENT, Way


@dataclass(frozen=True, slots=True)
class Keeping:
    """A wrapper that hands everything on: options with a value, words before the command."""

    values: frozenset[str] = frozenset()
    subcommand: str | None = None
    num_words: int = 0


def _keeping(values: str = "", subcommand: str | None = None, num_words: int = 0) -> Keeping:
    return Keeping(frozenset(values.split()), subcommand, num_words)


KEEPING = {
    "numactl": _keeping("-N -m -C -p -i --cpunodebind --membind --physcpubind --interleave"),
    "taskset": _keeping("-c --cpu-list"),
    "nohup": _keeping(), "setsid": _keeping(), "exec": _keeping(), "command": _keeping(),
    "nice": _keeping("-n --adjustment"),
    "ionice": _keeping("-c -n --class --classdata"),
    "chrt": _keeping("-f -r -o -b -i"),
    "time": _keeping("-o -f"),
    "stdbuf": _keeping("-i -o -e"),
    "timeout": _keeping("-k -s --kill-after --signal", num_words=1),
    "strace": _keeping("-o -e -s -p -f"), "ltrace": _keeping("-o -e"),
    "gdb": _keeping("-ex -x"), "valgrind": _keeping(),
    "nsys": _keeping("-o -t -s -f -c -y -d -w -x --output --trace --duration --delay", "profile"),
    "ncu": _keeping("-o -k -c -s --set --kernel-name --launch-count --launch-skip"),
    "py-spy": _keeping("-o -d -r -f --output --duration --rate --format", "record"),
    "perf": _keeping("-o -e -F -g", "record"),
    "uv": _keeping("--with --python -p --project --extra --group --directory", "run"),
    "poetry": _keeping("", "run"), "pipenv": _keeping("", "run"), "pdm": _keeping("", "run"),
    "conda": _keeping("-n -p --name --prefix --cwd", "run"),
    "mamba": _keeping("-n -p --name --prefix --cwd", "run"),
    "micromamba": _keeping("-n -p --name --prefix --cwd", "run"),
    "cgexec": _keeping("-g"), "xargs": _keeping("-n -P -I -d -a -L"),
    "catchsegv": _keeping(), "unshare": _keeping(), "stress": _keeping(),
}  # fmt: skip
_SHELLS = frozenset({"bash", "sh", "dash", "zsh", "ksh"})
_CONTAINERS = frozenset({"docker", "podman", "nerdctl"})
#: start the command in a process that was there before: what it knows is not ours
_DAEMONS = {
    "tmux": "tmux's server keeps the environment that it was started with",
    "screen": "screen may hand the command to a session that is running already",
    "docker-compose": "a compose file hands on what it names",
}
_ELSEWHERE = frozenset({"ssh", "kubectl", "crontab", "pdsh", "clush", "gcloud", "oc", "sky"})
_CONTAINER_VALUES = frozenset(
    {"-e", "--env", "-v", "--volume", "--gpus", "--name", "-p", "--publish", "--ipc", "--network",
     "--shm-size", "-w", "--workdir", "--entrypoint", "--env-file", "--ulimit", "--device",
     "--mount", "-u", "--user", "--net", "--cap-add", "--security-opt", "--runtime", "--pid",
     "--hostname", "-h", "--label", "-l", "--cpuset-cpus", "--cpuset-mems", "-m", "--memory",
     "--restart", "--add-host", "--tmpfs", "--log-driver", "--log-opt", "--platform"}
)  # fmt: skip


def peel(way: Way) -> None:
    """Take wrappers off the front of the command, one at a time."""
    for _ in range(64):
        if not way.words or not _peel_one(way):
            return


def _peel_one(way: Way) -> bool:
    word = way.words[0]
    match = ASSIGNMENT.match(word)
    name = Path(word).name
    if match is not None:
        way.set(match[1], match[2], "the command line")
        way.words = way.words[1:]
        return True
    special: Callable[[Way], None] | None = {
        "env": _env, "sudo": _sudo, "doas": _sudo, "srun": _srun, "su": _su, "runuser": _su,
        "ray": _ray, "systemd-run": _systemd, "apptainer": _apptainer, "singularity": _apptainer,
    }.get(name)  # fmt: skip
    if special is not None:
        special(way)
    elif name in _CONTAINERS:
        _container(way, name)
    elif name in _DAEMONS:
        way.unsure = way.unsure or _DAEMONS[name]
        way.steps.append(name)
        way.words = ()
    elif name in _ELSEWHERE:
        _elsewhere(way, name)
    elif name in _SHELLS and len(way.words) > 1:
        return _shell(way, name)
    elif name in KEEPING:
        way.steps.append(name)
        way.words = _after_options(way.words[1:], KEEPING[name])
    elif follow_script(way, word):
        way.steps.append(name)
    else:
        return False
    return True


def _after_options(words: tuple[str, ...], wrapper: Keeping) -> tuple[str, ...]:
    """From the first word of the command on."""
    index, left = 0, wrapper.num_words
    if wrapper.subcommand is not None and words[:1] == (wrapper.subcommand,):
        index = 1
    while index < len(words):
        word = words[index]
        if word in ("--", "--args"):
            return words[index + 1 :]
        if word.startswith("-"):
            index += 2 if word in wrapper.values else 1
        elif re.fullmatch(r"(0x)?[\d,a-fA-F-]+", word) and re.search(r"\d", word):
            # masks, lists of processors, priorities, durations in seconds
            left -= 1
            index += 1
        elif left > 0:
            left -= 1
            index += 1
        else:
            return words[index:]
    return ()


def _ray(way: Way) -> None:
    """Ray's workers descend from its daemon: only a job's runtime environment is sure."""
    words = list(way.words[1:])
    way.unsure = (
        "Ray's workers are children of its daemon, and only what the job or the server copies "
        "reaches them"
    )
    command: list[str] = []
    if "--" in words:
        index = words.index("--")
        words, command = words[:index], words[index + 1 :]
    for index, word in enumerate(words):
        option, equals, value = word.partition("=")
        if option == "--runtime-env-json":
            text = value if equals else "".join(words[index + 1 : index + 2])
            for name, given in _env_vars(text).items():
                way.set(name, given, "ray --runtime-env-json")
                way.sure.add(name)
    way.steps.append("Ray")
    way.words = tuple(command)


def _env_vars(text: str) -> dict[str, str]:
    try:
        found = json.loads(text)["env_vars"]
    except (ValueError, TypeError, KeyError):
        return {}
    return {str(n): str(v) for n, v in found.items()} if isinstance(found, dict) else {}


def _elsewhere(way: Way, name: str) -> None:
    way.drop(name, kept={})
    way.steps.append(name)
    way.words = ()
    way.notes.append(f"{name} starts the command elsewhere: look at it there")


def _env(way: Way) -> None:
    words = list(way.words[1:])
    while words:
        word = words[0]
        match = ASSIGNMENT.match(word)
        if word in ("-i", "-", "--ignore-environment"):
            way.drop("env -i", kept={})
        elif word in ("-u", "--unset") and len(words) > 1:
            way.unset(words.pop(1), "env -u")
        elif word.startswith("--unset="):
            way.unset(word.partition("=")[2], "env -u")
        elif word in ("-C", "--chdir") and len(words) > 1:
            words.pop(1)
        elif word in ("-S", "--split-string") and len(words) > 1:
            words[1:2] = words[1].split()
        elif match is not None:
            way.set(match[1], match[2], "the command line")
        elif not word.startswith("-"):
            break
        words.pop(0)
    way.steps.append("env")
    way.words = tuple(words)


def _sudo(way: Way) -> None:
    name = Path(way.words[0]).name
    words = list(way.words[1:])
    preserve: set[str] | None = set()
    given: dict[str, str] = {}
    while words and (words[0].startswith("-") or ASSIGNMENT.match(words[0])):
        word = words.pop(0)
        match = ASSIGNMENT.match(word)
        if word in ("-E", "--preserve-env"):
            preserve = None
        elif word.startswith("--preserve-env=") and preserve is not None:
            preserve |= set(word.partition("=")[2].split(","))
        elif word in ("-u", "-g", "-C", "-D", "-h", "-p", "--user", "--group") and words:
            words.pop(0)
        elif match is not None and not word.startswith("-"):
            given[match[1]] = match[2]
    if preserve is not None:
        kept = {variable: value for variable, value in way.env.items() if variable in preserve}
        way.drop(f"{name} (no -E)", kept=kept)
    for variable, value in given.items():
        way.set(variable, value, "the command line")
    way.steps.append(name)
    way.words = tuple(words)


def _su(way: Way) -> None:
    """A login shell starts afresh; else the environment stays. ``-c`` holds the command."""
    name = Path(way.words[0]).name
    words = way.words[1:]
    if any(word in ("-", "-l", "--login") for word in words):
        way.drop(f"{name} - (a login shell)", kept={})
    way.steps.append(name)
    index = next((i for i, word in enumerate(words) if word in ("-c", "--command")), None)
    way.words = ()
    if index is not None and index + 1 < len(words):
        follow_shell_text(way, words[index + 1], name)


def _srun(way: Way) -> None:
    """``--export``: ALL is the default, NONE drops, a list without ALL keeps only its names."""
    words = list(way.words[1:])
    while words and words[0].startswith("-"):
        word = words.pop(0)
        option, equals, value = word.partition("=")
        if option == "--export":
            value = value if equals else words.pop(0) if words else ""
            names = [part for part in value.split(",") if part]
            given = dict(part.split("=", 1) for part in names if "=" in part)
            if "ALL" not in names:
                kept = {name: way.env[name] for name in names if name in way.env}
                way.drop(f"srun --export={value}", kept={**kept, **given})
            for name, text in given.items():
                way.set(name, text, "srun --export")
        elif not equals and option in ("-n", "-N", "-c", "-p", "-w", "-t", "-J", "-A", "-G", "-o"):
            words[:1] = []
    way.steps.append("srun")
    way.words = tuple(words)


def _systemd(way: Way) -> None:
    """A service starts from systemd's environment; a scope from ours."""
    words = list(way.words[1:])
    given: dict[str, str] = {}
    scope = False
    while words and words[0].startswith("-"):
        word = words.pop(0)
        option, equals, value = word.partition("=")
        scope = scope or option == "--scope"
        if option in ("-E", "--setenv", "-p", "--property", "-u", "--unit", "--slice", "--uid"):
            value = value if equals else words.pop(0) if words else ""
        if option in ("-E", "--setenv"):
            name, has_value, text = value.partition("=")
            given[name] = text if has_value else way.env.get(name, "")
    if not scope:
        way.drop("systemd-run (a service starts from systemd's environment)", kept=given)
    way.env.update(given)
    way.steps.append("systemd-run")
    way.words = tuple(words)


def _apptainer(way: Way) -> None:
    """Hands all on, unless told to clean or contain it; APPTAINERENV_X and --env set X."""
    name = Path(way.words[0]).name
    words = list(way.words[2:])
    given: dict[str, str] = {}
    for prefix in ("SINGULARITYENV_", "APPTAINERENV_"):
        given |= {n.removeprefix(prefix): v for n, v in way.env.items() if n.startswith(prefix)}
    clean: str | None = None
    while words and words[0].startswith("-"):
        word = words.pop(0)
        option, equals, value = word.partition("=")
        if option in ("--cleanenv", "-e", "--containall", "-C"):
            clean = f"{name} {option}"
        elif option in ("--env", "-B", "--bind", "--env-file", "-W", "--pwd", "-H", "--home"):
            value = value if equals else words.pop(0) if words else ""
        if option == "--env":
            given |= dict(part.split("=", 1) for part in value.split(",") if "=" in part)
        elif option == "--env-file":
            way.notes.append(f"{name} also reads variables from {value}")
    if clean is not None:
        way.drop(clean, kept=given)
    for variable, text in given.items():
        way.set(variable, text, f"{name} --env")
    way.steps.append(name)
    # the image, and behind it the command
    way.words = tuple(words[1:])


def _container(way: Way, name: str) -> None:
    """Only variables named by -e reach a container; the image is the first bare word after."""
    verb = next((word for word in way.words[1:] if not word.startswith("-")), "")
    if verb == "compose":
        way.unsure = way.unsure or "a compose file hands on what it names"
        way.steps.append(f"{name} compose")
        way.words = ()
        return
    if verb not in ("run", "exec", "create", "container"):
        _elsewhere(way, name)
        return
    words = list(way.words[way.words.index(verb) + 1 :])
    if verb == "container" and words:
        verb = words.pop(0)
    kept: dict[str, str] = {}
    while words and words[0].startswith("-"):
        word = words.pop(0)
        option, equals, attached = word.partition("=")
        value = attached if equals else words.pop(0) if word in _CONTAINER_VALUES and words else ""
        if option in ("-e", "--env"):
            variable, given, text = value.partition("=")
            if given:
                kept[variable] = text
            elif variable in way.env:
                kept[variable] = way.env[variable]
        if option == "--env-file":
            way.notes.append(f"{name} also reads variables from {value}")
    way.drop(f"{name} {verb} (no -e NAME)", kept=kept)
    way.env.update(kept)
    way.steps.append(f"{name} {verb}")
    # the image or container, and behind it the command
    way.words = tuple(words[1:])


def _shell(way: Way, name: str) -> bool:
    """``bash -c TEXT`` and ``bash FILE``."""
    words = way.words[1:]
    for index, word in enumerate(words):
        if word.startswith("-") and word.endswith("c") and index + 1 < len(words):
            way.steps.append(name)
            way.words = ()
            follow_shell_text(way, words[index + 1], f"{name} {word}")
            return True
        if not word.startswith("-"):
            way.words = words[index:]
            if follow_script(way, word):
                way.steps.append(f"{name} {Path(word).name}")
                return True
            way.words = (name, *words)
            return False
    return False
