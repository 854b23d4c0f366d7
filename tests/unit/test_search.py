"""Proposals are possible, new, and better than chance; a misleading model loses its say."""

import math
from datetime import UTC, datetime
from types import SimpleNamespace

import numpy as np
import pytest

from autotune.history import History
from autotune.residual import believe, encode
from autotune.search import MAX_SCREENING, Forecast, Goal, Search
from autotune.space import baseline_knobs, build_space
from autotune.store.views import RepeatView, TrialView
from model.spec import Knobs

LISTED = {
    "speculation.method": ("off", "eagle3"),
    "speculation.steps": (1, 2, 3, 4, 5, 6),
    "speculation.topk": (1, 2, 4),
    "speculation.draft_tokens": (4, 8, 12, 16),
    "collectives.backend": ("nccl", "one_shot"),
    "cuda_graph.verify": (False, True),
    "host.numa_bind": (False, True),
}
SPACE = build_space(LISTED, SimpleNamespace(num_gpus=8))
BASELINE = baseline_knobs(SPACE, LISTED)
NOW = datetime(2030, 1, 1, tzinfo=UTC)


def true_speed(knobs: Knobs) -> float:
    """A smooth truth with its optimum at steps 3, a tree of 8 tokens, graphs and one_shot."""
    if knobs.method == "off":
        return 50.0
    speed = 80.0 - 6.0 * (knobs.steps - 3) ** 2 - 0.8 * abs(knobs.draft_tokens - 8)
    speed += 8.0 * knobs.graph_verify + 5.0 * (knobs.collectives_backend == "one_shot")
    return max(speed - 4.0 * knobs.numa_bind, 10.0)


class Model:
    """Predicts a distorted truth."""

    def __init__(self, distort=lambda knobs, speed: speed) -> None:
        self._distort = distort

    def forecast(self, knobs):
        values = [math.log(self._distort(k, true_speed(k))) for k in knobs]
        size = len(knobs)
        return Forecast(
            log_speed={1: np.array(values)},
            log_sd={1: np.full(size, 0.15)},
            feasible=np.array([k.steps != 6 for k in knobs]),
        )


class NoModel:
    def forecast(self, knobs):
        return None


def search_with(forecaster, suggest=dict, group_of=lambda knobs: "g") -> Search:
    return Search(
        space=SPACE,
        baseline=BASELINE,
        levels=(1,),
        weights={1: 1.0},
        seed=0,
        metric=Goal("tokens_per_s", True),
        forecaster=forecaster,
        suggest=suggest,
        group_of=group_of,
    )


def history_of(measured: list[tuple[Knobs, str, str]]) -> History:
    trials, repeats = [], []
    for number, (knobs, role, origin) in enumerate(measured):
        trials.append(
            TrialView(
                id=number,
                study_id=1,
                number=number,
                role=role,
                origin=origin,
                knobs=knobs,
                group_id="g",
                state="complete",
                worker_id=1,
                attempts=1,
                started=NOW,
                ended=NOW,
                failure_kind=None,
            )
        )
        rng = np.random.default_rng(number)
        for repeat in range(3):
            speed = true_speed(knobs) * math.exp(0.005 * rng.standard_normal())
            repeats.append(
                RepeatView(
                    trial_id=number,
                    knobs_id=knobs.id,
                    concurrency=1,
                    repeat=repeat,
                    order=len(repeats),
                    started=NOW,
                    ended=NOW,
                    tokens_per_s=speed,
                    ttft_ms=None,
                    tpot_ms=None,
                    accept_length=None,
                    output_check="exact",
                    failure_kind=None,
                )
            )
    return History(trials=tuple(trials), repeats=tuple(repeats))


def run(search: Search, num_trials: int):
    """Trials as (knobs, role, origin), the baseline first."""
    measured = [(BASELINE, "baseline", "")]
    for _ in range(num_trials):
        proposal = search.propose(history_of(measured), "g")
        if proposal is None:
            break
        measured.append((proposal.knobs, proposal.role, proposal.origin))
    return measured


@pytest.mark.parametrize("forecaster", [Model(), NoModel()], ids=["model", "no-model"])
def test_only_possible_unmeasured_knobs_are_proposed(forecaster) -> None:
    rng = np.random.default_rng(0)

    def suggest():
        return SPACE.at(int(rng.integers(SPACE.size))).values()

    measured = run(search_with(forecaster, suggest), 20)
    searched = [knobs for knobs, role, _ in measured if role == "search"]
    assert len(set(searched)) == len(searched) >= 12
    assert all(knobs in SPACE for knobs in searched)
    assert BASELINE not in searched


def test_what_does_not_fit_in_memory_is_never_proposed() -> None:
    measured = run(search_with(Model(), lambda: {"speculation.steps": 6}), 15)
    assert all(knobs.steps != 6 for knobs, _, _ in measured)


def test_screening_starts_at_the_models_best_and_turns_each_switch() -> None:
    measured = run(search_with(Model(), lambda: BASELINE.values()), MAX_SCREENING)
    screened = [knobs for knobs, _, origin in measured if origin.startswith("screening")]
    best = max((SPACE.at(i) for i in range(SPACE.size)), key=true_speed)
    assert screened[0] == best
    assert {knobs.graph_verify for knobs in screened} == {True, False}
    assert {knobs.collectives_backend for knobs in screened} == {"nccl", "one_shot"}
    assert {best.steps - 1, best.steps + 1} <= {knobs.steps for knobs in screened}


@pytest.mark.parametrize(
    ("distort", "share"),
    [
        pytest.param(lambda k, s: s * 0.4, 0.99, id="wrong-by-a-constant"),
        pytest.param(lambda k, s: s * (1.3 if k.topk > 1 else 0.8), 0.97, id="loves-trees"),
        pytest.param(lambda k, s: 50 + 50 * int(k.id[:6], 16) / 16**6, 0.9, id="useless"),
    ],
)
def test_the_optimum_is_found_in_spite_of_a_wrong_model(distort, share) -> None:
    rng = np.random.default_rng(1)

    def suggest():
        return SPACE.at(int(rng.integers(SPACE.size))).values()

    measured = run(search_with(Model(distort), suggest), 30)
    best = max(true_speed(SPACE.at(i)) for i in range(SPACE.size))
    assert max(true_speed(knobs) for knobs, _, _ in measured) >= share * best


def test_every_third_trial_after_screening_measures_a_leader_again() -> None:
    measured = run(search_with(Model(), lambda: BASELINE.values()), 20)
    roles = [role for _, role, _ in measured[1:]]
    again = [i for i, role in enumerate(roles) if role == "replicate"]
    assert again
    assert all(index % 3 == 0 for index in again)
    speeds = sorted((true_speed(k) for k, role, _ in measured if role == "search"), reverse=True)
    replicated = [true_speed(k) for k, role, _ in measured if role == "replicate"]
    assert min(replicated) >= speeds[8]


def test_without_starts_left_only_the_open_group_is_proposed() -> None:
    search = search_with(Model(), lambda: {}, group_of=lambda k: k.collectives_backend)
    proposal = search.propose(history_of([(BASELINE, "baseline", "")]), "nccl", may_open=False)
    assert proposal is not None
    assert proposal.knobs.collectives_backend == "nccl"


def test_a_dear_restart_keeps_the_search_in_the_open_group() -> None:
    search = search_with(Model(), lambda: BASELINE.values(), lambda k: k.collectives_backend)
    measured = run(search, MAX_SCREENING + 1)
    for group in ("nccl", "one_shot"):
        chosen = [
            search._by_improvement(
                history_of(measured),
                search.forecaster.forecast(search.pool),
                search._usable({k.id for k, _, _ in measured}, group, True),
                group,
                cost_ratio=1e6,
            )
        ]
        assert chosen[0].knobs.collectives_backend == group


def test_a_measured_space_ends_the_search() -> None:
    everything = [(SPACE.at(i), "search", "") for i in range(SPACE.size)]
    assert search_with(Model()).propose(history_of(everything), "g") is None


def test_belief_returns_to_the_measurements_where_they_are() -> None:
    pool = [SPACE.at(i) for i in range(0, SPACE.size, 3)]
    truth = np.log([true_speed(k) for k in pool])
    rows = sorted(np.random.default_rng(2).choice(len(pool), len(pool) // 3, replace=False))
    belief = believe(encode(pool), rows, truth[rows], np.full(len(rows), 0.002), truth * 0 + 4.0)
    assert np.abs(belief.mean[rows] - truth[rows]).max() < 0.05
    others = np.setdiff1d(np.arange(len(pool)), rows)
    error = np.sqrt(np.mean((belief.mean[others] - truth[others]) ** 2))
    assert error < 0.5 * truth.std()
    assert belief.sd[others].mean() > belief.sd[rows].mean()
    inside = np.abs(belief.mean[others] - truth[others]) < 2 * belief.sd[others]
    assert inside.mean() > 0.85


@pytest.mark.parametrize(
    ("limit_gib", "named"),
    [(0.5, "constraints.max_memory_gib 0.5"), (None, "the GPU's memory")],
    ids=["constraint", "gpu"],
)
def test_a_search_without_room_names_what_is_too_small_and_by_how_much(
    limit_gib: float | None, named: str
) -> None:
    search = Search.__new__(Search)
    search.num_infeasible = 0
    assert "measured" in search.exhausted()
    forecast = Forecast(
        log_speed={}, log_sd={}, feasible=np.zeros(3, dtype=bool),
        memory_gib=np.array([9.0, 4.25, 8.0]), limit_gib=limit_gib,
    )  # fmt: skip
    search._note_infeasible(forecast, np.array([True, True, False]))
    assert search.exhausted() == (
        f"nothing is left to measure: 2 configurations are predicted not to fit {named}; the least "
        "needs 4.25 GiB of a GPU (`autotune predict` tells each)"
    )
