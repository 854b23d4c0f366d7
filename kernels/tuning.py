"""Which configuration a kernel runs with: a tuned one from the cache, else the default.

The cache is one JSON file, GPU name -> op -> shape -> configuration, written by
``python -m kernels.tune`` and only read here. What it lacks may be in the files shipped in
``kernels/configs`` (one a GPU, same form). Nothing is ever tuned while a kernel is in use.
"""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch

Config = Mapping[str, int]
Table = dict[str, dict[str, dict[str, int]]]

#: files shipped with the package, ``<GPU name in lower case with dashes>.json``
SHIPPED = Path(__file__).resolve().parent / "configs"
PATH_VARIABLE = "AUTOTUNE_KERNEL_CONFIGS"


def default_path() -> Path:
    """The cache file: ``$AUTOTUNE_KERNEL_CONFIGS``, else ~/.cache/autotune/kernels.json."""
    named = os.environ.get(PATH_VARIABLE)
    return Path(named) if named else Path.home() / ".cache" / "autotune" / "kernels.json"


def shape_key(shape: Mapping[str, int | str]) -> str:
    """Canonical text of a shape: "H=2048,T=4"."""
    return ",".join(f"{name}={shape[name]}" for name in sorted(shape))


def load(path: Path) -> dict[str, Table]:
    """The whole cache; empty where there is no file. Raises ``ValueError`` naming a broken one."""
    if not path.exists():
        return {}
    try:
        data = json.loads(path.read_text())
        for ops in data.values():
            for shapes in ops.values():
                for config in shapes.values():
                    if not all(type(value) is int for value in config.values()):
                        raise TypeError("a configuration's values must be integers")
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(
            f"kernel configurations in {path} cannot be read ({error}); delete the file or tune "
            "again with `python -m kernels.tune`"
        ) from None
    return data


def save(path: Path, gpu: str, op: str, key: str, config: Config) -> None:
    """Put one tuned configuration into the cache; the file is replaced, never half written."""
    data = load(path)
    data.setdefault(gpu, {}).setdefault(op, {})[key] = dict(config)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps(data, indent=1, sort_keys=True) + "\n")
    temporary.replace(path)
    forget()


@dataclass(slots=True)
class _State:
    forced: dict[str, Config] = field(default_factory=dict)
    last: dict[str, tuple[str, Config, str]] = field(default_factory=dict)


_state = _State()


@contextmanager
def forced(op: str, config: Config) -> Iterator[None]:
    """Within this block ``op`` runs with ``config``, whatever the cache says."""
    previous = dict(_state.forced)
    _state.forced[op] = config
    try:
        yield
    finally:
        _state.forced = previous


@cache
def _cached_table(path: Path, gpu: str) -> Table:
    return load(path).get(gpu, {})


def shipped_path(gpu: str) -> Path:
    """Where the configurations shipped for a GPU are, if there are any."""
    return SHIPPED / ("-".join(re.findall(r"[a-z0-9]+", gpu.lower())) + ".json")


def lookup(gpu: str, op: str, key: str) -> tuple[Config | None, str]:
    """``(configuration, "tuned" | "shipped")`` for a shape; None where neither file serves it.

    A shape that was not tuned takes the configuration of the next larger number of tokens (T) and
    sequences (B) with all else equal: what holds more tokens holds fewer.
    """
    for path, source in ((default_path(), "tuned"), (shipped_path(gpu), "shipped")):
        shapes = _cached_table(path, gpu).get(op, {})
        found = key if key in shapes else _next_larger(tuple(shapes), key)
        if found is not None:
            return shapes[found], source
    return None, ""


@cache
def _next_larger(keys: tuple[str, ...], key: str) -> str | None:
    wanted = dict(part.split("=", 1) for part in key.split(","))
    # one token has kernels of its own
    sizes = ("B",) if wanted.get("T") == "1" else ("T", "B")
    best: tuple[tuple[int, ...], str] | None = None
    for other in keys:
        has = dict(part.split("=", 1) for part in other.split(","))
        if has.keys() != wanted.keys():
            continue
        if any(has[name] != value for name, value in wanted.items() if name not in sizes):
            continue
        size = tuple(int(has[name]) for name in sizes if name in has)
        if any(int(has[name]) < int(wanted[name]) for name in sizes if name in has):
            continue
        if best is None or (size, other) < best:
            best = (size, other)
    return None if best is None else best[1]


@cache
def _gpu_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


def forget() -> None:
    """Read the cache file again at the next use."""
    _cached_table.cache_clear()


def config_for(
    op: str,
    device: torch.device,
    shape: Mapping[str, int | str],
    default: Callable[[], Config],
) -> Config:
    """The configuration ``op`` runs with for ``shape`` on ``device``."""
    key = shape_key(shape)
    config, source = _state.forced.get(op), "forced"
    if config is None and device.type == "cuda":
        config, source = lookup(_gpu_name(device), op, key)
    if config is None:
        config, source = default(), "default"
    _state.last[op] = (key, config, source)
    return config


def last_used(op: str) -> tuple[str, Config, str]:
    """``(shape key, configuration, source)`` of the op's latest call.

    The source is "forced", "tuned", "shipped" or "default".
    """
    return _state.last[op]
