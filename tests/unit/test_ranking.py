"""The best predicted knobs of a large space are those of predicting all of it."""

from pathlib import Path

import numpy as np
import pytest

from autotune import ranking
from autotune.plan import Plan, make_plan
from autotune.ranking import best_predicted
from autotune.study_file import load_study

STUDIES = Path(__file__).parents[2] / "studies"


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(load_study(STUDIES / "h200-replay.yaml"))


@pytest.mark.parametrize("level", [1, 16])
@pytest.mark.parametrize("whole", [0, 10_000], ids=["a-block-at-a-time", "whole"])
def test_the_best_is_that_of_the_whole_space(
    plan: Plan, level: int, whole: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranking, "_WHOLE", whole)
    predictor, workload = plan.model.predictor, plan.workloads[level]
    pool = plan.space.sample(plan.space.size, 0)
    speeds = predictor.predict_many(pool, workload).tokens_per_s
    found = best_predicted(plan.space, predictor, workload, plan.baseline)
    assert found == pool[int(np.argmax(speeds))]


def test_a_large_space_is_searched_to_a_point_that_no_block_improves() -> None:
    large = make_plan(load_study(STUDIES / "kimi-k2.5-8x-rtx-pro-6000.yaml"))
    predictor, workload = large.model.predictor, large.workloads[1]
    found = best_predicted(large.space, predictor, workload, large.baseline)
    speed = predictor.predict_many([found], workload).tokens_per_s[0]
    assert large.space.size > ranking._WHOLE
    drawn = predictor.predict_many(large.space.sample(2000, 3), workload).tokens_per_s
    assert speed >= drawn.max()
    near = predictor.predict_many(list(large.space.neighbours(found)), workload).tokens_per_s
    assert speed >= near.max()
