"""From a study file to everything that the loop needs before the first measurement."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from autotune.backends.base import BackendContext
from autotune.backends.registry import create_backend
from autotune.errors import UserError
from autotune.history import History
from autotune.hosts import check_host, rank_problem, study_machine
from autotune.modelling import StudyModel, target_shape
from autotune.schemas import Study
from autotune.served import server_name
from autotune.space import Space, baseline_knobs, build_space
from autotune.store.store import Store
from autotune.store.views import StudyView
from autotune.store.workers import is_alive
from autotune.study_file import LoadedStudy, parse_study
from autotune.workloads import study_workloads
from model.machine import Machine
from model.spec import Knobs, Workload


@dataclass(frozen=True)
class Plan:
    """A study with everything resolved that it needs before the first measurement."""

    study: Study
    base_dir: Path
    machine: Machine
    workloads: Mapping[int, Workload]
    model: StudyModel
    space: Space
    baseline: Knobs


def make_plan(
    loaded: LoadedStudy,
    machine: Machine | None = None,
    workloads: Mapping[int, Workload] | None = None,
) -> Plan:
    """Check and resolve a study; raises ``UserError`` for what can't work.

    ``machine`` and ``workloads`` are those of a stored study; None resolves them here.
    """
    study = loaded.study
    host = machine or study_machine(study)
    _check_context(study)
    workloads = workloads or study_workloads(study)
    model = StudyModel(study, host, workloads, server_name(study, loaded.base_dir))
    space = build_space(study.space, host, rank_problem(study, host, model.target))
    return Plan(
        study=study,
        base_dir=loaded.base_dir,
        machine=host,
        workloads=workloads,
        model=model,
        space=space,
        baseline=baseline_knobs(space, study.space),
    )


def _check_context(study: Study) -> None:
    """Refuse prompts that are longer than the target allows."""
    spec, target = study.workload, target_shape(study)
    needed = spec.input_len + spec.output_len
    if needed > target.max_context:
        raise UserError(
            f"workload: input_len {spec.input_len} + output_len {spec.output_len} = {needed} "
            f"tokens, but {target.name} allows {target.max_context} (max_position_embeddings); "
            f"shorten one of them"
        )


def check_backend(plan: Plan) -> None:
    """Refuse, before anything is stored or started, a backend that can't work here.

    Raises ``UserError`` naming what the study asks for that this host or the backend cannot give.
    """
    context = BackendContext(
        study=plan.study,
        study_dir=plan.base_dir,
        machine=plan.machine,
        predictor=plan.model.predictor,
        log_dir=Path.cwd() / "autotune-logs" / plan.study.name,
    )
    check_host(plan.study, plan.machine)
    create_backend(plan.study.backend.kind, context).close()


def create_or_join(loaded: LoadedStudy, plan: Plan, store: Store) -> tuple[StudyView, bool]:
    """The study as it is stored, and whether this call stored it.

    Another process may start the same study at the same moment: one stores it, the other joins.
    """
    found = store.find_study(plan.study.name)
    if found is None:
        try:
            return create_study(loaded, plan, store), True
        except UserError:
            found = store.find_study(plan.study.name)
            if found is None:
                raise
    return found, False


def set_aside(view: StudyView, store: Store) -> str | None:
    """Free the name of a study in which nothing was measured; its new name, or None if it was.

    What failed stays on record. A corrected study file can then be started under its own name.
    """
    # imported here: it brings Optuna
    from autotune.ledger import forget

    now = datetime.now(UTC)
    if any(is_alive(worker, now) for worker in store.workers(view.id)):
        return None
    if any(row.failure_kind is None for row in History.read(store, view.id).repeats):
        return None
    # no study file can have this name
    name = f"{view.name}~{view.id}"
    store.rename_study(view.id, name)
    forget(store.url, view.name)
    return name


def create_study(loaded: LoadedStudy, plan: Plan, store: Store) -> StudyView:
    """Store a new study. Raises ``UserError`` when the name is taken."""
    return store.add_study(
        name=plan.study.name,
        text=loaded.source.text,
        label=loaded.source.label,
        base_dir=loaded.base_dir,
        machine=plan.machine.to_dict(),
        workloads=plan.workloads,
    )


def stored_plan(view: StudyView) -> Plan:
    """The plan of a stored study: its file as it was, and the machine it was started on."""
    loaded = parse_study(view.text, view.label, view.base_dir, view.name)
    machine = None if view.machine is None else Machine.from_dict(view.machine)
    return make_plan(loaded, machine, view.workloads)
