"""The simulated host: deterministic, drawn, noisy as it says, hidden from the predictor."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from contract_harness import (
    context_of,
    knobs,
    measure_some,
    predictor_of,
    sim_harness,
    study_of,
    workload_of,
)

from autotune.backends import sim_backend
from autotune.backends.base import BackendFailure
from autotune.backends.registry import create_backend
from autotune.backends.sim_acceptance import AcceptanceDraws, HiddenAcceptance, draft_tree
from autotune.backends.sim_noise import STEP_S, Drift, HostSpeed, outlier_factor, stream
from autotune.errors import UserError
from autotune.records import Measurement
from model.observations import AcceptanceCounts
from model.spec import Knobs
from model.tree import dynamic_tree

QUIET = {
    "noise_cv": 0.0,
    "drift_sd": 0.0,
    "outlier_rate": 0.0,
    "slow_host_share": 0.0,
}
CHAIN = knobs(2, "nccl", method="eagle3", steps=3, topk=1)
TREE = knobs(2, "nccl", method="eagle3", steps=4, topk=3, draft_tokens=9)
PLAIN = knobs(2, "nccl")


def session(tmp_path: Path, **args: object) -> list[Measurement]:
    made = sim_harness(tmp_path, **args)
    return [
        measured
        for each in (PLAIN, CHAIN, TREE)
        for measured in measure_some(made.backend, each, made.workload, 2)
    ]


def one(tmp_path: Path, each: Knobs, **args: object) -> Measurement:
    made = sim_harness(tmp_path, **args)
    return measure_some(made.backend, each, made.workload, 1)[0]


def test_equal_seeds_give_equal_sessions_to_the_last_bit(tmp_path: Path) -> None:
    assert session(tmp_path, seed=3) == session(tmp_path, seed=3)


def test_another_seed_is_another_host(tmp_path: Path) -> None:
    speeds = {one(tmp_path, CHAIN, seed=seed, **QUIET).tokens_per_s for seed in range(5)}
    assert len(speeds) == 5


def test_the_predictor_learns_nothing_of_the_hidden_constants(tmp_path: Path) -> None:
    predictor = predictor_of()
    study = study_of("sim", {"truth": {"constants_spread": 1.0}}, None)
    workload = workload_of(study)
    before = predictor.predict(CHAIN, workload)
    constants = predictor.calibration.id
    backend = create_backend("sim", context_of(study, tmp_path, predictor))
    measured = measure_some(backend, CHAIN, workload, 1)[0]
    assert predictor.predict(CHAIN, workload) == before
    assert predictor.calibration.id == constants
    assert measured.cycle_ms != pytest.approx(before.cycle_ms.median, rel=0.01)


def test_without_spread_noise_and_extra_terms_the_truth_is_the_prediction(tmp_path: Path) -> None:
    nothing = {
        "constants_spread": 0.0,
        "kernel_jump": 0.0,
        "cache_hit": 0.0,
        "expert_correlation": 0.0,
        "smooth_effect": 0.0,
    }
    study = study_of("sim", {**QUIET, "truth": nothing}, None)
    predictor = predictor_of()
    backend = create_backend("sim", context_of(study, tmp_path, predictor))
    workload = workload_of(study)
    measured = measure_some(backend, PLAIN, workload, 1)[0]
    predicted = predictor.predict(PLAIN, workload)
    for name, value in measured.terms_ms.items():
        assert value == pytest.approx(predicted.terms_ms[name].median, rel=1e-6), name


def test_a_predictor_that_has_learnt_meets_the_same_host(tmp_path: Path) -> None:
    study = study_of("sim", {}, None)
    counts = AcceptanceCounts(
        steps=3, topk=1, draft_tokens=4, num_verifies=900, accepted_by_depth=(300, 90, 20)
    )
    fresh = predictor_of()
    learnt = replace(
        fresh,
        acceptance=fresh.acceptance.update([counts]),
        calibration=fresh.calibration.with_values(sample_us=900.0),
    )
    first, second = (
        measure_some(
            create_backend("sim", context_of(study, tmp_path, predictor)),
            CHAIN,
            workload_of(study),
            1,
        )[0]
        for predictor in (fresh, learnt)
    )
    assert first == second


@pytest.mark.parametrize("jump", [0.0, 0.5])
def test_the_kernel_path_jumps_at_two_tokens(tmp_path: Path, jump: float) -> None:
    study = study_of("sim", {**QUIET, "truth": {"kernel_jump": jump}}, None)
    flat_study = study_of("sim", {**QUIET, "truth": {"kernel_jump": 0.0}}, None)

    def other_ms(of: object, concurrency: int) -> float:
        backend = create_backend("sim", context_of(of, tmp_path, predictor_of()))  # type: ignore[arg-type]
        (measured,) = measure_some(backend, PLAIN, workload_of(study, concurrency), 1)
        return measured.terms_ms["decode.other"]

    assert other_ms(study, 1) == pytest.approx(other_ms(flat_study, 1))
    ratio = other_ms(study, 2) / other_ms(flat_study, 2)
    assert (ratio > 1.2) if jump else (ratio == pytest.approx(1.0))


def test_acceptance_is_drawn_around_the_value_of_the_tree() -> None:
    hidden = HiddenAcceptance(
        top1=0.6,
        decay=0.95,
        rank_mass=0.8,
        rank_exponent=1.5,
        request_spread=0.0,
        verify_spread=0.0,
    )
    rates = np.array([hidden.rank_probabilities(depth, 0.0, 3) for depth in range(1, 5)])
    expected = dynamic_tree(rates, TREE.steps, TREE.topk).accept_length(TREE.draft_tokens)
    tree = draft_tree(TREE, hidden)
    draws = AcceptanceDraws(tree, hidden, 0.0, stream(1, "test"))
    emitted = [draws.verify() + 1 for _ in range(6000)]
    assert np.mean(emitted) == pytest.approx(expected, abs=4 * np.std(emitted) / 6000**0.5)
    assert len(set(emitted)) > 3


def test_a_tree_holds_the_asked_nodes_and_every_parent() -> None:
    hidden = HiddenAcceptance(
        top1=0.5,
        decay=1.0,
        rank_mass=0.8,
        rank_exponent=1.5,
        request_spread=0.0,
        verify_spread=0.0,
    )
    tree = draft_tree(TREE, hidden)
    reached = [0]
    for node in reached:
        reached.extend(tree.children[node].values())
    assert sorted(reached) == list(range(TREE.draft_tokens))


def test_repeats_differ_in_acceptance_and_speed(tmp_path: Path) -> None:
    made = sim_harness(tmp_path, **QUIET)
    taken = measure_some(made.backend, CHAIN, made.workload, 6)
    assert taken[0].acceptance != taken[1].acceptance
    # two repeats may end after the same number of cycles, six do not
    assert len({repeat.tokens_per_s for repeat in taken}) > 1


def test_a_repeat_does_not_depend_on_what_was_measured_before(tmp_path: Path) -> None:
    alone = one(tmp_path, TREE, **QUIET)
    made = sim_harness(tmp_path, **QUIET)
    measure_some(made.backend, CHAIN, made.workload, 3)
    after = measure_some(made.backend, TREE, made.workload, 1)[0]
    assert after.tokens_per_s == alone.tokens_per_s
    assert after.acceptance == alone.acceptance


def test_drift_has_the_asked_spread_and_correlation_time() -> None:
    drift = Drift(5, 0.006, 300.0)
    path = np.log([drift.factor(step * STEP_S) for step in range(40_000)])
    assert np.std(path) == pytest.approx(0.006, rel=0.1)
    lag = int(300.0 / STEP_S)
    correlation = np.corrcoef(path[:-lag], path[lag:])[0, 1]
    assert correlation == pytest.approx(np.exp(-1), abs=0.06)


def test_drift_is_a_function_of_time_alone() -> None:
    forward, backward = Drift(5, 0.01, 60.0), Drift(5, 0.01, 60.0)
    late = backward.factor(5000.0)
    assert [forward.factor(t) for t in (0.0, 17.0, 5000.0)][-1] == late


def test_a_slow_host_stays_slow_for_a_while_and_for_its_share_of_the_time() -> None:
    host = HostSpeed(2, 0.3, 1.5, 200.0)
    path = np.array([host.factor(step * STEP_S) for step in range(60_000)])
    assert set(path) == {1.0, 1.5}
    assert np.mean(path > 1) == pytest.approx(0.3, abs=0.03)
    assert np.mean(path[:-1] != path[1:]) < 0.05


def test_a_slow_host_is_felt_only_by_what_the_host_launches(tmp_path: Path) -> None:
    graphed = Knobs.of({**PLAIN.values(), "cuda_graph.decode": True})
    slow = {**QUIET, "slow_host_share": 1.0, "slow_host_factor": 2.0}
    for each, ratio in ((PLAIN, 2.0), (graphed, 1.0)):
        fast_run, slow_run = one(tmp_path, each, **QUIET), one(tmp_path, each, **slow)
        felt = slow_run.terms_ms["decode.moe"] / fast_run.terms_ms["decode.moe"]
        assert felt == pytest.approx(ratio)
        assert slow_run.terms_ms["host_gap"] / fast_run.terms_ms["host_gap"] == pytest.approx(2.0)


def test_outliers_come_at_their_rate_and_only_slow_down() -> None:
    draws = stream(0, "outliers")
    factors = np.array([outlier_factor(draws, 0.02, 0.1) for _ in range(20_000)])
    hit = factors > 1
    assert hit.mean() == pytest.approx(0.02, abs=0.004)
    assert factors[hit].min() >= 1.1
    assert factors[hit].max() > 1.3


@pytest.mark.parametrize("kind", ["oom", "setting_not_effective", "incorrect"])
def test_a_failure_of_the_knobs_strikes_its_share_of_knobs_every_time(
    tmp_path: Path, kind: str
) -> None:
    made = sim_harness(tmp_path, failures={kind: 0.5}, **QUIET)
    struck = []
    for channels in range(1, 41):
        each = Knobs.of({**CHAIN.values(), "nccl.max_channels": channels})
        first, second = measure_some(made.backend, each, made.workload, 2)
        kinds = {None if m.failure is None else m.failure.kind for m in (first, second)}
        assert len(kinds) == 1
        struck.append(kinds == {kind})
    assert 10 <= sum(struck) <= 30


def test_a_crash_strikes_single_repeats(tmp_path: Path) -> None:
    made = sim_harness(tmp_path, failures={"crash": 0.3, "hang": 0.1}, hang_timeout_s=50.0)
    measured = measure_some(made.backend, CHAIN, made.workload, 100)
    kinds = [None if m.failure is None else m.failure.kind for m in measured]
    assert 18 <= kinds.count("crash") <= 42
    assert 2 <= kinds.count("hang") <= 20
    hung = next(m for m in measured if m.failure is not None and m.failure.kind == "hang")
    assert (hung.ended - hung.started).total_seconds() == pytest.approx(50.0)


def test_a_start_that_crashes_raises_the_failure(tmp_path: Path) -> None:
    made = sim_harness(tmp_path, failures={"start_crash": 1.0})
    with pytest.raises(BackendFailure) as caught:
        made.backend.open(made.backend.group(CHAIN))
    assert (caught.value.failure.kind, caught.value.failure.stage) == ("crash", "start")


def test_knobs_that_do_not_fit_run_out_of_memory(tmp_path: Path) -> None:
    measured = one(tmp_path, CHAIN, truth={"hidden_memory_gib": 90.0})
    assert measured.failure is not None
    assert measured.failure.kind == "oom"
    assert "GiB per rank needed" in measured.failure.message


def test_a_scaled_clock_really_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = sim_harness(tmp_path, clock=0.001, start_s=100.0)
    slept: list[float] = []
    monkeypatch.setattr(sim_backend.time, "sleep", slept.append)
    made.backend.open(made.backend.group(CHAIN))
    assert sum(slept) == pytest.approx(0.1, rel=0.5)


@pytest.mark.parametrize(
    ("args", "match"),
    [
        pytest.param(
            {"noise": 1}, r"backend\.args\.noise: unknown argument; known: seed", id="unknown"
        ),
        pytest.param({"noise_cv": "big"}, r"backend\.args\.noise_cv: .*'big'", id="type"),
        pytest.param({"failures": {"oom": 2.0}}, r"backend\.args\.failures\.oom", id="nested"),
    ],
)
def test_bad_arguments_are_named(tmp_path: Path, args: dict[str, object], match: str) -> None:
    with pytest.raises(UserError, match=match):
        sim_harness(tmp_path, **args)


def test_without_a_model_the_simulator_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="sim needs a performance model"):
        create_backend("sim", context_of(study_of("sim", {}, None), tmp_path))


def test_an_unknown_backend_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="unknown backend 'vlm'; known: engine, replay, sim"):
        create_backend("vlm", context_of(study_of("vlm", {}, None), tmp_path))
