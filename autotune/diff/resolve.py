"""From what a person writes to a run: STUDY:TRIAL, a trial, a knobs id, or a file."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sqlalchemy import select

from autotune.diff.differences import TREE
from autotune.diff.facts import (
    Facts,
    health_facts,
    knob_facts,
    provenance_facts,
    workload_facts,
)
from autotune.diff.run import Run, Series
from autotune.errors import UserError
from autotune.explain.config_subject import best_study_name, launch_knobs
from autotune.explain.stored import open_study, repeats_of
from autotune.explain.subject import Repeat, StudyContext
from autotune.foreign.detect import read_foreign
from autotune.foreign.run import ForeignRun, Sample, with_article
from autotune.records import Health
from autotune.store.store import Store
from autotune.store.tables import MEASUREMENT
from autotune.store.views import TrialView
from autotune.yaml_source import read_yaml
from model.spec import Scalar

_LINE = re.compile(r"^(.*)#(\d+)$")
_IDENTITY = ("temperature", "prompts", "input_len", "output_len", "ignore_eos")


def same_file(first: str, second: str) -> bool:
    """Whether two texts name one file."""
    a, b = Path(first), Path(second)
    return a.is_file() and b.is_file() and a.samefile(b)


class Resolver:
    """Reads runs; the database is opened only when a trial is asked for."""

    def __init__(self, database: str, study: str | None = None) -> None:
        self._database, self._study = database, study
        self._contexts: dict[str | None, StudyContext] = {}
        self._store: Store | None = None

    def run(self, text: str) -> Run:
        """The run that ``text`` names. Raises ``UserError`` in one line."""
        picked = _LINE.match(text)
        if picked and Path(picked[1]).is_file():
            return _foreign(read_foreign(Path(picked[1]), int(picked[2])))
        path = Path(text)
        if path.is_file():
            if path.suffix in (".yaml", ".yml"):
                return self._exported(path)
            return _foreign(read_foreign(path))
        if path.is_dir():
            raise UserError(f"{text} is a folder; give a file, STUDY:TRIAL or a knobs id")
        looks_like_file = "/" in text or path.suffix in (
            ".log",
            ".txt",
            ".json",
            ".jsonl",
            ".yaml",
            ".yml",
        )
        if looks_like_file and ":" not in text:
            raise UserError(f"no file {text}")
        name, _, trial = text.rpartition(":")
        context = self._context(name or self._study)
        return trial_run(context, context.trial(trial))

    def _context(self, name: str | None) -> StudyContext:
        if name not in self._contexts:
            if self._store is None:
                self._store = Store.existing(self._database)
            self._contexts[name] = open_study(self._store, name)
        return self._contexts[name]

    def _exported(self, path: Path) -> Run:
        """An exported YAML: its trial where its study is at hand, else its own evidence."""
        data = read_yaml(path).data
        levels = launch_knobs(data, path)
        evidence = data.get("evidence") or {}
        rows = [row for row in evidence.get("levels") or [] if isinstance(row, dict)]
        first = min(levels)
        knobs = levels[first]
        facts: Facts = {"configuration": knob_facts(knobs)}
        unknown = {
            "packages": "an exported YAML does not hold them",
            "driver": "an exported YAML does not hold it",
            "environment": "only what it would set is known",
            "workload": "an exported YAML does not hold it",
        }
        if evidence.get("commit"):
            facts["code"] = {"commit": str(evidence["commit"])[:12]}
        if data.get("machine_fingerprint"):
            facts["hardware state"] = {"machine_fingerprint": str(data["machine_fingerprint"])}
        series = [
            Series(
                concurrency=int(row["concurrency"]),
                definition="decode",
                tokens_per_s=(float(row["tokens_per_s"]["tokens_per_s"]),),
                accept_length=(float(row["accept_length"]),) if row.get("accept_length") else (),
            )
            for row in rows
            if isinstance(row.get("tokens_per_s"), dict) and "concurrency" in row
        ]
        notes = ["its measured speed is one median: the repeats are in its study's database"]
        environment = {k: str(v) for k, v in (data.get("nccl_environment") or {}).items()}
        name = best_study_name(data)
        run = Run(
            label=str(path),
            kind="best-config YAML" if evidence else "launch config",
            facts=facts,
            unknown=unknown,
            series=tuple(series),
            knobs=knobs.values(),
            workload={},
            nccl_environment=environment,
            notes=tuple(notes) if series else (),
        )
        trial = next((row.get("trial") for row in rows if row.get("knobs_id") == knobs.id), None)
        if name is None or trial is None:
            return run
        try:
            context = self._context(name)
            found = trial_run(context, context.trial(str(trial)))
        except UserError:
            # its study's database is elsewhere: the file has to do
            return run
        if found.knobs != knobs.values():
            return run
        return _relabelled(found, f"{path} (trial {trial} of study {name})", "best-config YAML")


def _relabelled(run: Run, label: str, kind: str) -> Run:
    return replace(run, label=label, kind=kind)


def trial_run(context: StudyContext, trial: TrialView) -> Run:
    """A trial with its own repeats and its provenance. Raises ``UserError`` without repeats."""
    repeats = repeats_of(context.store, [trial.id])
    provenance = context.store.provenance(trial.id)
    facts: Facts = {}
    unknown: dict[str, str] = {}
    environment: dict[str, str] = {}
    if provenance is None:
        for group in ("code", "packages", "driver", "hardware state", "environment"):
            unknown[group] = "the trial ended before its provenance was stored"
    else:
        facts, unknown = provenance_facts(provenance)
        if provenance.ranks:
            environment = {
                name: value
                for name, value in provenance.ranks[0].environment.items()
                if name.startswith("NCCL_") and not name.startswith("NCCL_DEBUG")
            }
    configuration = facts.get("configuration", {})
    facts["configuration"] = {**configuration, **knob_facts(trial.knobs)}
    workload = next(iter(context.view.workloads.values()))
    facts["workload"] = workload_facts(workload)
    health = _health(context, trial)
    facts.setdefault("hardware state", {}).update(health)
    floors = context.store.noise_floors(context.view.id)
    notes = []
    if trial.state == "failed":
        notes.append(f"the trial failed ({trial.failure_kind})")
    if not repeats:
        notes.append("no valid repeat was measured")
    return Run(
        label=f"trial {trial.number} of study {context.view.name} ({trial.knobs.id})",
        kind="trial",
        facts=facts,
        unknown=unknown,
        series=tuple(_trial_series(repeats)),
        knobs=trial.knobs.values(),
        workload={
            "input_len": workload.input_len,
            "output_len": workload.output_len,
            "temperature": workload.temperature,
            "prompts": workload.prompts,
        },
        nccl_environment=environment,
        full_workload=workload,
        context=context,
        noise_floors={level: floor.rel_floor for level, floor in floors.items()},
        notes=tuple(notes),
    )


def _health(context: StudyContext, trial: TrialView) -> dict[str, str]:
    """Health during the trial's repeats, in place of that at its start."""
    query = (
        select(MEASUREMENT.c.record)
        .where(MEASUREMENT.c.trial_id == trial.id, MEASUREMENT.c.repeat >= 0)
        .order_by(MEASUREMENT.c.order.desc())
        .limit(20)
    )
    with context.store.reading() as session:
        records = list(session.scalars(query))
    return health_facts(
        [Health.model_validate(h) for record in records for h in record.get("health_after", [])]
    )


def _trial_series(repeats: Sequence[Repeat]) -> list[Series]:
    levels: dict[int, list[Repeat]] = {}
    for repeat in repeats:
        levels.setdefault(repeat.concurrency, []).append(repeat)
    found = []
    for level, rows in sorted(levels.items()):
        names = sorted({name for row in rows for name in row.terms_ms})
        found.append(
            Series(
                concurrency=level,
                definition="decode",
                tokens_per_s=_values(row.tokens_per_s for row in rows),
                tpot_ms=_values(row.tpot_ms for row in rows),
                cycle_ms=_values(row.cycle_ms for row in rows),
                accept_length=_values(row.accept_length for row in rows),
                terms_ms={n: _values(row.terms_ms.get(n) for row in rows) for n in names},
            )
        )
    return found


def _foreign(run: ForeignRun) -> Run:
    levels: dict[int | None, list[Sample]] = {}
    for sample in run.samples:
        levels.setdefault(sample.running, []).append(sample)
    series = [
        Series(
            concurrency=level,
            definition=run.definition if any(s.tokens_per_s for s in rows) else None,
            tokens_per_s=_values(s.tokens_per_s for s in rows),
            tpot_ms=_values(s.tpot_ms for s in rows),
            cycle_ms=_values(s.step_ms for s in rows),
            accept_length=_values(s.accept_length for s in rows),
        )
        for level, rows in sorted(levels.items(), key=lambda item: -len(item[1]))
    ]
    server = "SGLang" if "SGLang" in run.format else "vLLM"
    configuration = {"server": server}
    knobs = _canonical(run.knobs)
    configuration |= {k: _text(v) for k, v in knobs.items()}
    configuration |= {
        f"{server} {k}": _text(v) for k, v in run.args.items() if not _told_by_knobs(k, knobs)
    }
    configuration |= {f"{server}: {k}": v for k, v in run.effective.items()}
    if run.model is not None:
        configuration["target model"] = run.model
    if run.draft is not None:
        configuration["draft model"] = run.draft
    workload = {k: _text(run.workload[k]) for k in _IDENTITY if k in run.workload}
    facts: Facts = {
        "packages": dict(run.packages),
        "environment": dict(run.environment),
        "hardware state": dict(run.hardware),
        "configuration": configuration,
        "workload": workload,
    }
    why = f"{with_article(run.format)} does not tell"
    unknown = dict.fromkeys(("code", "driver"), why)
    unknown |= {g: why for g in ("packages", "hardware state", "workload") if not facts[g]}
    unknown["environment"] = f"{why} the workers' environment, only what it happens to print"
    notes = list(run.notes)
    if run.failure is not None:
        notes.append(f"the server ended badly: {run.failure}")
    return Run(
        label=run.path,
        kind=run.format,
        facts=facts,
        unknown=unknown,
        series=tuple(series),
        knobs=knobs,
        workload=_typed({k: v for k, v in run.workload.items() if k != "concurrency"}),
        nccl_environment={k: v for k, v in run.environment.items() if k.startswith("NCCL_")},
        notes=tuple(notes),
    )


#: argument of a server -> the knob that says the same
_SAME: Mapping[str, str] = {
    "tp_size": "parallel.tp",
    "tensor_parallel_size": "parallel.tp",
    "speculative_algorithm": "speculation.method",
    "speculative_num_steps": "speculation.method",
    "speculative_eagle_topk": "speculation.method",
    "speculative_num_draft_tokens": "speculation.method",
    "speculative_draft_model_path": "speculation.method",
    "speculative_config": "speculation.method",
}
#: arguments that say whether the main forward is captured
_GRAPHS = ("disable_cuda_graph", "enforce_eager")


def _told_by_knobs(argument: str, knobs: Mapping[str, object]) -> bool:
    if argument in _GRAPHS:
        return "cuda_graph.verify" in knobs or "cuda_graph.decode" in knobs
    return _SAME.get(argument) in knobs


def _canonical(knobs: Mapping[str, Any]) -> dict[str, Scalar | None]:
    """Without phases that plain decoding does not have, and with its empty tree."""
    values = _typed(knobs)
    if values.get("speculation.method") == "off":
        for phase in ("draft", "verify", "extend"):
            values.pop(f"cuda_graph.{phase}", None)
        values |= dict.fromkeys(TREE[1:], 0)
    elif values.get("speculation.method") == "eagle3":
        # a speculative server captures no plain decode step
        values.pop("cuda_graph.decode", None)
    return values


def _typed(values: Mapping[str, Any]) -> dict[str, Scalar | None]:
    return {k: v for k, v in values.items() if v is None or isinstance(v, str | int | float | bool)}


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "none" if value is None else str(value)


def _values(items: Any) -> tuple[float, ...]:
    """What can be compared by ratios: a speed or time of 0 is an interval without work."""
    numbers = (float(item) for item in items if item is not None)
    return tuple(number for number in numbers if math.isfinite(number) and number > 0)
