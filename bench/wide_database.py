"""A database of many small trials, every knobs its own: written in bulk, times made up."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
from explain_database import add_trial, make_study
from sqlalchemy import insert

from autotune.records import Measurement
from autotune.space import build_space
from autotune.store import codec
from autotune.store.session import new_id
from autotune.store.tables import MEASUREMENT, TRIAL
from autotune.study_file import load_study

ROOT = Path(__file__).parents[1]
_STUDY = ROOT / "studies" / "kimi-k2.5-8x-rtx-pro-6000.yaml"


def wide_database(folder: Path, num_trials: int, repeats: int) -> str:
    """URL of a study with ``num_trials`` distinct knobs, ``repeats`` measurements each."""
    made = make_study(folder, name="wide")
    add_trial(made, made.plan.baseline, role="baseline")
    study = load_study(_STUDY).study
    space = build_space(study.space, made.plan.machine, lambda tp: None)
    level = next(iter(made.plan.workloads))
    template = made.store.measurements([made.store.trials(made.view.id)[0].id])[0]
    rng = np.random.default_rng(0)
    began = datetime(2026, 2, 1, tzinfo=UTC)
    order = 100
    with made.store.write() as session:
        for index, knobs in enumerate(space.sample(num_trials, 0)):
            row = insert(TRIAL).values(
                study_id=made.view.id,
                number=index + 1,
                claim=f"wide:{index}",
                role="search",
                origin="made",
                knobs_id=knobs.id,
                knobs=codec.knobs_to_json(knobs),
                group_id="g",
                state="complete",
                worker_id=made.worker,
                started=began + timedelta(seconds=index),
                ended=began + timedelta(seconds=index + 1),
            )
            trial = new_id(session.execute(row))
            speed = 100.0 * float(np.exp(rng.normal(0, 0.3)))
            for repeat in range(repeats):
                order += 1
                record = _record(template, knobs.id, index + 1, repeat, order, speed, rng)
                session.execute(
                    insert(MEASUREMENT).values(
                        study_id=made.view.id,
                        trial_id=trial,
                        record=record.model_dump(mode="json"),
                        failure_kind=None,
                        **{
                            name: getattr(record, name)
                            for name in (
                                "knobs_id", "repeat", "order", "started", "ended", "tokens_per_s",
                                "ttft_ms", "tpot_ms", "accept_length", "output_check",
                            )
                        },
                        concurrency=level,
                    )
                )  # fmt: skip
    made.store.close()
    return str(made.store.url)


def _record(
    template: Measurement,
    knobs_id: str,
    trial: int,
    repeat: int,
    order: int,
    speed: float,
    rng: np.random.Generator,
) -> Measurement:
    factor = float(np.exp(rng.normal(0, 0.02)))
    assert template.terms_ms is not None
    changes: dict[str, Any] = {
        "knobs_id": knobs_id,
        "trial": trial,
        "repeat": repeat,
        "order": order,
        "tokens_per_s": speed * factor,
        "terms_ms": {name: value / factor for name, value in template.terms_ms.items()},
    }
    return template.model_copy(update=changes)
