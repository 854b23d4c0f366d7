"""Launch configs from mappings and files; a mistake in one is a line with place and way out."""

from collections.abc import Hashable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from engine.config import (
    Collectives,
    CudaGraph,
    DraftSpec,
    Host,
    LaunchConfig,
    Nccl,
    ScheduleEntry,
    Schema,
    SpeculationConfig,
    TargetSpec,
)
from engine.errors import EngineError, invalid
from engine.host import machine_fingerprint

#: schema below a key
_BELOW: dict[str, type[Schema]] = {
    "target": TargetSpec,
    "draft": DraftSpec,
    "collectives": Collectives,
    "nccl": Nccl,
    "cuda_graph": CudaGraph,
    "host": Host,
    "schedule": ScheduleEntry,
    "speculation": SpeculationConfig,
}
_MAX_PROBLEMS = 3


def parse_config(data: Mapping[str, Any], *, allow_other_machine: bool = False) -> LaunchConfig:
    """Build from a mapping: a launch config, or a whole best-config document around one.

    Raises ``EngineError`` (invalid) naming the key, or naming both machines when the document was
    made on another one.
    """
    block = data.get("engine", data)
    if not isinstance(block, Mapping):
        raise invalid(f"engine: must be a mapping, got {block!r}")
    if "engine" not in data and "target" not in data:
        found = ", ".join(map(str, data)) or "nothing"
        raise invalid(f"neither an engine: block nor a launch config (target: ...); found: {found}")
    try:
        config = LaunchConfig.model_validate(dict(block))
    except ValidationError as error:
        raise invalid(_one_line(error)) from None
    made_on = config.machine_fingerprint or _document_fingerprint(data)
    if made_on is not None and not allow_other_machine and made_on != machine_fingerprint():
        if made_on.startswith("sim:"):
            raise invalid(
                f"machine_fingerprint {made_on!r}: this file holds simulated measurements, not "
                "those of a real machine; start with --allow-other-machine to use it all the same"
            )
        raise invalid(
            f"machine_fingerprint {made_on!r} is another machine than this one "
            f"({machine_fingerprint()!r}): its measurements do not hold here; "
            "start with --allow-other-machine to use it all the same"
        )
    return config


def load_config(path: Path, *, allow_other_machine: bool = False) -> LaunchConfig:
    """Read a YAML file; relative paths in it start at its folder, else here."""
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except EngineError as error:
        raise invalid(f"{path}: {error.message}") from None
    except OSError as error:
        raise invalid(f"{path}: {error.strerror or error}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise invalid(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise invalid(f"{path}: not YAML: nested too deeply") from None
    if not isinstance(data, Mapping):
        raise invalid(f"{path}: must be a mapping with the engine's settings")
    try:
        config = parse_config(data, allow_other_machine=allow_other_machine)
    except EngineError as error:
        raise invalid(f"{path}: {error.message}") from None
    return _rebased(config, path.resolve().parent)


class _Loader(yaml.SafeLoader):
    """A key given twice is a mistake: YAML would take the last one without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: dict[str, int] = {}
        for key, _ in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if name in seen and key.tag != "tag:yaml.org,2002:merge":
                raise invalid(f"line {line}: {name} is given twice (also in line {seen[name]})")
            seen[name] = line
        return super().construct_mapping(node, deep)


def _document_fingerprint(data: Mapping[str, Any]) -> str | None:
    for place in (data, data.get("evidence"), data.get("machine")):
        if isinstance(place, Mapping):
            found = place.get("machine_fingerprint") or place.get("fingerprint")
            if isinstance(found, str):
                return found
    return None


def _rebased(config: LaunchConfig, folder: Path) -> LaunchConfig:
    changes: dict[str, Any] = {}
    for name in ("target", "draft"):
        spec = getattr(config, name)
        if spec is None or spec.path is None:
            continue
        if (folder / spec.path).exists():
            changes[name] = spec.model_copy(update={"path": str(folder / spec.path)})
    return config.model_copy(update=changes)


def _one_line(error: ValidationError) -> str:
    problems = error.errors()
    parts = [_problem(p) for p in problems[:_MAX_PROBLEMS]]
    more = len(problems) - len(parts)
    return "; ".join(parts) + (f"; and {more} more" if more > 0 else "")


def _problem(problem: Any) -> str:
    place = ".".join(str(p) for p in problem["loc"]) or "config"
    if problem["type"] == "extra_forbidden":
        return f"{place}: unknown key; {_way_out(problem['loc'])}"
    if problem["type"] == "missing":
        return f"{place}: required, but missing"
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] in ("model_type", "dict_type"):
        message = "must be a mapping"
    value = problem.get("input")
    shown = "" if isinstance(value, (dict, list, BaseModel)) else f" (got {value!r})"
    return f"{place}: {message}{shown}"


def _way_out(loc: tuple[int | str, ...]) -> str:
    """The keys that there are, or the one that was meant."""
    above = [part for part in loc[:-1] if isinstance(part, str)]
    schema = _BELOW.get(above[-1], LaunchConfig) if above else LaunchConfig
    names = list(schema.model_fields)
    near = get_close_matches(str(loc[-1]), names, n=1)
    return f"did you mean {near[0]}?" if near else f"known: {', '.join(names)}"
