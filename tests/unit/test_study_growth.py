"""What a study does itself per trial does not grow with its trials."""

import itertools
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
from study_files import sim_study, write_study

from autotune.columns import Columns
from autotune.modelling import fitted_trials
from autotune.observing import Observer
from autotune.plan import create_study, make_plan
from autotune.records import Acceptance, Measurement
from autotune.search import Forecast, Search
from autotune.store.store import Store
from autotune.study_file import load_study
from model.spec import Knobs

LEVEL = 4


def test_every_trial_is_fitted_while_they_are_few_and_a_twelfth_more_afterwards() -> None:
    assert [fitted_trials(n) for n in range(1, 25)] == list(range(1, 25))
    sizes = sorted({fitted_trials(n) for n in range(1, 400)})
    late = [(a, b) for a, b in itertools.pairwise(sizes) if a >= 24]
    assert all(b - a == max(1, a // 12) for a, b in late)
    # no more than a twelfth of the trials (and one) is ever left out
    assert all(fitted_trials(n) > n * 11 / 12 - 1 for n in range(1, 400))
    assert len(sizes) < 65


def knobs_of(steps: int, **more: object) -> Knobs:
    """A chain, with further knobs."""
    return Knobs.of({"speculation.method": "eagle3", "speculation.steps": steps,
                     "speculation.topk": 1, **more})  # type: ignore[dict-item]  # fmt: skip


def store_trials(folder: Path, repeated: list[Knobs]) -> tuple[Store, int, Observer]:
    """A study whose trials, one of each knobs, were measured once at one level."""
    values = sim_study()
    values["workload"]["concurrency"] = [LEVEL]
    loaded = load_study(write_study(folder, values))
    plan = make_plan(loaded)
    store = Store.create(f"sqlite:///{folder}/a.db")
    view = create_study(loaded, plan, store)
    worker, now = store.add_worker(view.id), datetime.now(UTC)
    for number, knobs in enumerate(repeated):
        trial = store.claim_trial(
            study_id=view.id, claim=f"t{number}", role="search", origin="test", knobs=knobs,
            group_id=None, worker_id=worker,
        )  # fmt: skip
        assert trial is not None
        store.set_number(trial, number)
        counts = Acceptance(
            num_verifies=100, num_drafted=200, num_accepted=90, histogram=(40, 30, 30),
            accepted_by_depth=(60, 30)[: knobs.steps],
            accepted_by_depth_rank=(),
        )  # fmt: skip
        store.add_measurement(
            view.id,
            trial,
            Measurement(
                trial=number, knobs_id=knobs.id, concurrency=LEVEL, repeat=0, order=number,
                started=now, ended=now, tokens_per_s=100.0, cycle_ms=80.0,
                terms_ms={"verify.moe": 20.0}, distinct_experts=30.0, acceptance=counts,
            ),
        )  # fmt: skip
        store.finish_trial(trial, None)
    return store, view.id, Observer(plan.model.target, plan.workloads)


def test_the_fit_sees_each_tree_and_load_once_however_many_trials_share_them(
    tmp_path: Path,
) -> None:
    twice = [knobs_of(1), knobs_of(2), knobs_of(2, **{"nccl.proto": "LL"})]
    store, study_id, observer = store_trials(tmp_path, twice)
    trials = store.trials(study_id)
    told = observer.observed(store, trials)
    counts = {count.steps: count for count in told.counts}
    assert len(told.counts) == 2
    assert (counts[1].num_verifies, counts[2].num_verifies) == (100, 200)
    assert counts[2].accepted_by_depth == (120, 60)
    # a term of each knobs, but one observation of the experts for each number of tokens
    assert sum(hasattr(one, "term") for one in told.observations) == 3
    assert sum(hasattr(one, "distinct") for one in told.observations) == 2


def test_a_finished_trial_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, study_id, observer = store_trials(tmp_path, [knobs_of(1), knobs_of(2)])
    trials = store.trials(study_id)
    asked: list[list[int]] = []
    read = store.measurements

    def counted(ids: list[int]) -> list[Measurement]:
        asked.append(list(ids))
        return read(ids)

    monkeypatch.setattr(store, "measurements", counted)
    first = observer.observed(store, trials[:1])
    both = observer.observed(store, trials)
    assert asked == [[trials[0].id], [trials[1].id]]
    assert observer.observed(store, trials) == both
    assert len(both.observations) > len(first.observations)
    assert len(asked) == 2


def test_columns_answer_as_the_knobs_themselves() -> None:
    pool = [
        knobs_of(1), knobs_of(2), knobs_of(3, **{"nccl.algo": "ring"}), Knobs.of({}),
        knobs_of(2, **{"sglang.attention_backend": "fa3"}),
    ]  # fmt: skip
    columns = Columns(pool)
    for name in {name for knobs in pool for name in knobs.values()}:
        for value in {knobs.values().get(name) for knobs in pool}:
            expected = [knobs.values().get(name) == value for knobs in pool]
            assert columns.equal(name, value).tolist() == expected
    wanted = pool[2].values()
    differing = [
        sum(value != wanted.get(name) for name, value in knobs.values().items()) for knobs in pool
    ]
    # the extra knob that pool[2] lacks is one more difference
    assert columns.num_differing(wanted).tolist() == differing
    assert columns.equal("no.such", None).all()
    assert not columns.equal("no.such", 1).any()


def test_a_search_says_what_else_than_memory_keeps_everything_out() -> None:
    class NoDivision:
        """A model of a target that cannot be divided like this."""

        def forecast(self, knobs: object) -> None:
            return None

        def why_not(self, knobs: Knobs) -> str:
            return "64 heads can't be divided by 3"

    search = Search.__new__(Search)
    search.pool = [knobs_of(1), knobs_of(2)]
    search.forecaster = NoDivision()
    forecast = Forecast(
        log_speed={}, log_sd={}, feasible=np.zeros(2, dtype=bool), memory_gib=np.array([9.0, 4.0])
    )
    refused = np.array([True, True])
    search._note_infeasible(forecast, refused)
    search._note_reason(forecast, refused)
    assert search.exhausted().startswith("nothing is left to measure: 2 configurations can't run")
    assert "64 heads can't be divided by 3" in search.exhausted()
    assert "GiB" not in search.exhausted()
