"""What a study learns from counts that engines report: experts read, GPU memory taken."""

from datetime import UTC, datetime
from pathlib import Path

import pytest
from study_files import sim_study, write_study

from autotune.modelling import StudyModel
from autotune.plan import Plan, create_study, make_plan
from autotune.records import Measurement
from autotune.store.store import Store
from autotune.study_file import load_study
from model.spec import Knobs

LEVEL = 8


def learnt(
    folder: Path, limit_gib: float | None = None, **counted: float | None
) -> tuple[Plan, StudyModel]:
    """The model of a study in which the baseline was measured once, with these counts."""
    values = sim_study()
    values["workload"]["concurrency"] = [LEVEL]
    if limit_gib is not None:
        values["constraints"] = {"max_memory_gib": limit_gib}
    loaded = load_study(write_study(folder, values))
    plan = make_plan(loaded)
    store = Store.create(f"sqlite:///{folder}/a.db")
    view = create_study(loaded, plan, store)
    trial = store.claim_trial(
        study_id=view.id,
        claim="base",
        role="baseline",
        origin="test",
        knobs=plan.baseline,
        group_id=None,
        worker_id=store.add_worker(view.id),
    )
    assert trial is not None
    store.set_number(trial, 0)
    now = datetime.now(UTC)
    store.add_measurement(
        view.id,
        trial,
        Measurement(
            trial=0, knobs_id=plan.baseline.id, concurrency=LEVEL, repeat=0, order=0,
            started=now, ended=now, tokens_per_s=100.0, cycle_ms=80.0,
            terms_ms={"decode.moe": 20.0},
            **counted,
        ),
    )  # fmt: skip
    store.finish_trial(trial, None)
    model = plan.model
    assert model is not None
    model.learn(store, view.id)
    return plan, model


def routed(model: StudyModel) -> tuple[float, float]:
    constants = model.calibration.constants
    values = {c.name: c.value for c in constants}
    return values["routing_exponent"], values["routing_zipf"]


def test_counted_experts_move_the_routing_constants_and_nothing_does_without_them(
    tmp_path: Path,
) -> None:
    folders = [tmp_path / name for name in ("none", "few", "many")]
    for folder in folders:
        folder.mkdir()
    prior = routed(learnt(folders[0])[1])
    _, few = learnt(folders[1], distinct_experts=24.0)
    _, many = learnt(folders[2], distinct_experts=50.0)
    # 8 tokens of 8 experts each: skewed popularity reads fewer distinct ones
    assert routed(few)[1] > prior[1] + 0.05
    assert routed(many)[1] < prior[1] - 0.05


@pytest.mark.parametrize("counted", [70.0, 4.0], ids=["more-than-assigned", "fewer-than-one-token"])
def test_a_count_that_this_load_cannot_have_is_left_out(counted: float, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("none", "odd")]
    for folder in folders:
        folder.mkdir()
    assert routed(learnt(folders[1], distinct_experts=counted)[1]) == routed(learnt(folders[0])[1])


def test_the_memory_limit_is_judged_by_what_measured_configurations_took(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("predicted", "light", "heavy")]
    for folder in folders:
        folder.mkdir()
    plan, model = learnt(folders[0])
    chain = Knobs.of(
        {**plan.baseline.values(), "speculation.method": "eagle3", "speculation.steps": 2,
         "speculation.topk": 1, "cuda_graph.verify": True}
    )  # fmt: skip
    base, other = (model.predict(k)[LEVEL].memory_gib_per_gpu for k in (plan.baseline, chain))
    assert other > base
    between = (base + other) / 2
    _, model = learnt(folders[1], between, memory_gib=base - 2.0)
    assert model.forecast([chain]).feasible.tolist() == [True]
    _, model = learnt(folders[2], between + 2.0, memory_gib=base + 4.0)
    assert model.forecast([chain]).feasible.tolist() == [False]
    # without a measurement the prediction decides
    (tmp_path / "no").mkdir()
    assert learnt(tmp_path / "no", between)[1].forecast([chain]).feasible.tolist() == [False]
