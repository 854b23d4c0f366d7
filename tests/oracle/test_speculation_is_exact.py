"""Greedy speculative output equals greedy plain output token for token; counters equal vLLM's."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import known_acceptance
import pytest
import torch

from engine.config import SpeculationConfig
from engine.results import CYCLE_TERMS, DECODE_TERMS, Request

OFF = SpeculationConfig()
SPECULATIONS = [
    pytest.param({"steps": 1, "topk": 1}, id="chain-1"),
    pytest.param({"steps": 3, "topk": 1}, id="chain-3"),
    pytest.param({"steps": 7, "topk": 1}, id="chain-7"),
    pytest.param({"steps": 1, "topk": 4, "draft_tokens": 5}, id="star"),
    pytest.param({"steps": 3, "topk": 2, "draft_tokens": 6}, id="tree-3x2"),
    pytest.param({"steps": 5, "topk": 4, "draft_tokens": 24}, id="tree-5x4"),
    pytest.param({"steps": 2, "topk": 3, "draft_tokens": 13}, id="whole-tree"),
]


def _spec(**values: int) -> SpeculationConfig:
    return SpeculationConfig(method="eagle3", **values)


@pytest.fixture(scope="module", params=["stepwise", "resident"])
def engine(request: Any, local: Callable[..., Any], small_pair: Path) -> Any:
    return local(
        small_pair / "target",
        small_pair / "eagle3",
        on_device=request.param == "resident",
        max_context=128,
        max_concurrency=3,
    )


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    """More requests than slots, with different prompts and output lengths."""
    draws = torch.Generator().manual_seed(5)
    lengths = [(5, 40), (19, 7), (1, 60), (12, 1), (30, 33), (8, 50), (3, 2)]
    return [
        Request(
            prompt_ids=tuple(torch.randint(1, 300, (n,), generator=draws).tolist()),
            max_new_tokens=new,
            ignore_eos=True,
        )
        for n, new in lengths
    ]


@pytest.mark.parametrize("concurrency", [1, 3])
@pytest.mark.parametrize("values", SPECULATIONS)
def test_speculative_tokens_equal_plain_tokens(
    engine: Any, requests: list[Request], values: dict[str, int], concurrency: int
) -> None:
    plain = engine.runner.run(requests, OFF, concurrency=1)
    spec = engine.runner.run(requests, _spec(**values), concurrency=concurrency)
    assert [r.token_ids for r in spec.requests] == [r.token_ids for r in plain.requests]
    assert [len(r.token_ids) for r in spec.requests] == [r.max_new_tokens for r in requests]
    assert spec.counters.num_accepted > 0
    lengths = {n for r in spec.requests for n in r.tokens_per_verify}
    assert len(lengths) > 1, "acceptance never varied: the test would prove nothing"


def test_a_random_head_changes_speed_but_not_tokens(
    local: Callable[..., Any], hf_model: tuple[Any, Path], tmp_path: Path
) -> None:
    """On a real random transformer (no designed cycle), with a head that knows nothing of it."""
    sizes = replace(known_acceptance.SMALL, vocab=203, draft_vocab=150, layers=4)
    known_acceptance.make(tmp_path, sizes)
    engine = local(hf_model[1], tmp_path / "eagle3", max_context=96, max_concurrency=2)
    texts = [
        Request(prompt_ids=tuple(range(k + 1, k + 9)), max_new_tokens=24, ignore_eos=True)
        for k in range(4)
    ]
    plain = engine.runner.run(texts, OFF, concurrency=1)
    tree = engine.runner.run(texts, _spec(steps=3, topk=4, draft_tokens=16), concurrency=2)
    assert [r.token_ids for r in tree.requests] == [r.token_ids for r in plain.requests]


def test_plain_greedy_equals_transformers_generate(
    local: Callable[..., Any], hf_model: tuple[Any, Path]
) -> None:
    engine = local(hf_model[1], max_context=96)
    prompt = tuple(range(5, 17))
    result = engine.runner.run(
        [Request(prompt_ids=prompt, max_new_tokens=20, ignore_eos=True)], OFF, concurrency=1
    )
    expected = hf_model[0].generate(
        torch.tensor([prompt]), max_new_tokens=20, min_new_tokens=20, do_sample=False
    )
    # generate() forbids the end token up to min_new_tokens; the engine's text must not hold it
    assert 0 not in result.requests[0].token_ids
    assert result.requests[0].token_ids == tuple(expected[0, len(prompt) :].tolist())


@pytest.mark.parametrize("values", [None, {"steps": 4, "topk": 1}, SPECULATIONS[5].values[0]])
def test_end_of_text_cuts_the_output_inside_an_accepted_path(
    local: Callable[..., Any], small_pair: Path, values: dict[str, int] | None
) -> None:
    engine = local(small_pair / "target", small_pair / "eagle3", max_context=128)
    successor = known_acceptance.successors(known_acceptance.SMALL)
    walk = [17]
    for _ in range(30):
        walk.append(int(successor[walk[-1]]))
    engine.runner.eos_ids = (walk[12],)
    speculation = OFF if values is None else _spec(**values)
    ends = Request(prompt_ids=(17,), max_new_tokens=30)
    ignores = replace(ends, ignore_eos=True)
    result = engine.runner.run([ends, ignores], speculation, concurrency=1)
    assert result.requests[0].token_ids == tuple(walk[1:13])
    assert result.requests[0].finish_reason == "eos"
    assert result.requests[1].token_ids == tuple(walk[1:31])
    assert result.requests[1].finish_reason == "length"


def test_a_tree_accepts_second_children_that_a_chain_misses(
    engine: Any, requests: list[Request]
) -> None:
    chain = engine.runner.run(requests, _spec(steps=3, topk=1), concurrency=3).counters
    tree = engine.runner.run(
        requests, _spec(steps=3, topk=2, draft_tokens=11), concurrency=3
    ).counters
    second = [row[1] for row in tree.accepted_by_depth_rank]
    assert sum(second) > 0
    assert tree.accept_length > chain.accept_length
    assert [sum(row) for row in tree.accepted_by_depth_rank] == list(tree.accepted_by_depth)


def test_counters_agree_with_each_other(engine: Any, requests: list[Request]) -> None:
    run = engine.runner.run(requests, _spec(steps=3, topk=2, draft_tokens=6), concurrency=3)
    counters = run.counters
    assert counters.num_drafted == 5 * counters.num_verifies
    assert sum(counters.histogram) == counters.num_verifies
    assert sum(counters.accepted_by_depth) == counters.num_accepted
    verifies = [n for r in run.requests for n in r.tokens_per_verify]
    assert len(verifies) == counters.num_verifies
    assert sum(verifies) == counters.num_verifies + counters.num_accepted
    delivered = sum(len(r.token_ids) for r in run.requests)
    assert run.decode_tokens == delivered - len(run.requests)


@pytest.mark.parametrize(
    ("values", "terms"), [(None, DECODE_TERMS), ({"steps": 3, "topk": 1}, CYCLE_TERMS)]
)
def test_phases_have_the_models_names_and_sum_to_the_cycle(
    engine: Any, requests: list[Request], values: dict[str, int] | None, terms: tuple[str, ...]
) -> None:
    if engine.executor.resident is not None:
        pytest.skip("resident cycles are timed by CUDA events")
    run = engine.runner.run(requests, OFF if values is None else _spec(**values), concurrency=2)
    assert set(run.phases_ms) == set(terms)
    assert sum(run.phases_ms.values()) == pytest.approx(run.cycle_ms, rel=0.02)
    assert all(ms >= 0 for ms in run.phases_ms.values())


def test_margins_are_leads_of_the_chosen_token(
    local: Callable[..., Any], hf_model: tuple[Any, Path]
) -> None:
    engine = local(hf_model[1], max_context=64)
    prompt = (9, 8, 7, 6)
    run = engine.runner.run(
        [Request(prompt_ids=prompt, max_new_tokens=5, ignore_eos=True)],
        OFF,
        concurrency=1,
        margins=True,
    )
    text = torch.tensor([prompt + run.requests[0].token_ids])
    logits_TV = hf_model[0](text).logits[0, len(prompt) - 1 : -1]
    two = logits_TV.log_softmax(-1).topk(2, dim=-1).values
    torch.testing.assert_close(
        torch.tensor(run.requests[0].margins), two[:, 0] - two[:, 1], rtol=1e-3, atol=1e-4
    )


@pytest.mark.parametrize("concurrency", [1, 4])
def test_counters_equal_the_recorded_vllm_run(
    local: Callable[..., Any], tmp_path: Path, concurrency: int
) -> None:
    """vLLM 0.32.0 on the same construction: the same integers in all its modes."""
    known_acceptance.make(tmp_path, known_acceptance.Sizes())
    engine = local(
        tmp_path / "target",
        tmp_path / "eagle3",
        dtype="bfloat16",
        max_context=128,
        max_concurrency=4,
    )
    texts = [
        Request(prompt_ids=prompt, max_new_tokens=new, ignore_eos=True)
        for prompt, new in known_acceptance.recorded_protocol()
    ]
    run = engine.runner.run(texts, _spec(steps=3, topk=1), concurrency=concurrency)
    counters = run.counters
    assert (counters.num_verifies, counters.num_drafted, counters.num_accepted) == (417, 1251, 620)
    assert counters.accepted_by_depth == (268, 209, 143)
    assert sum(len(r.token_ids) for r in run.requests) == 1032
    assert len(texts) + counters.num_verifies + counters.num_accepted == 1054
