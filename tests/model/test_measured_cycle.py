"""Break-even with a measured verify and a measured plain step."""

from pathlib import Path

import pytest

from model.acceptance import AcceptanceModel
from model.calibration import default_calibration
from model.machine import load_machine
from model.measured_cycle import ChainNeeds, chain_needs, doubts
from model.observations import AcceptLength
from model.predictor import Predictor
from model.shapes import DraftShape, ModelShape
from model.spec import Knobs, Workload

ROOT = Path(__file__).parents[2]
LOAD = Workload(
    prompts="none",
    prompts_sha256="",
    chat_template=None,
    input_len=1000,
    output_len=2,
    context=1000,
    temperature=0.0,
    ignore_eos=True,
    seed=0,
    concurrency=1,
)
CHAIN = Knobs.of(
    {
        "speculation.method": "eagle3",
        "speculation.steps": 2,
        "speculation.topk": 1,
        "speculation.draft_tokens": 3,
        "parallel.tp": 8,
        **{f"cuda_graph.{phase}": True for phase in ("decode", "draft", "verify", "extend")},
    }
)


def needs(
    verify_ms: float, plain_ms: float = 12.1, tau: float | None = None
) -> tuple[ChainNeeds, ...]:
    return chain_needs(
        predictor(tau), CHAIN, LOAD, plain_step_ms=plain_ms, verify_ms=verify_ms, steps=(1, 2, 3)
    )


def predictor(tau: float | None = None) -> Predictor:
    host = load_machine(ROOT / "studies/machines/8x-rtx-pro-6000-switches.yaml")
    target = ModelShape.load(ROOT / "studies/shapes/kimi-k2.5")
    acceptance = AcceptanceModel.prior()
    if tau is not None:
        seen = AcceptLength(steps=2, topk=1, draft_tokens=3, accept_length=tau, rel_sd=0.01)
        acceptance = acceptance.update([seen])
    return Predictor(
        target, DraftShape.standard(target), host, default_calibration(host), acceptance
    )


def test_break_even_is_the_cycle_over_the_plain_step() -> None:
    for row in needs(29.0):
        assert row.needed.median == pytest.approx(row.cycle_ms.median / 12.1)
        assert row.cycle_ms.median == pytest.approx(row.verify_ms + row.rest_ms.median, rel=0.02)


def test_the_measured_depth_keeps_its_measured_verify_and_deeper_chains_take_longer() -> None:
    one, two, three = needs(29.0)
    assert two.verify_ms == 29.0
    assert one.verify_ms < two.verify_ms < three.verify_ms


def test_a_verify_as_slow_as_the_tokens_it_can_give_never_pays() -> None:
    assert needs(3.2 * 12.1)[1].p_pays == 0.0


def test_a_verify_as_fast_as_a_plain_step_pays_for_a_good_draft() -> None:
    assert needs(12.1, tau=1.9)[1].p_pays > 0.95


def test_a_measured_accept_length_carries_the_expectation() -> None:
    row = needs(19.0, tau=1.89)[1]
    assert row.accept_length.median == pytest.approx(1.89, abs=0.05)
    assert row.tokens_per_s.median == pytest.approx(1e3 * 1.89 / row.cycle_ms.median, rel=0.03)


@pytest.mark.parametrize("verify_ms", [0.0, -1.0, float("inf"), float("nan")])
def test_times_that_nobody_can_measure_are_refused(verify_ms: float) -> None:
    with pytest.raises(ValueError, match="verify of"):
        needs(verify_ms)


@pytest.mark.parametrize(
    ("plain_ms", "verify_ms", "doubted"),
    [
        pytest.param(12.1, 29.0, (), id="the-story"),
        pytest.param(12.1, 200.0, (), id="slow-but-possible"),
        pytest.param(12.1, 29_000.0, ("verify of 29000 ms", "longer"), id="microseconds"),
        pytest.param(12.1, 0.029, ("verify of 0.029 ms", "shorter"), id="seconds"),
        pytest.param(12_100.0, 29.0, ("plain step of 12100 ms", "longer"), id="slow-baseline"),
        pytest.param(0.0121, 29.0, ("plain step of 0.0121 ms", "shorter"), id="fast-baseline"),
    ],
)
def test_a_time_in_another_unit_is_questioned(
    plain_ms: float, verify_ms: float, doubted: tuple[str, ...]
) -> None:
    found = doubts(predictor(), CHAIN, LOAD, plain_step_ms=plain_ms, verify_ms=[29.0, verify_ms])
    assert len(found) == bool(doubted)
    assert all(word in found[0] for word in doubted)
