"""Any number of ranks gives the same tokens, over real worker processes."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import known_acceptance
import pytest
import torch

from engine.api import Engine
from engine.config import Collectives, DraftSpec, LaunchConfig, SpeculationConfig, TargetSpec
from engine.errors import EngineError
from engine.results import Request

OFF = SpeculationConfig()
TREE = SpeculationConfig(method="eagle3", steps=2, topk=3, draft_tokens=7)
CHAIN = SpeculationConfig(method="eagle3", steps=3, topk=1)


def _config(target: Path, draft: Path, **settings: Any) -> LaunchConfig:
    backend = settings.pop("backend", None)
    return LaunchConfig(
        target=TargetSpec(path=str(target)),
        draft=DraftSpec(path=str(draft)),
        max_context=64,
        max_concurrency=2,
        collectives=Collectives(backend=backend),
        **settings,
    )


@pytest.fixture(scope="module")
def head_for_hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head of the random transformer's sizes; it guesses wrong, the tree is verified anyway."""
    folder = tmp_path_factory.mktemp("head")
    sizes = replace(known_acceptance.SMALL, vocab=203, draft_vocab=150, layers=4)
    known_acceptance.make(folder, sizes)
    return folder / "eagle3"


@pytest.mark.parametrize(
    ("tp", "backend"),
    [
        pytest.param(1, "gloo", id="1-rank"),
        pytest.param(2, "gloo", id="2-gloo"),
        pytest.param(2, "one_shot", id="2-one-shot"),
        pytest.param(4, "one_shot", id="4-kv-heads-replicated"),
        pytest.param(8, "gloo", id="8-gloo"),
    ],
)
def test_ranks_give_the_tokens_of_transformers(
    hf_model: tuple[Any, Path], head_for_hf: Path, tp: int, backend: str
) -> None:
    """2 key heads: 4 and 8 ranks hold copies. 203 tokens: no share of the head is like another."""
    prompts = [tuple(range(3, 12)), tuple(range(90, 70, -1))]
    new = 10
    expected = []
    for prompt in prompts:
        text = hf_model[0].generate(
            torch.tensor([prompt]), max_new_tokens=new, min_new_tokens=new, do_sample=False
        )
        expected.append(tuple(text[0, len(prompt) :].tolist()))
    requests = [Request(prompt_ids=p, max_new_tokens=new, ignore_eos=True) for p in prompts]
    sampled = [replace(requests[0], temperature=1.5, seed=3)]
    config = _config(hf_model[1], head_for_hf, tp=tp, backend=backend)
    with Engine(config) as engine:
        plain = engine.generate(requests, OFF)
        tree = engine.generate(requests, TREE)
        drawn = engine.generate(sampled, OFF)
        assert len(engine.pids) == tp
    assert [r.token_ids for r in plain.requests] == expected
    assert [r.token_ids for r in tree.requests] == expected
    assert len(drawn.requests[0].token_ids) == new


@pytest.mark.parametrize("backend", ["gloo", "one_shot"])
def test_two_ranks_accept_exactly_what_one_accepts(
    local: Callable[..., Any], small_pair: Path, backend: str
) -> None:
    requests = [
        Request(prompt_ids=(k + 1, k + 50), max_new_tokens=20, ignore_eos=True) for k in range(4)
    ]
    target, draft = small_pair / "target", small_pair / "eagle3"
    one = local(target, draft, max_context=64, max_concurrency=2)
    with Engine(_config(target, draft, tp=2, backend=backend)) as engine:
        for speculation in (CHAIN, TREE):
            expected = one.runner.run(requests, speculation, concurrency=2)
            got = engine.generate(requests, speculation)
            assert got.counters == expected.counters
            assert [r.token_ids for r in got.requests] == [r.token_ids for r in expected.requests]
        times = engine.allreduce_bench([64, 1 << 20], repeats=5)
        assert [t.size_bytes for t in times] == [64, 1 << 20]
        assert all(t.median_us > 0 and len(t.times_us) == 5 for t in times)


@pytest.mark.parametrize(
    ("tp", "message"),
    [
        pytest.param(3, "tp 3 does not divide num_attention_heads 8", id="heads"),
        pytest.param(16, "tp 16 does not divide num_attention_heads 8", id="too-many"),
    ],
)
def test_a_size_that_does_not_divide_the_heads_is_refused(
    small_pair: Path, tp: int, message: str
) -> None:
    with pytest.raises(EngineError, match=message) as caught:
        Engine(_config(small_pair / "target", small_pair / "eagle3", tp=tp))
    assert caught.value.kind == "invalid"
