"""Predictions: single equals many, the space as an array, limits, inert knobs, bad input."""

import itertools
import math
import random

import numpy as np
import pytest

from bench.model_accuracy.story import CHAIN, GRAPHS, predictor, workload
from model.acceptance import AcceptanceModel
from model.calibration import default_calibration
from model.knobs_array import KnobsArray, enumerate_space
from model.machine import Machine, load_machine
from model.memory import memory_use
from model.predictor import Predictor
from model.shapes import DraftShape, ModelShape
from model.spec import CYCLE_TERMS, DECODE_TERMS, Knobs, Scalar

SPACE: dict[str, list[Scalar | None]] = {
    "speculation.method": ["off", "eagle3"],
    "speculation.steps": [1, 2, 3],
    "speculation.topk": [1, 2, 4],
    "speculation.draft_tokens": [2, 3, 4, 8, 16, 40],
    "parallel.tp": [8],
    "collectives.backend": ["nccl", "two_shot"],
    "nccl.proto": ["auto", "LL", "Simple"],
    "nccl.min_channels": ["auto", 8],
    "nccl.max_channels": ["auto", 4],
    "host.numa_bind": [False, True],
    "cuda_graph.verify": [True, False],
    "cuda_graph.draft": [True, False],
    "cuda_graph.decode": [True],
}


@pytest.fixture(scope="module")
def kimi() -> Predictor:
    return predictor("8x-rtx-pro-6000-switches")


def cpu_machine() -> Machine:
    return load_machine("studies/machines/cpu-2core.yaml")


def small(machine: Machine) -> Predictor:
    target = ModelShape.load("studies/shapes/qwen3-30b-a3b")
    draft = DraftShape.standard(target)
    calibration = default_calibration(machine)
    return Predictor(target, draft, machine, calibration, AcceptanceModel.prior())


def test_the_space_holds_what_knobs_of_would_make_each_once() -> None:
    names = list(SPACE)
    want = set()
    for values in itertools.product(*SPACE.values()):
        try:
            want.add(Knobs.of(dict(zip(names, values, strict=True))))
        except ValueError:
            continue
    got = list(enumerate_space(SPACE))
    assert len(got) == len(set(got))
    assert set(got) == want


def test_many_equals_one_by_one(kimi: Predictor) -> None:
    array = enumerate_space(SPACE)
    many = kimi.predict_many(array, workload(1))
    for index in random.Random(0).sample(range(len(array)), 12):
        one = kimi.predict(array[index], workload(1))
        got = many.cycle_ms_quantiles[:, index]
        want = [one.cycle_ms.low, one.cycle_ms.median, one.cycle_ms.high]
        np.testing.assert_allclose(got, want, rtol=0.02)
        speed = many.tokens_per_s_quantiles[:, index]
        interval = one.tokens_per_s
        want = [interval.low, interval.median, interval.high]
        np.testing.assert_allclose(speed, want, rtol=0.02)
        assert many.memory_gib[index] == pytest.approx(one.memory_gib_per_gpu)
        assert many.feasible[index] == one.feasible


def test_an_array_of_knobs_keeps_their_order(kimi: Predictor) -> None:
    knobs = [Knobs.of({**CHAIN, "speculation.steps": s, **GRAPHS}) for s in (3, 1, 2)]
    assert list(KnobsArray.of(knobs)) == knobs
    assert len(kimi.predict_many([], workload(1))) == 0


def test_terms_carry_the_names_of_the_spec_and_add_up(kimi: Predictor) -> None:
    chain = kimi.predict(Knobs.of({**CHAIN, "speculation.steps": 3, **GRAPHS}), workload(1))
    plain = kimi.predict(Knobs.of({"parallel.tp": 8, **GRAPHS}), workload(1))
    assert tuple(chain.terms_ms) == CYCLE_TERMS
    assert tuple(plain.terms_ms) == DECODE_TERMS
    for p in (chain, plain):
        total = sum(t.median for t in p.terms_ms.values())
        assert total == pytest.approx(p.cycle_ms.median, rel=1e-6)
        assert p.accept_length.low <= p.accept_length.median <= p.accept_length.high
        for name, bound in p.speed_of_light_ms.items():
            assert 0 <= bound <= p.terms_ms[name].median, name


def test_tokens_per_second_is_requests_times_accept_length_over_cycle(kimi: Predictor) -> None:
    p = kimi.predict(Knobs.of({**CHAIN, "speculation.steps": 3, **GRAPHS}), workload(8))
    want = 8 * p.accept_length.median / p.cycle_ms.median * 1e3
    assert p.tokens_per_s.median == pytest.approx(want, rel=0.02)


def test_more_tokens_or_requests_never_make_a_step_faster(kimi: Predictor) -> None:
    times = [
        kimi.predict(Knobs.of({**CHAIN, "speculation.steps": s, **GRAPHS}), workload(c))
        for s, c in ((1, 1), (3, 1), (5, 1), (5, 4), (5, 16))
    ]
    medians = [p.cycle_ms.median for p in times]
    assert medians == sorted(medians)


def test_a_launch_bound_verify_is_slower_and_bimodal(kimi: Predictor) -> None:
    graphed = Knobs.of({**CHAIN, "speculation.steps": 2, **GRAPHS})
    eager = Knobs.of({**graphed.values(), "cuda_graph.verify": False})
    a, b = kimi.predict(graphed, workload(1)), kimi.predict(eager, workload(1))
    assert b.cycle_ms.median > 1.2 * a.cycle_ms.median
    assert math.log(b.cycle_ms.high / b.cycle_ms.low) > 1.5 * math.log(
        a.cycle_ms.high / a.cycle_ms.low
    )


def test_what_does_not_fit_or_run_is_infeasible_with_a_reason(kimi: Predictor) -> None:
    base: dict[str, Scalar | None] = {"parallel.tp": 4, **GRAPHS}
    p = kimi.predict(Knobs.of(base), workload(1))
    assert not p.feasible
    assert p.infeasible_reason is not None
    assert "GiB per GPU (weights" in p.infeasible_reason
    p = kimi.predict(Knobs.of({**base, "parallel.tp": 16}), workload(1))
    assert p.infeasible_reason == "parallel.tp 16 is above the 8 GPUs of the machine"
    p = kimi.predict(Knobs.of({**base, "parallel.tp": 7}), workload(1))
    assert p.infeasible_reason is not None
    assert "does not divide the 64 heads" in p.infeasible_reason
    many = kimi.predict_many([Knobs.of(base), Knobs.of({**base, "parallel.tp": 8})], workload(1))
    assert many.feasible.tolist() == [False, True]
    assert many.best(1).tolist() == [1]


def test_a_cpu_machine_runs_gloo_ranks_and_nothing_else() -> None:
    p = small(cpu_machine())
    knobs = Knobs.of({**CHAIN, "parallel.tp": 2, "speculation.steps": 3,
                      "collectives.backend": "gloo"})  # fmt: skip
    got = p.predict(knobs, workload(1))
    assert got.feasible
    assert got.terms_ms["verify.allreduce"].median > 0
    refused = p.predict(Knobs.of({**knobs.values(), "collectives.backend": "nccl"}), workload(1))
    assert refused.infeasible_reason is not None
    assert "needs GPUs" in refused.infeasible_reason
    inert = p.predict(Knobs.of({**knobs.values(), "cuda_graph.verify": True}), workload(1)).inert
    assert [i.knob for i in inert] == ["cuda_graph.verify"]


def test_speculation_without_a_draft_is_refused(kimi: Predictor) -> None:
    bare = Predictor(kimi.target, None, kimi.machine, kimi.calibration, kimi.acceptance)
    knobs = Knobs.of({**CHAIN, "speculation.steps": 2})
    with pytest.raises(ValueError, match="needs a draft model"):
        bare.predict(knobs, workload(1))
    with pytest.raises(ValueError, match="needs a draft model"):
        bare.predict_many([knobs], workload(1))
    assert bare.predict(Knobs.of({"parallel.tp": 8}), workload(1)).feasible


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"speculation.stepz": [1]}, "unknown knob 'speculation.stepz'", id="name"),
        pytest.param({"speculation.steps": []}, "space.speculation.steps has no values", id="none"),
        pytest.param({"speculation.method": ["medusa"]}, "'medusa' is unknown", id="method"),
        pytest.param({"speculation.steps": [1.5]}, "not a whole number", id="fraction"),
        pytest.param(
            {"speculation.method": ["eagle3"], "speculation.topk": [2],
             "speculation.draft_tokens": [99]},
            "no possible knobs", id="impossible",
        ),
    ],
)  # fmt: skip
def test_an_impossible_space_is_refused(
    change: dict[str, list[Scalar | None]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        enumerate_space({**SPACE, **change})


def test_memory_counts_weights_cache_and_graphs(kimi: Predictor) -> None:
    target, draft = kimi.target, kimi.draft
    use = memory_use(
        target, draft, tp=np.array([8.0]), speculative=np.array([True]),
        draft_tokens=np.array([4.0]), num_graphs=np.array([4.0]), requests=2, max_context=1000,
        device=kimi.step.device(8),
    )  # fmt: skip
    assert draft is not None
    assert use.weights[0] == pytest.approx((target.weight_bytes + draft.weight_bytes) / 8)
    latent = 576 * 2 * target.layers * 2 * 1004
    assert use.kv_cache[0] > latent
    assert use.kv_cache[0] < 1.2 * latent
    assert use.graphs[0] == 2**30
