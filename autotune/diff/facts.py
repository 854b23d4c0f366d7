"""Provenance of a trial as facts by group; what changes from run to run by itself is left out."""

import json
import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from autotune.diff.run import Group
from autotune.records import Health, Provenance, RankEnvironment
from model.spec import Knobs, Workload

Facts = dict[Group, dict[str, str]]

#: variables that can change how fast or whether something runs
_RELEVANT = re.compile(
    r"^(NCCL_|CUDA_|CUBLAS_|TORCH|PYTORCH_|TRITON_|VLLM_|SGLANG_|OMP_|MKL_|GLOO_|FLASHINFER_|"
    r"LD_PRELOAD$|LD_LIBRARY_PATH$|GOMP_|KMP_|UCX_|NVIDIA_|PYTHONOPTIMIZE$|MALLOC_|TP_|AUTOTUNE_)"
)
#: names and paths of one start: they differ in every run and change nothing
_FLEETING = re.compile(r"(_FILE|_PORT|_ADDR|_DIR|_PATH_PREFIX)$|^NCCL_DEBUG|^TORCHELASTIC_")
#: configuration that the knobs repeat, or that names where something was started
_REPEATED = re.compile(
    r"^engine\.(tp$|nccl\.|cuda_graph\.|collectives\.|schedule|host\.numa_bind|"
    r"machine_fingerprint|timeout_s|max_concurrency)"
)
_SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|CREDENTIAL|API_?KEY", re.I)


def provenance_facts(provenance: Provenance) -> tuple[Facts, dict[str, str]]:
    """(facts by group, why a group or key is unknown)."""
    unknown: dict[str, str] = {}
    reasons = provenance.unknown
    facts: Facts = {
        "code": _known(commit=provenance.commit and provenance.commit[:12], dirty=provenance.dirty),
        "packages": {**provenance.packages, **_known(python=provenance.python or None)},
        "driver": _known(driver=provenance.driver),
        "hardware state": _hardware(provenance),
        "environment": _environment(provenance.ranks),
        "configuration": _configuration(provenance.config),
    }
    facts["environment"] |= _nccl(provenance)
    for group, fields in (
        ("code", ("commit",)),
        ("driver", ("driver",)),
        ("hardware state", ("gpus", "pcie", "topology")),
        ("environment", ("ranks", "nccl")),
    ):
        for name in fields:
            if name in reasons:
                unknown[f"{group}.{name}"] = reasons[name]
    if not provenance.packages:
        unknown["packages"] = "not recorded"
    return facts, unknown


def health_facts(health: Sequence[Health]) -> dict[str, str]:
    """Clocks, temperature, power and throttling as one line each; medians over devices."""
    found: dict[str, str] = {}
    for name, unit, digits in (
        ("clock_mhz", "MHz", 0),
        ("temperature_c", "°C", 0),
        ("power_w", "W", 0),
        ("load_average", "", 1),
    ):
        values = [v for h in health if (v := getattr(h, name)) is not None]
        if values:
            found[name] = f"{statistics.median(values):.{digits}f} {unit}".strip()
    reasons = sorted({reason for h in health for reason in h.throttle_reasons})
    if health and any(h.device != "cpu" for h in health):
        found["throttle_reasons"] = ", ".join(reasons) or "none"
    return found


def knob_facts(knobs: Knobs) -> dict[str, str]:
    """Settings by dotted name."""
    return {
        name: "auto" if value is None else _shown(value) for name, value in knobs.values().items()
    }


def workload_facts(workload: Workload) -> dict[str, str]:
    """Load, lengths, prompts and sampling."""
    return {
        "prompts": workload.prompts,
        "prompts_sha256": workload.prompts_sha256[:12],
        "chat_template": workload.chat_template or "none",
        "input_len": str(workload.input_len),
        "output_len": str(workload.output_len),
        "temperature": f"{workload.temperature:g}",
        "ignore_eos": _shown(workload.ignore_eos),
        "seed": str(workload.seed),
    }


def _hardware(provenance: Provenance) -> dict[str, str]:
    found = _known(
        cpu=provenance.cpu or None,
        topology=_folded(provenance.topology),
        machine_fingerprint=provenance.machine_fingerprint or None,
    )
    if provenance.gpus:
        found["gpus"] = _counted(provenance.gpus)
    if provenance.pcie:
        found["pcie"] = _counted(provenance.pcie)
    if provenance.cpu_affinity:
        found["cpu_affinity"] = _ranges(provenance.cpu_affinity)
    return found | health_facts(provenance.health)


def _environment(ranks: Sequence[RankEnvironment]) -> dict[str, str]:
    """Variables of the workers; one that differs between ranks says so."""
    names = sorted({n for rank in ranks for n in rank.environment})
    found = {}
    for name in names:
        if not _RELEVANT.match(name) or _FLEETING.search(name):
            continue
        values = [rank.environment.get(name) for rank in ranks]
        found[name] = _per_rank(ranks, values, hide=bool(_SECRET.search(name)))
    libraries = [rank.nccl_library for rank in ranks]
    versions = [rank.nccl_version for rank in ranks]
    if any(libraries):
        found["NCCL library"] = _per_rank(ranks, libraries, hide=False)
    if any(versions):
        found["NCCL version"] = _per_rank(ranks, versions, hide=False)
    return found


def _per_rank(ranks: Sequence[RankEnvironment], values: Sequence[str | None], *, hide: bool) -> str:
    if hide:
        return "set (not shown)"
    if len(set(values)) == 1:
        return str(values[0])
    return "; ".join(
        f"rank {rank.rank}: {'unset' if value is None else value}"
        for rank, value in zip(ranks, values, strict=True)
    )


def _nccl(provenance: Provenance) -> dict[str, str]:
    """What NCCL's log says that it chose."""
    found = {}
    for name in ("versions", "transports", "channels"):
        value = provenance.nccl.get(name)
        if isinstance(value, list) and value:
            found[f"NCCL chose {name}"] = ", ".join(map(str, value))
    choices = provenance.nccl.get("allreduce_choices")
    if isinstance(choices, list):
        for choice in choices:
            if isinstance(choice, dict) and {"bytes", "algo", "proto"} <= choice.keys():
                low, high = choice.get("channels", (0, -1))
                count = f", {high - low + 1} channels" if high >= low else ""
                key = f"NCCL chose at {choice['bytes']} B"
                found[key] = f"{choice['algo']}/{choice['proto']}{count}"
    return found


def _configuration(config: Mapping[str, object]) -> dict[str, str]:
    flat: dict[str, str] = {}
    _flatten("", config, flat)
    return {name: value for name, value in flat.items() if not _REPEATED.match(name)}


def _flatten(prefix: str, value: object, into: dict[str, str]) -> None:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            _flatten(f"{prefix}.{name}" if prefix else str(name), inner, into)
    elif isinstance(value, list):
        into[prefix] = json.dumps(value)
    else:
        into[prefix] = _shown(value)


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "none" if value is None else str(value)


def _known(**values: object) -> dict[str, str]:
    return {name: _shown(value) for name, value in values.items() if value is not None}


def _folded(text: str | None) -> str | None:
    return None if text is None else " ".join(text.split())


def _counted(items: Sequence[str]) -> str:
    kinds = dict.fromkeys(items)
    return "; ".join(f"{items.count(kind)} × {kind}" for kind in kinds)


def _ranges(numbers: Sequence[int]) -> str:
    """1,2,3,8 as "1-3,8"."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)
