"""Sets a comparison up: study, arms, backend, machine; runs it, and keeps its answer."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from autotune.backends.base import Backend, BackendContext
from autotune.backends.registry import create_backend
from autotune.compare import CompareBudget, Compared, CompareRun
from autotune.compare_arms import Arm, home_study, resolve_arm
from autotune.compare_report import compared_mapping
from autotune.errors import UserError
from autotune.explain.config_subject import launch_block
from autotune.explain.subject import is_file
from autotune.history import History
from autotune.host_lock import hold_machine
from autotune.measuring import Bench
from autotune.modelling import config_folder
from autotune.plan import Plan, stored_plan
from autotune.schemas import ModelRef
from autotune.stopping import StopFlag
from autotune.store.store import Store
from autotune.store.views import StudyView
from autotune.yaml_source import read_yaml
from model.shapes import ModelShape


@dataclass(frozen=True, kw_only=True)
class CompareAsked:
    """What the command line says."""

    whats: tuple[str, str]
    study: str | None
    concurrency: int | None
    max_pairs: int | None
    #: pairs at most when both arms share a start, and when every visit restarts
    default_pairs: tuple[int, int]
    wall_time_s: float | None
    margin: float | None


def run_compare(
    store: Store, asked: CompareAsked, flag: StopFlag, note: Callable[[str], None]
) -> Compared:
    """Measure and store; the answer is an event of the study as well.

    Raises ``UserError`` for arms, levels or studies that are not there.
    """
    view = home_study(store, asked.study, asked.whats)
    plan = stored_plan(view)
    arms = [resolve_arm(store, view, plan.study, what) for what in asked.whats]
    levels = _levels(plan, arms, asked.concurrency)
    for what in asked.whats:
        _same_model(plan, what)
    kind = plan.study.backend.kind
    with hold_machine(kind, f"comparison in study {view.name}", note, flag.check):
        backend = create_backend(
            kind,
            BackendContext(
                study=plan.study,
                study_dir=plan.base_dir,
                machine=plan.machine,
                predictor=plan.model.predictor,
                log_dir=Path.cwd() / "autotune-logs" / plan.study.name,
            ),
        )
        try:
            return _measure(
                plan, view, store, backend, (arms[0], arms[1]), levels, asked, flag, note
            )
        finally:
            backend.close()


def _measure(
    plan: Plan,
    view: StudyView,
    store: Store,
    backend: Backend,
    arms: tuple[Arm, Arm],
    levels: tuple[int, ...],
    asked: CompareAsked,
    flag: StopFlag,
    note: Callable[[str], None],
) -> Compared:
    first, second = arms
    apart = any(
        backend.group(first.knobs[level]) != backend.group(second.knobs[level]) for level in levels
    )
    most = asked.max_pairs or asked.default_pairs[apart]
    note(f"A = {first.label()}")
    note(f"B = {second.label()}")
    note(
        f"study {view.name}, backend {backend.name}, concurrency {', '.join(map(str, levels))}; "
        f"at most {most} pairs in turns"
        + (f", a fresh start for each of the {2 * most} visits" if apart else "")
    )
    if all(first.knobs[level] == second.knobs[level] for level in levels):
        note("A and B are the same knobs: this is an A/A test, a difference would be a false one")
    history = History.read(store, view.id)
    taken: dict[tuple[str, int], int] = {}
    for row in history.repeats:
        key = (row.knobs_id, row.concurrency)
        taken[key] = taken.get(key, 0) + 1
    bench = Bench(
        backend=backend,
        store=store,
        study_id=view.id,
        workloads=plan.workloads,
        measure=plan.study.measure,
        check_stop=flag.check,
        on_repeat=lambda trial, record: None,
        num_taken=taken,
    )
    run = CompareRun(plan, view, store, bench, note)
    budget = CompareBudget(max_pairs=most, wall_time_s=asked.wall_time_s)
    # another comparison draws other coins
    seed = plan.study.seed + store.count_events(view.id, "compare")
    found = run.run(first, second, levels, budget, asked.margin, seed)
    store.add_event(view.id, "compare", compared_mapping(found))
    return found


def _same_model(plan: Plan, what: str) -> None:
    """Refuse a launch config of another model or device: its knobs would be measured on ours."""
    if not is_file(what):
        return
    data = read_yaml(Path(what)).data
    if isinstance(data, dict) and "space" in data:
        return
    block = launch_block(data, Path(what))
    ours = plan.study.backend.args.get("device")
    theirs = block.get("device")
    if ours is not None and theirs is not None and ours != theirs:
        raise UserError(
            f"{what} is for device {theirs}, and study {plan.study.name} measures on {ours}"
        )
    target = dict(block["target"])
    if target.get("path") is not None:
        target["path"] = (Path(what).resolve().parent / target["path"]).resolve()
    try:
        shape = ModelShape.load(config_folder(ModelRef.model_validate(target)))
    except (UserError, ValueError):
        # its folder is elsewhere: the name has to do
        return
    if shape != plan.model.predictor.target:
        name = block["target"].get("path") or block["target"].get("shape")
        raise UserError(
            f"{what} is for another model ({name}) than study {plan.study.name} measures: its "
            "numbers would not be those of its own model"
        )


def _levels(plan: Plan, arms: list[Arm], asked: int | None) -> tuple[int, ...]:
    known = plan.study.workload.concurrency
    if asked is not None and asked not in known:
        listed = ", ".join(map(str, known))
        raise UserError(f"study {plan.study.name} has no concurrency {asked}; it has {listed}")
    both = [level for level in known if all(level in arm.knobs for arm in arms)]
    levels = [level for level in both if asked in (None, level)]
    if not levels:
        sides = "; ".join(f"{arm.name}: {', '.join(map(str, sorted(arm.knobs)))}" for arm in arms)
        raise UserError(f"A and B have no concurrency in common to compare at ({sides})")
    return tuple(levels)
