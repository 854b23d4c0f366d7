"""A setup of our own engine: a best-config or launch YAML, and knobs on the command line."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.errors import UserError
from autotune.lint.command import Command, Option, parse_env
from autotune.lint.log_facts import LogFacts
from autotune.lint.setup import Setup
from autotune.lint.speculation import Speculation

if TYPE_CHECKING:
    from autotune.lint.run import Request

#: nccl.* of the launch config -> the variable it becomes in every worker
_VARIABLES = {
    "algo": "NCCL_ALGO",
    "proto": "NCCL_PROTO",
    "min_channels": "NCCL_MIN_NCHANNELS",
    "max_channels": "NCCL_MAX_NCHANNELS",
    "buffsize": "NCCL_BUFFSIZE",
    "nthreads": "NCCL_NTHREADS",
    "p2p_level": "NCCL_P2P_LEVEL",
}


def engine_setup(request: "Request", words: Sequence[str], log: LogFacts | None) -> Setup:
    """From ``--config FILE`` and ``knob=value`` words. Raises ``UserError``."""
    from autotune.lint.run import load_machine_named, load_target

    block: dict[str, Any] = {}
    knobs: dict[str, Any] = {}
    index = 0
    while index < len(words):
        word = words[index]
        index += 1
        if word in ("engine", "generate", "bench", "-m", "python"):
            continue
        if word == "--config" and index < len(words):
            block = _read(Path(words[index]))
            index += 1
        elif "=" in word and not word.startswith("-"):
            name, _, text = word.partition("=")
            knobs[name] = text
        elif word.endswith((".yaml", ".yml")):
            block = _read(Path(word))
    values = _knob_values(knobs)
    env = _environment(block, values) | parse_env(request.env)
    entry = _schedule_entry(block, request.concurrency)
    options = tuple(
        Option(name, (str(value).lower() if isinstance(value, bool) else str(value),), name)
        for name, value in {**_flat(block), **values}.items()
    )
    machine = load_machine_named(request.machine)
    return Setup(
        engine="engine",
        command=Command(engine="engine", options=options),
        env=env,
        speculation=_speculation(entry, values),
        machine=machine,
        target=load_target(request.target),
        target_name=request.target,
        load=request.concurrency,
        nccl_version=request.nccl_version
        or (None if machine is None else machine.software.nccl_version),
        accept_length=request.accept_length or (log.accept_length if log is not None else None),
        baseline_tokens_per_s=request.baseline_tokens_per_s,
        log=log,
    )


def _read(path: Path) -> dict[str, Any]:
    import yaml

    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as problem:
        raise UserError(f"cannot read {path}: {problem.strerror}") from None
    except yaml.YAMLError as problem:
        raise UserError(f"{path}: no YAML: {' '.join(str(problem).split())}") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: a mapping is expected")
    block = values.get("engine", values)
    if not isinstance(block, dict):
        raise UserError(f"{path}: engine: a mapping is expected")
    return block


def _knob_values(knobs: Mapping[str, str]) -> dict[str, Any]:
    """Knobs in their types. Raises ``UserError`` for an unknown name or a bad value."""
    if not knobs:
        return {}
    import yaml

    from autotune.knob_values import parse_dimension

    found: dict[str, Any] = {}
    for name, text in knobs.items():
        value = yaml.safe_load(text) if text not in ("off", "on") else text
        try:
            (found[name],) = parse_dimension(name, value)
        except (ValueError, UserError) as problem:
            raise UserError(f"{name}: {problem}") from None
    return found


def _environment(block: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, str]:
    nccl = dict(block.get("nccl") or {})
    nccl |= {
        name.removeprefix("nccl."): value
        for name, value in values.items()
        if name.startswith("nccl.")
    }
    return {
        _VARIABLES[name]: str(value)
        for name, value in nccl.items()
        if name in _VARIABLES and value not in (None, "auto")
    }


def _schedule_entry(block: Mapping[str, Any], load: int | None) -> Mapping[str, Any]:
    """Speculation at this load: the first level that holds it, as the engine picks."""
    entries = [entry for entry in block.get("schedule") or () if isinstance(entry, dict)]
    entries.sort(key=lambda entry: entry.get("max_concurrency", 0))
    for entry in entries:
        if load is None or entry.get("max_concurrency", 0) >= load:
            return entry.get("speculation") or {}
    return {}


def _flat(block: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for section in ("cuda_graph", "host"):
        for name, value in (block.get(section) or {}).items():
            flat[f"{section}.{name}"] = value
    if "device" in block:
        flat["device"] = block["device"]
    if "tp" in block:
        flat["parallel.tp"] = block["tp"]
    if "max_concurrency" in block:
        flat["max_concurrency"] = block["max_concurrency"]
    return flat


def _speculation(entry: Mapping[str, Any], values: Mapping[str, Any]) -> Speculation | None:
    sizes = {
        name: values.get(f"speculation.{name}", entry.get(name))
        for name in ("method", "steps", "topk", "draft_tokens")
    }
    if sizes["method"] is None and any(sizes[name] for name in ("steps", "topk", "draft_tokens")):
        sizes["method"] = "eagle3"
    if sizes["method"] in (None, "off", False):
        return None
    steps, topk, tokens = sizes["steps"], sizes["topk"] or 1, sizes["draft_tokens"]
    if topk == 1 and steps is not None:
        tokens = steps + 1
    given = {
        name: value for name, value in sizes.items() if isinstance(value, int) and name != "method"
    }
    return Speculation(
        algorithm=str(sizes["method"]).upper(),
        given=given,
        steps=steps,
        topk=topk,
        draft_tokens=tokens,
        draft_model="engine",
    )
