"""Containers: ``docker run`` lines and the containers of compose or Kubernetes YAML."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from autotune.errors import UserError
from autotune.lint.shell import plain_words

_RUNTIMES = frozenset({"docker", "podman", "nerdctl"})
#: options of ``docker run`` that stand alone; every other takes a value
_SWITCHES = frozenset(
    {
        "-d", "--detach", "-i", "--interactive", "-t", "--tty", "-it", "-ti", "-dit", "-itd", "-id",
        "-td", "--rm", "--privileged", "--init", "--read-only", "-P", "--publish-all", "-q",
        "--quiet", "--no-healthcheck", "--oom-kill-disable", "--help", "--replace",
    }
)  # fmt: skip
#: keys of a container, or of a chart's values, that hold options
_ARGUMENTS = ("args", "extraArgs", "extra_args")
#: an image of a server, its tag "v0.5.9-cu129" or "0.16.0"
_TAG = re.compile(r":v?(\d+\.\d+(?:\.\d+)?(?:\.post\d+)?)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """What a container gets: image, words behind it, environment, shared memory."""

    image: str
    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    env_files: tuple[str, ...] = ()
    #: names handed on from the calling shell (``-e NAME``)
    passed: tuple[str, ...] = ()
    #: how it gets more shared memory than the default: "--ipc=host", "/dev/shm mount"; None: no way
    shared_memory: str | None = None
    #: whether everything that decides about shared memory was seen
    complete: bool = True
    #: GPUs by ``--gpus``: a number, None where all or unsaid
    gpus: int | None = None
    #: index of the image among the words, and of the runtime in front of "run"
    image_index: int = 0
    run_index: int = 0


def image_version(image: str, engine: str) -> str | None:
    """The server's version by its image's tag; None for another image or a tag without one."""
    if engine not in image.lower():
        return None
    match = _TAG.search(image)
    return match[1] if match else None


def container_of(words: Sequence[str]) -> Container | None:
    """The container of a ``docker run`` anywhere at the front of a statement; None without one."""
    place = _run_place(words)
    if place is None:
        return None
    runtime, start = place
    env: dict[str, str] = {}
    files: list[str] = []
    passed: list[str] = []
    shared: str | None = None
    gpus: int | None = None
    entrypoint: tuple[str, ...] = ()
    index = start + 1
    while index < len(words) and words[index].startswith("-"):
        option, equals, value = words[index].partition("=")
        index += 1
        if not equals and option not in _SWITCHES and index < len(words):
            value = words[index]
            index += 1
        if option in ("-e", "--env"):
            name, given, text = value.partition("=")
            if given:
                env[name] = text
            else:
                passed.append(name)
        elif option == "--env-file":
            files.append(value)
        elif option == "--shm-size" or (option == "--ipc" and value == "host"):
            shared = f"{option}={value}"
        elif option in ("-v", "--volume", "--mount", "--tmpfs") and "/dev/shm" in value:
            shared = f"{option} {value}"
        elif option == "--gpus":
            gpus = _gpu_count(value)
        elif option == "--entrypoint":
            entrypoint = (value,)
    image = words[index] if index < len(words) else ""
    return Container(
        image=image, command=(*entrypoint, *words[index + 1 :]), env=env, env_files=tuple(files),
        passed=tuple(passed), shared_memory=shared, gpus=gpus, image_index=index,
        run_index=runtime,
    )  # fmt: skip


def _run_place(words: Sequence[str]) -> tuple[int, int] | None:
    """Indices of "docker" and of its "run"."""
    for index, word in enumerate(words):
        if PurePath(word).name in _RUNTIMES and "run" in words[index + 1 : index + 3]:
            return index, index + 1 + list(words[index + 1 :]).index("run")
    return None


def _gpu_count(value: str) -> int | None:
    """``--gpus 2``, ``--gpus '"device=0,1"'``; None for all."""
    value = value.strip("\"'")
    if value.isdigit():
        return int(value)
    match = re.match(r"device=(.+)", value)
    return len({part for part in match[1].split(",") if part}) if match else None


def containers_in_yaml(text: str) -> list[Container]:
    """Every mapping with args, command or image, in order. Raises ``UserError`` for bad YAML."""
    import yaml

    try:
        documents = list(yaml.safe_load_all(text))
    except yaml.YAMLError as problem:
        where = getattr(problem, "problem_mark", None)
        place = "" if where is None else f" at line {where.line + 1}"
        what = getattr(problem, "problem", None) or problem
        raise UserError(f"--args: this YAML cannot be read{place}: {what}") from None
    return [_yaml_container(one, whole) for one, whole in _mappings(documents, False, False)]


def _mappings(value: Any, whole: bool, host_ipc: bool) -> Iterator[tuple[dict[str, Any], bool]]:
    """(container, whether the pod or service around it was given)."""
    if isinstance(value, list):
        for item in value:
            if isinstance(item, (dict, list)):
                yield from _mappings(item, whole, host_ipc)
    elif isinstance(value, dict):
        host_ipc = host_ipc or value.get("hostIPC") is True
        if _is_container(value):
            yield {**value, "hostIPC": host_ipc}, whole
            return
        if not any(_is_container(item) for item in value.values()) and _loose(value):
            yield {**value, "hostIPC": host_ipc}, False
            return
        inside = whole or "services" in value or "kind" in value
        for item in value.values():
            yield from _mappings(item, inside, host_ipc)


def _is_container(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    words = any(isinstance(value.get(key), (list, str)) for key in ("command", *_ARGUMENTS))
    return words or (
        isinstance(value.get("image"), str) and bool({"env", "environment"} & {*value})
    )


def _loose(value: Mapping[str, Any]) -> bool:
    return isinstance(value.get("image"), str)


def _yaml_container(value: Mapping[str, Any], whole: bool) -> Container:
    words: list[str] = []
    # compose: entrypoint then command; Kubernetes: command then args
    for key in ("entrypoint", "command", *_ARGUMENTS):
        words += _yaml_words(value.get(key))
    env = {**_yaml_env(value.get("environment")), **_yaml_env(value.get("env"))}
    passed = [item for item in _listed(value.get("environment")) if "=" not in str(item)]
    named = [
        str(f.get("path", "")) if isinstance(f, dict) else str(f)
        for f in _listed(value.get("env_file"))
    ]
    sources = [
        f"{kind[:-3]} {source[kind].get('name', '')}"
        for source in _listed(value.get("envFrom"))
        if isinstance(source, dict)
        for kind in ("configMapRef", "secretRef")
        if isinstance(source.get(kind), dict)
    ]
    mounts = [m.get("mountPath") for m in _listed(value.get("volumeMounts")) if isinstance(m, dict)]
    volumes = [str(v) for v in (*_listed(value.get("volumes")), *_listed(value.get("tmpfs")))]
    shared = None
    if value.get("hostIPC") or value.get("ipc") == "host":
        shared = "host IPC"
    elif "shm_size" in value:
        shared = f"shm_size: {value['shm_size']}"
    elif "/dev/shm" in mounts or any("/dev/shm" in volume for volume in volumes):
        shared = "/dev/shm mount"
    return Container(
        image=str(value.get("image") or ""), command=tuple(words), env=env,
        env_files=(*named, *sources), passed=tuple(map(str, passed)), shared_memory=shared,
        complete=whole,
    )  # fmt: skip


def _listed(value: Any) -> list[Any]:
    if isinstance(value, list):
        return value
    return [] if value is None or isinstance(value, dict) else [value]


def _yaml_words(value: Any) -> list[str]:
    if isinstance(value, str):
        return plain_words(value, "--args")
    return [yaml_text(item) for item in _listed(value)]


def yaml_text(value: Any) -> str:
    """A scalar as the container gets it: YAML's true is the word true."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _yaml_env(value: Any) -> dict[str, str]:
    """Compose's mapping or list, Kubernetes' list of name and value; quotes stay as they are."""
    if isinstance(value, dict):
        return {str(name): yaml_text(text) for name, text in value.items() if text is not None}
    found: dict[str, str] = {}
    for item in _listed(value):
        if isinstance(item, dict) and "name" in item:
            if "value" in item:
                found[str(item["name"])] = yaml_text(item["value"])
        elif isinstance(item, str) and "=" in item:
            name, _, text = item.partition("=")
            found[name.strip()] = text
    return found


_YAML_LINE = re.compile(r"^\s*(- )?[\"']?[A-Za-z_]\w*[\"']?:(\s|$)")


def yaml_environment(text: str) -> dict[str, str] | None:
    """An ``env:`` or ``environment:`` block by itself; None for a text that is none."""
    lines = [line for line in text.splitlines() if line.strip() and line.strip()[0] != "#"]
    if not text.lstrip().startswith("{") and not any(_YAML_LINE.match(line) for line in lines):
        return None
    import yaml

    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return None
    if isinstance(value, dict):
        value = value.get("env", value.get("environment", value))
    return _yaml_env(value) or None
