"""Subjects of files: a study file, a best-config YAML or a launch config (prediction only)."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from autotune.errors import UserError
from autotune.explain.subject import StudyContext, Subject, study_predictor
from autotune.hosts import cpu_machine, rank_problem, study_machine
from autotune.modelling import draft_shape, target_shape
from autotune.ranking import best_predicted
from autotune.schemas import BackendSpec, Budget, ModelRef, Study, WorkloadSpec
from autotune.space import baseline_knobs, build_space
from autotune.study_file import load_study
from autotune.workloads import study_workloads
from autotune.yaml_source import read_yaml
from model.acceptance import AcceptanceModel
from model.calibration import default_calibration
from model.machine import Machine, load_machine
from model.predictor import Predictor
from model.spec import Knobs, Scalar, Workload

#: workload of a launch config, which names none
_INPUT_LEN, _OUTPUT_LEN = 1000, 256


def study_file_subjects(path: Path, concurrency: int | None) -> list[Subject]:
    """The best predicted knobs of a study file at each level (or at one), baseline beside it."""
    loaded = load_study(path)
    study = loaded.study
    machine = study_machine(study)
    predictor = study_predictor(study, machine, loaded.base_dir)
    workloads = study_workloads(study)
    space = build_space(study.space, machine, rank_problem(study, machine, predictor.target))
    base = baseline_knobs(space, study.space)
    found = []
    for level in _levels(workloads, concurrency, f"study file {path}"):
        best = best_predicted(space, predictor, workloads[level], base)
        found.append(
            Subject(
                title=f"best predicted knobs of {path.name} ({best.id})",
                knobs=best,
                workload=workloads[level],
                predictor=predictor,
                prior=predictor.acceptance,
                baseline=base,
            )
        )
    return found


def launch_subjects(
    path: Path, machine_file: str | None, concurrency: int | None, context: StudyContext | None
) -> list[Subject]:
    """The levels of a best-config YAML or launch config; ``context``: its study, if at hand.

    Raises ``UserError`` naming the key for a file that is neither.
    """
    data = read_yaml(path).data
    engine = launch_block(data, path)
    levels = launch_knobs(data, path)
    if context is not None:
        predictor, prior = context.predictor, context.prior
        notes = context.notes
        workloads: Mapping[int, Workload] = context.view.workloads
    else:
        study = _study_of(engine, path, sorted(levels))
        machine = _machine(data, engine, machine_file, path)
        target = target_shape(study)
        prior = AcceptanceModel.prior()
        predictor = Predictor(
            target, draft_shape(study, target), machine, default_calibration(machine), prior
        )
        workloads = study_workloads(study)
        assumed = next(iter(workloads.values()))
        notes = (
            f"workload assumed, since the file names none and its study is not at hand: "
            f"{assumed.input_len} tokens in, {assumed.output_len} out",
        )
    found = []
    for level in _levels(levels, concurrency, str(path)):
        workload = workloads.get(level)
        if workload is None:
            workload = _at_level(next(iter(workloads.values())), level)
        found.append(
            Subject(
                title=f"{path.name} up to concurrency {level} ({levels[level].id})",
                knobs=levels[level],
                workload=workload,
                predictor=predictor,
                prior=prior,
                notes=notes,
            )
        )
    return found


def launch_block(data: Any, path: Path) -> dict[str, Any]:
    """The launch configuration in a file. Raises ``UserError`` when there is none."""
    if isinstance(data, dict):
        block = data.get("engine", data)
        if isinstance(block, dict) and "target" in block and "tp" in block:
            return block
    raise UserError(
        f"{path} is no study file, best-config YAML or launch config: it needs engine: with "
        f"target and tp (or the keys of a study)"
    )


def launch_knobs(data: Any, path: Path) -> dict[int, Knobs]:
    """Concurrency -> knobs of each level of a best-config YAML or launch config."""
    block = launch_block(data, path)
    schedule = block.get("schedule") or [
        {"max_concurrency": block.get("max_concurrency", 1), "speculation": {"method": "off"}}
    ]
    common: dict[str, Scalar | None] = {
        "parallel.tp": block["tp"],
        "collectives.backend": (block.get("collectives") or {}).get("backend")
        or ("gloo" if block.get("device") == "cpu" else "nccl"),
        "host.numa_bind": bool((block.get("host") or {}).get("numa_bind", False)),
    }
    for name in ("algo", "proto", "p2p_level"):
        common[f"nccl.{name}"] = (block.get("nccl") or {}).get(name) or "auto"
    for name in ("min_channels", "max_channels", "buffsize", "nthreads"):
        common[f"nccl.{name}"] = (block.get("nccl") or {}).get(name)
    for name in ("decode", "draft", "verify", "extend"):
        common[f"cuda_graph.{name}"] = bool((block.get("cuda_graph") or {}).get(name, False))
    found = {}
    try:
        for entry in schedule:
            tree = {f"speculation.{k}": v for k, v in (entry.get("speculation") or {}).items()}
            found[int(entry["max_concurrency"])] = Knobs.of({**common, **tree})
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{path}: engine.schedule: {error}") from None
    return found


def best_study_name(data: Any) -> str | None:
    """Name of the study that a best-config YAML came from."""
    if not isinstance(data, dict):
        return None
    study = (data.get("evidence") or {}).get("study") or {}
    name = study.get("name") if isinstance(study, dict) else None
    return name if isinstance(name, str) else None


def _study_of(engine: dict[str, Any], path: Path, levels: list[int]) -> Study:
    """A study around a launch config: what the model needs of one."""
    output_len = _OUTPUT_LEN
    input_len = max(1, min(_INPUT_LEN, int(engine.get("max_context") or 4096) - output_len))
    base = path.resolve().parent
    draft = engine.get("draft")
    try:
        return Study.model_validate(
            {
                "name": "explain",
                "target": {k: v for k, v in dict(engine["target"]).items() if v is not None},
                "draft": _draft(draft, engine),
                "workload": WorkloadSpec(
                    prompts="builtin:code",
                    input_len=input_len,
                    output_len=output_len,
                    concurrency=tuple(levels),
                ).model_dump(),
                "backend": BackendSpec(kind="sim").model_dump(),
                "space": {"speculation.method": ["off"]},
                "budget": Budget(measured_trials=1).model_dump(),
            },
            context={"base": base},
        )
    except (ValidationError, TypeError, ValueError) as error:
        text = " ".join(str(error).split())[:200]
        raise UserError(f"{path}: engine: {text}") from None


def _draft(draft: object, engine: dict[str, Any]) -> dict[str, Any] | None:
    if not isinstance(draft, dict):
        return None
    if draft.get("path"):
        return {"path": draft["path"]}
    target = dict(engine["target"])
    shape = target.get("shape") or Path(str(target.get("path"))).name
    return ModelRef(shape=shape, weights="random").model_dump(exclude_none=True)


def _machine(data: Any, engine: dict[str, Any], machine_file: str | None, path: Path) -> Machine:
    """The machine asked for, the shipped one of the file's fingerprint, or this host's CPUs."""
    if machine_file is not None:
        return named_machine(machine_file)
    wanted = data.get("machine_fingerprint") or engine.get("machine_fingerprint")
    folder = Path(__file__).parents[2] / "studies" / "machines"
    for file in sorted(folder.glob("*.yaml")):
        machine = load_machine(file)
        if wanted is not None and machine.is_named_by(str(wanted)):
            return machine
    if engine.get("device") == "cpu":
        return cpu_machine()
    raise UserError(
        f"{path}: no machine file has the fingerprint {wanted}; give --machine FILE, or --database "
        f"with the study it came from"
    )


def named_machine(name: str) -> Machine:
    """A machine file, by path or by the name of a shipped one. Raises ``UserError``."""
    folder = Path(__file__).parents[2] / "studies" / "machines"
    shipped = folder / f"{name}.yaml"
    try:
        return load_machine(shipped if shipped.is_file() else name)
    except ValueError as error:
        known = ", ".join(sorted(file.stem for file in folder.glob("*.yaml")))
        raise UserError(f"machine: {error}; shipped: {known}") from None


def _levels(levels: Mapping[int, object], asked: int | None, where: str) -> list[int]:
    if asked is None:
        return sorted(levels)
    if asked in levels:
        return [asked]
    known = ", ".join(map(str, sorted(levels)))
    raise UserError(f"{where} has no concurrency {asked}; it has {known}")


def _at_level(workload: Workload, level: int) -> Workload:
    return replace(workload, concurrency=level)
