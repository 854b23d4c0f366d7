"""Speculative sampling has the target's distribution, judged by a chi-square test that can fail."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import known_acceptance
import numpy as np
import pytest
import torch
from scipy import stats

from engine.config import SpeculationConfig
from engine.executor import Order
from engine.results import Request, RunResult
from engine.timing import NoTimer

_TEMPERATURE = 5.0
_DRAWS = 700
#: with fixed seeds this never flickers; a wrong distribution gives values far below
_ALPHA = 1e-3
_PROMPT = (17, 5, 3)


def _run(engine: Any, speculation: SpeculationConfig) -> RunResult:
    requests = [
        Request(
            prompt_ids=_PROMPT,
            max_new_tokens=3,
            temperature=_TEMPERATURE,
            seed=seed,
            ignore_eos=True,
        )
        for seed in range(_DRAWS)
    ]
    run: RunResult = engine.runner.run(requests, speculation, concurrency=8)
    return run


def _marginals(engine: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Exact distributions of the first, second and third token, over all texts before them."""

    def following(*tokens: int) -> torch.Tensor:
        order = Order(
            token_BT=torch.tensor([[*_PROMPT, *tokens]]),
            slot_B=torch.tensor([0]),
            prefix_B=torch.tensor([0]),
            want="full",
            only_token=len(_PROMPT) + len(tokens) - 1,
        )
        _, heads = engine.executor.forward(order, NoTimer())
        return (heads.logits_MV[0].double() / _TEMPERATURE).softmax(-1)

    first_V = following()
    second_V, third_V = torch.zeros_like(first_V), torch.zeros_like(first_V)
    for a, p_a in enumerate(first_V):
        after_a_V = following(a)
        second_V += p_a * after_a_V
        for b, p_b in enumerate(after_a_V):
            third_V += p_a * p_b * following(a, b)
    return first_V.numpy(), second_V.numpy(), third_V.numpy()


@pytest.fixture(scope="module")
def engine(local: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A 24-token vocabulary: every second token is seen often enough to be tested."""
    folder = tmp_path_factory.mktemp("sampling")
    sizes = replace(known_acceptance.SMALL, vocab=24, draft_vocab=20, second_share=0.4, layers=3)
    known_acceptance.make(folder, sizes, alpha=0.8)
    return local(folder / "target", folder / "eagle3", max_context=64, max_concurrency=8)


@pytest.fixture(scope="module")
def marginals(engine: Any) -> tuple[np.ndarray, ...]:
    return _marginals(engine)


def _p_value(observed_V: np.ndarray, expected_V: np.ndarray) -> float:
    """Chi-square over cells, those expected below 5 pooled."""
    expected = expected_V * observed_V.sum()
    small = expected < 5
    cells = np.append(observed_V[~small], observed_V[small].sum())
    wanted = np.append(expected[~small], expected[small].sum())
    keep = wanted > 0
    return float(stats.chisquare(cells[keep], wanted[keep]).pvalue)


@pytest.mark.parametrize(
    "values",
    [
        pytest.param(None, id="plain"),
        pytest.param({"steps": 2, "topk": 1}, id="chain"),
        pytest.param({"steps": 2, "topk": 3, "draft_tokens": 8}, id="tree"),
    ],
)
def test_sampled_tokens_have_the_targets_distribution(
    engine: Any, marginals: tuple[np.ndarray, ...], values: dict[str, int] | None
) -> None:
    speculation = (
        SpeculationConfig() if values is None else SpeculationConfig(method="eagle3", **values)
    )
    run = _run(engine, speculation)
    if values is not None:
        share = run.counters.num_accepted / run.counters.num_verifies
        assert share > 0.1, "too little was accepted for the test to see a biased acceptance"
    for place, expected_V in enumerate(marginals):
        tokens = [r.token_ids[place] for r in run.requests]
        observed_V = np.bincount(tokens, minlength=len(expected_V))
        assert _p_value(observed_V, expected_V) > _ALPHA, f"token {place + 1}"


def test_the_statistic_rejects_accepting_drafts_too_gladly(
    marginals: tuple[np.ndarray, ...],
) -> None:
    """Half as much again of the likeliest token, as a biased acceptance gives, is found out."""
    expected_V = marginals[1]
    biased_V = expected_V.copy()
    biased_V[biased_V.argmax()] *= 1.5
    biased_V /= biased_V.sum()
    draws = np.random.default_rng(0).multinomial(_DRAWS, biased_V)
    assert _p_value(draws, expected_V) < _ALPHA


def test_a_seed_fixes_the_sample_whatever_runs_beside_it(engine: Any) -> None:
    request = Request(
        prompt_ids=_PROMPT, max_new_tokens=12, temperature=_TEMPERATURE, seed=9, ignore_eos=True
    )
    others = [replace(request, seed=s, temperature=t) for s, t in ((1, 0.0), (2, 3.0), (3, 0.0))]
    off = SpeculationConfig()
    alone = engine.runner.run([request], off, concurrency=1).requests[0]
    beside = engine.runner.run([*others, request], off, concurrency=4).requests[3]
    other_seed = engine.runner.run([replace(request, seed=10)], off, concurrency=1).requests[0]
    assert alone.token_ids == beside.token_ids
    assert alone.token_ids != other_seed.token_ids


def test_greedy_requests_stay_greedy_beside_sampled_ones(engine: Any) -> None:
    greedy = Request(prompt_ids=_PROMPT, max_new_tokens=16, ignore_eos=True)
    sampled = replace(greedy, temperature=_TEMPERATURE, seed=4)
    tree = SpeculationConfig(method="eagle3", steps=3, topk=2, draft_tokens=6)
    alone = engine.runner.run([greedy], SpeculationConfig(), concurrency=1).requests[0]
    mixed = engine.runner.run([sampled, greedy, sampled], tree, concurrency=3).requests[1]
    assert mixed.token_ids == alone.token_ids
