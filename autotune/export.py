"""The best-config YAML: what the engine starts from, its equivalents, and the evidence.

Top level: ``format``, ``machine_fingerprint``, ``engine`` (the schema of
``engine.config.LaunchConfig``), ``nccl_environment``, ``nccl_tuner``, ``equivalent`` (command
lines of SGLang and vLLM by load level) and ``evidence`` (what was measured, never needed to start).
"""

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from autotune.export_servers import (
    SGLANG_VERSIONS,
    VLLM_VERSIONS,
    ServerCommand,
    ServerTarget,
    sglang_command,
    vllm_command,
)
from autotune.launch import RESTART_KNOBS, launch_mapping, nccl_environment
from autotune.schemas import Study
from model.spec import Knobs, Scalar

FORMAT = "autotune-best/1"

_HEADER = """\
# The fastest configuration that a study found, written by `autotune study best`.
# Start it:  engine bench --config FILE     (it reads `engine:` and `machine_fingerprint:`)
"""

_TUNER_ALGOS = ("tree", "ring")
_TUNER_PROTOS = {"LL": "ll", "LL128": "ll128", "Simple": "simple"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """A measured speed with its spread."""

    tokens_per_s: float
    #: 95 % interval of the median
    low: float
    high: float
    num_repeats: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelBest:
    """The best measured knobs of one group at one concurrency, and what supports them."""

    concurrency: int
    knobs: Knobs
    trial: int
    measured: Throughput
    baseline: Throughput
    baseline_trial: int
    #: "exact", "near_tie" or "unverified"
    output_check: str
    accept_length: float | None = None
    predicted_tokens_per_s: float | None = None
    #: "faster", "same", "slower" or "undecided": what interleaved repeats support
    verdict: str = "undecided"

    @property
    def speedup(self) -> float:
        """Ratio of the medians."""
        return self.measured.tokens_per_s / self.baseline.tokens_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeRule:
    """An all-reduce choice that won for messages of ``min_bytes`` .. ``max_bytes``."""

    min_bytes: int
    max_bytes: int
    #: "ring" or "tree"
    algo: str
    #: "LL", "LL128" or "Simple"
    proto: str
    #: None leaves the number of channels to NCCL
    channels: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Where the numbers of an export come from."""

    study_id: str
    machine_fingerprint: str
    #: relative half-width of the A/A difference; None when no A/A pair was measured
    noise_floor: float | None
    database: str
    commit: str | None = None
    config_hash: str | None = None
    #: how this configuration was picked
    picked: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """What the backend resolved and one start needs besides knobs."""

    device: str
    dtype: str
    max_context: int
    timeout_s: float
    threads: int | None = None


def choose_levels(candidates: Sequence[LevelBest]) -> tuple[LevelBest, ...]:
    """One best per concurrency such that one start can serve them all.

    ``candidates`` holds, for each group and concurrency, that group's best. The group with the
    largest product of speed-ups over all levels wins; a group that lacks a level cannot. Raises
    ``ValueError`` when no group was measured at every level.
    """
    levels = sorted({candidate.concurrency for candidate in candidates})
    plain = {_graphs(c) for c in candidates if c.knobs.method == "off"} or {()}
    speculative = {_graphs(c) for c in candidates if c.knobs.method != "off"} or {()}
    complete = []
    for settings in dict.fromkeys(_settings(candidate) for candidate in candidates):
        for graphs in itertools.product(sorted(plain), sorted(speculative)):
            of_group = _best_of_group(candidates, settings, graphs)
            if len(of_group) == len(levels):
                complete.append(of_group)
    if not complete:
        raise ValueError(f"no group of knobs was measured at every concurrency of {levels}")

    def product(of_group: Mapping[int, LevelBest]) -> float:
        value = 1.0
        for level in of_group.values():
            value *= level.speedup
        return value

    best = max(complete, key=product)
    return tuple(best[level] for level in levels)


def _settings(candidate: LevelBest) -> tuple[Scalar | None, ...]:
    """What one start fixes for all levels, graphs left out."""
    values = candidate.knobs.values()
    return tuple(values[name] for name in RESTART_KNOBS if not name.startswith("cuda_graph."))


def _graphs(candidate: LevelBest) -> tuple[bool, ...]:
    """The graphs that these knobs use: plain decoding its own, a cycle its three."""
    knobs = candidate.knobs
    if knobs.method == "off":
        return (knobs.graph_decode,)
    return (knobs.graph_draft, knobs.graph_verify, knobs.graph_extend)


def _best_of_group(
    candidates: Sequence[LevelBest],
    settings: tuple[Scalar | None, ...],
    graphs: tuple[tuple[bool, ...], ...],
) -> dict[int, LevelBest]:
    """Concurrency -> the fastest candidate that one start with these settings serves."""
    best: dict[int, LevelBest] = {}
    for candidate in candidates:
        if _settings(candidate) != settings or _graphs(candidate) not in graphs:
            continue
        held = best.get(candidate.concurrency)
        if held is None or candidate.measured.tokens_per_s > held.measured.tokens_per_s:
            best[candidate.concurrency] = candidate
    return best


def best_mapping(
    study: Study,
    levels: Sequence[LevelBest],
    options: LaunchOptions,
    evidence: Evidence,
    tuner_file: str | None = None,
) -> dict[str, Any]:
    """The whole best-config as plain values, ready for YAML.

    ``levels`` come from ``choose_levels``; ``tuner_file`` is the name of the CSV beside the YAML.
    Raises ``ValueError`` for levels that one start cannot serve.
    """
    ordered = sorted(levels, key=lambda level: level.concurrency)
    engine = launch_mapping(
        study,
        [(level.concurrency, level.knobs) for level in ordered],
        **{k: v for k, v in asdict(options).items() if k != "threads"},
        threads=options.threads,
    )
    if all(level.knobs.method == "off" for level in ordered):
        # nothing speculates: the draft would only take memory
        engine["draft"] = None
    environment = nccl_environment(ordered[0].knobs)
    return {
        "format": FORMAT,
        "machine_fingerprint": evidence.machine_fingerprint,
        "engine": engine,
        "nccl_environment": environment,
        "nccl_tuner": None if tuner_file is None else tuner_mapping(tuner_file),
        "equivalent": {
            "sglang": _equivalent(study, ordered, options, sglang_command, SGLANG_VERSIONS),
            "vllm": _equivalent(study, ordered, options, vllm_command, VLLM_VERSIONS),
        },
        "evidence": {
            "study": {"name": study.name, "id": evidence.study_id, "database": evidence.database},
            "commit": evidence.commit,
            "config_hash": evidence.config_hash,
            "noise_floor": evidence.noise_floor,
            "picked": evidence.picked,
            "levels": [_level_mapping(level, evidence.noise_floor) for level in ordered],
        },
    }


def write_best(
    path: Path,
    study: Study,
    levels: Sequence[LevelBest],
    options: LaunchOptions,
    evidence: Evidence,
    rules: Sequence[SizeRule] = (),
) -> tuple[Path, ...]:
    """Write the YAML, and beside it the tuner CSV when ``rules`` won; returns the written files."""
    written = [path]
    tuner_file = None
    if rules:
        csv_path = path.with_suffix(".nccl_tuner.csv")
        csv_path.write_text(tuner_csv(rules, num_ranks=levels[0].knobs.tp))
        tuner_file = csv_path.name
        written.append(csv_path)
    mapping = best_mapping(study, levels, options, evidence, tuner_file)
    text = _HEADER + yaml.safe_dump(mapping, sort_keys=False, allow_unicode=True)
    # whole or not at all: a full disk must not cost the file of an earlier study
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(text)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return tuple(written)


def tuner_mapping(file_name: str) -> dict[str, Any]:
    """How NCCL is told to read the CSV."""
    return {
        "file": file_name,
        "environment": {"NCCL_TUNER_CONFIG_FILE": file_name},
        "notes": [
            "read by NVIDIA's example tuner plugin (NCCL repository, plugins/tuner/example); build "
            "it for the NCCL in use and name it in NCCL_TUNER_PLUGIN",
            "NCCL_ALGO and NCCL_PROTO mask the plugin's choice: leave them unset",
        ],
    }


def tuner_csv(rules: Sequence[SizeRule], num_ranks: int) -> str:
    """The rules in the format of NVIDIA's example tuner plugin, one line a rule, ascending.

    Columns: collective, min and max bytes (inclusive), algorithm, protocol, channels, nodes, ranks,
    pipe operations, registered buffer; -1 matches anything. Raises ``ValueError`` for an unknown
    algorithm or protocol, an empty range, or ranges that overlap.
    """
    lines = ["# coll,min_bytes,max_bytes,algo,proto,channels,nodes,ranks,pipe_ops,reg_buff"]
    last = -1
    for rule in sorted(rules, key=lambda rule: rule.min_bytes):
        if rule.algo not in _TUNER_ALGOS or rule.proto not in _TUNER_PROTOS:
            raise ValueError(
                f"size rule {rule.algo}/{rule.proto}: algorithms are {', '.join(_TUNER_ALGOS)}, "
                f"protocols {', '.join(_TUNER_PROTOS)}"
            )
        if rule.min_bytes > rule.max_bytes or rule.min_bytes <= last:
            raise ValueError(
                f"size rule {rule.min_bytes}..{rule.max_bytes} bytes is empty or overlaps the one "
                f"that ends at {last}"
            )
        last = rule.max_bytes
        channels = -1 if rule.channels is None else rule.channels
        proto = _TUNER_PROTOS[rule.proto]
        lines.append(
            f"allreduce,{rule.min_bytes},{rule.max_bytes},{rule.algo},{proto},{channels},"
            f"1,{num_ranks},-1,-1"
        )
    return "\n".join(lines) + "\n"


def _equivalent(
    study: Study,
    levels: Sequence[LevelBest],
    options: LaunchOptions,
    command: Callable[[Knobs, ServerTarget, str], ServerCommand],
    versions: Sequence[str],
) -> dict[str, Any]:
    """Command lines by level and version; levels that need the same server are one entry."""
    if study.target.path is None:
        return {"unavailable": "the target has random weights; there is no checkpoint to serve"}
    if study.draft is not None and study.draft.path is None:
        return {"unavailable": "the draft has random weights; there is no checkpoint to serve"}
    entries: list[dict[str, Any]] = []
    for index, level in enumerate(levels):
        following = levels[index + 1] if index + 1 < len(levels) else None
        if following is not None and following.knobs == level.knobs:
            # the larger level's server serves this one too
            continue
        where = ServerTarget(
            target=str(study.target.path),
            draft=None if study.draft is None else str(study.draft.path),
            dtype=options.dtype,
            max_context=options.max_context,
            max_concurrency=level.concurrency,
        )
        commands = [command(level.knobs, where, version).mapping() for version in versions]
        entries.append({"max_concurrency": level.concurrency, "commands": commands})
    return {"levels": entries}


def _level_mapping(level: LevelBest, noise_floor: float | None) -> dict[str, Any]:
    values = {
        "concurrency": level.concurrency,
        "trial": level.trial,
        "knobs_id": level.knobs.id,
        "knobs": level.knobs.values(),
        "tokens_per_s": asdict(level.measured),
        "baseline_trial": level.baseline_trial,
        "baseline_tokens_per_s": asdict(level.baseline),
        "speedup": round(level.speedup, 4),
        "verdict": level.verdict,
        "output_check": level.output_check,
        "accept_length": level.accept_length,
        "predicted_tokens_per_s": level.predicted_tokens_per_s,
    }
    if noise_floor is not None:
        values["above_noise_floor"] = abs(level.speedup - 1.0) > noise_floor
    return values
