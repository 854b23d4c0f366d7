"""Databases of made-up measurements for explain and diff: the model's times with noise."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from sqlalchemy import Insert, insert
from study_files import sim_study

from autotune.plan import Plan, make_plan
from autotune.records import Acceptance, Measurement, Provenance
from autotune.store.store import Store
from autotune.store.tables import MEASUREMENT
from autotune.store.views import NoiseFloor, StudyView
from autotune.study_file import parse_study
from model.spec import Knobs

SPACE: dict[str, Any] = {
    "speculation.method": ["off", "eagle3"],
    "speculation.steps": {"int": [1, 4]},
    "speculation.topk": [1, 2],
    "speculation.draft_tokens": [4, 6],
    "parallel.tp": 8,
    "cuda_graph.verify": [False, True],
    "cuda_graph.decode": [False, True],
    "nccl.max_channels": ["auto", 16],
    "nccl.proto": ["auto", "LL", "Simple"],
}


@dataclass
class Made:
    """A study in a database."""

    store: Store
    plan: Plan
    view: StudyView
    worker: int
    num_trials: int = 0


def make_study(folder: Path, name: str = "made", **changes: Any) -> Made:
    """A stored study without trials."""
    text = yaml.safe_dump(sim_study(name=name, space=SPACE, **changes))
    plan = make_plan(parse_study(text, "made.yaml", folder))
    store = Store.create(f"sqlite:///{folder}/made.db")
    view = store.add_study(
        name=name,
        text=text,
        label="made.yaml",
        base_dir=folder,
        machine=plan.machine.to_dict(),
        workloads=plan.workloads,
    )
    return Made(store=store, plan=plan, view=view, worker=store.add_worker(view.id))


def knobs_of(made: Made, **changes: Any) -> Knobs:
    """The study's baseline with knobs changed; ``__`` stands for the dot."""
    values = {name.replace("__", "."): value for name, value in changes.items()}
    return Knobs.of({**made.plan.baseline.values(), **values})


def add_trial(
    made: Made,
    knobs: Knobs,
    *,
    role: str = "search",
    repeats: int = 6,
    noise: float = 0.01,
    factors: dict[str, float] | None = None,
    speeds: Sequence[float] | None = None,
    provenance: Provenance | None = None,
    predict: bool = True,
    seed: int = 0,
) -> int:
    """A finished trial; its number. ``factors`` slow single terms against the model."""
    number = made.num_trials
    made.num_trials += 1
    trial = made.store.claim_trial(
        study_id=made.view.id,
        claim=f"{role}:{number}",
        role=role,
        origin="made",
        knobs=knobs,
        group_id="g",
        worker_id=made.worker,
    )
    assert trial is not None
    made.store.set_number(trial, number)
    for level, prediction in made.plan.model.predict(knobs).items():
        if predict:
            made.store.add_prediction(trial, prediction)
        for record in measurements(
            made, knobs, number, level, repeats, noise, factors or {}, speeds, seed
        ):
            made.store.add_measurement(made.view.id, trial, record)
    if provenance is not None:
        made.store.set_provenance(trial, provenance)
    made.store.finish_trial(trial, None)
    return number


def measurements(
    made: Made,
    knobs: Knobs,
    trial: int,
    level: int,
    repeats: int,
    noise: float,
    factors: dict[str, float],
    speeds: Sequence[float] | None = None,
    seed: int = 0,
) -> Iterable[Measurement]:
    """Repeats around the model's medians."""
    rng = np.random.default_rng((seed, trial, level))
    prediction = made.plan.model.predictor.predict(knobs, made.plan.workloads[level])
    started = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(minutes=trial)
    for repeat in range(repeats):
        terms = {
            name: term.median * factors.get(name, 1.0) * float(np.exp(rng.normal(0, noise)))
            for name, term in prediction.terms_ms.items()
        }
        cycle = sum(terms.values())
        length = prediction.accept_length.median
        # a batch ends with its slowest request, as the model has it
        speed = prediction.tokens_per_s.median * prediction.cycle_ms.median / cycle
        if speeds is not None:
            cycle *= speed / speeds[repeat % len(speeds)]
            speed = speeds[repeat % len(speeds)]
        yield Measurement(
            trial=trial,
            knobs_id=knobs.id,
            concurrency=level,
            repeat=repeat,
            order=-1,
            started=started,
            ended=started + timedelta(seconds=1),
            tokens_per_s=speed,
            tpot_ms=1e3 * level / speed,
            cycle_ms=cycle,
            terms_ms=terms,
            accept_length=length,
            acceptance=None if knobs.method == "off" else _acceptance(knobs),
            output_check="exact",
        )


def _acceptance(knobs: Knobs) -> Acceptance:
    """Of 1000 verifies, 0.6 of those that reach a depth accept one more."""
    by_depth = tuple(round(1000 * 0.6**depth) for depth in range(1, knobs.steps + 1))
    reached = (1000, *by_depth)
    histogram = tuple(
        reached[n] - (reached[n + 1] if n + 1 < len(reached) else 0) for n in range(len(reached))
    )
    first = 0.8
    ranks = tuple(
        (round(n * first), n - round(n * first)) if knobs.topk > 1 else (n,) for n in by_depth
    )
    return Acceptance(
        num_verifies=1000,
        num_drafted=1000 * (knobs.draft_tokens - 1),
        num_accepted=sum(by_depth),
        accepted_by_depth=by_depth,
        histogram=histogram,
        accepted_by_depth_rank=ranks,
    )


def fill(made: Made, num_measurements: int, repeats: int = 10) -> None:
    """Many trials at once: rows written in bulk, records as the store writes them."""
    pool = list(made.plan.space.sample(10_000, 0))
    levels = list(made.plan.workloads)
    per_trial = repeats * len(levels)
    order = 0
    for index in range(num_measurements // per_trial):
        knobs = pool[index % len(pool)]
        trial = made.store.claim_trial(
            study_id=made.view.id,
            claim=f"fill:{index}",
            role="search",
            origin="made",
            knobs=knobs,
            group_id="g",
            worker_id=made.worker,
        )
        assert trial is not None
        number = made.num_trials
        made.num_trials += 1
        made.store.set_number(trial, number)
        rows = []
        for level in levels:
            for record in measurements(made, knobs, number, level, repeats, 0.02, {}):
                rows.append(_row(made.view.id, trial, record, order))
                order += 1
        with made.store.write() as session:
            for row in rows:
                session.execute(row)
        made.store.finish_trial(trial, None)
    made.store.set_noise_floor(made.view.id, NoiseFloor(levels[0], 0.02, 6))


def _row(study: int, trial: int, record: Measurement, order: int) -> Insert:
    return insert(MEASUREMENT).values(
        study_id=study,
        trial_id=trial,
        knobs_id=record.knobs_id,
        concurrency=record.concurrency,
        repeat=record.repeat,
        order=order,
        started=record.started,
        ended=record.ended,
        tokens_per_s=record.tokens_per_s,
        ttft_ms=record.ttft_ms,
        tpot_ms=record.tpot_ms,
        accept_length=record.accept_length,
        output_check=record.output_check,
        failure_kind=None,
        record=record.model_copy(update={"order": order}).model_dump(mode="json"),
    )
