"""Speed of light and inert knobs."""

import pytest

from bench.model_accuracy.story import CHAIN, GRAPHS, predictor, workload
from model.predictor import Predictor
from model.spec import Knobs


@pytest.fixture(scope="module")
def kimi() -> Predictor:
    return predictor("8x-rtx-pro-6000-switches")


def test_speed_of_light_of_the_experts_is_their_bytes_over_dram(kimi: Predictor) -> None:
    bound = kimi.predict(Knobs.of({"parallel.tp": 8, **GRAPHS}), workload(1)).speed_of_light_ms
    shape = kimi.target
    routed = shape.moe_layers * shape.experts_per_token * shape.expert_bytes
    dense = 3 * shape.hidden * (shape.dense_intermediate + 60 * shape.shared_intermediate) * 2
    want = (routed + dense) / 8 / 1792e9 * 1e3
    assert bound["decode.moe"] == pytest.approx(want, rel=1e-6)
    # 122 messages of 14,336 bytes, each 2 * 7/8 over a link of 54-56 GB/s
    assert bound["decode.allreduce"] == pytest.approx(122 * 1.75 * 14336 / 55e9 * 1e3, rel=0.05)


def test_settings_equal_to_nccls_own_choice_are_inert(kimi: Predictor) -> None:
    knobs = Knobs.of({"parallel.tp": 8, **GRAPHS, "nccl.proto": "LL", "nccl.buffsize": 16 << 20})
    inert = {i.knob: i.reason for i in kimi.predict(knobs, workload(1)).inert}
    assert "nccl.buffsize" in inert
    assert "same all-reduce" in inert["nccl.buffsize"]
    changed = Knobs.of({"parallel.tp": 8, **GRAPHS, "nccl.proto": "Simple"})
    assert "nccl.proto" not in {i.knob for i in kimi.predict(changed, workload(1)).inert}


def test_an_inert_setting_does_not_change_the_prediction(kimi: Predictor) -> None:
    base = {**CHAIN, "speculation.steps": 2, **GRAPHS}
    plain = kimi.predict(Knobs.of(base), workload(1))
    for name, value in (("nccl.buffsize", 16 << 20), ("nccl.proto", "LL"), ("nccl.algo", "ring")):
        tuned = kimi.predict(Knobs.of({**base, name: value}), workload(1))
        if name in {i.knob for i in tuned.inert}:
            assert tuned.cycle_ms == plain.cycle_ms, name


def test_a_prediction_says_that_weights_are_read_cold(kimi: Predictor) -> None:
    notes = kimi.predict(Knobs.of({"parallel.tp": 8, **GRAPHS}), workload(1)).notes
    assert any("L2 residency" in note for note in notes)


def test_one_rank_has_nothing_to_reduce(kimi: Predictor) -> None:
    p = kimi.predict(Knobs.of({"parallel.tp": 1, "nccl.proto": "LL"}), workload(1))
    assert p.terms_ms["decode.allreduce"].median == pytest.approx(0.0, abs=1e-9)
    assert [i.reason for i in p.inert if i.knob == "nccl.proto"] == [
        "one rank has nobody to reduce with"
    ]
