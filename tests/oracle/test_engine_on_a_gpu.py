"""The engine on a GPU: graphs change speed, not tokens; what is captured is reported."""

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.api import Engine
from engine.config import LaunchConfig, SpeculationConfig
from engine.results import CYCLE_TERMS, DECODE_TERMS, Request

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

OFF = SpeculationConfig()
CHAIN = SpeculationConfig(method="eagle3", steps=3, topk=1)
TREE = SpeculationConfig(method="eagle3", steps=3, topk=2, draft_tokens=6)
_TINY = Path(__file__).parents[2] / "studies" / "models"
ALL = {"decode": True, "draft": True, "verify": True, "extend": True, "prefill": True}


def _config(folder: Path, **changes: Any) -> LaunchConfig:
    values: dict[str, Any] = {
        "target": {"path": str(folder / "target")},
        "draft": {"path": str(folder / "eagle3")},
        "device": "cuda",
        "max_context": 192,
        "max_concurrency": 3,
        "cuda_graph": ALL,
    }
    return LaunchConfig.model_validate(values | changes)


def _requests(new: int = 96) -> list[Request]:
    draws = torch.Generator().manual_seed(5)
    return [
        Request(
            prompt_ids=tuple(torch.randint(1, 300, (n,), generator=draws).tolist()),
            max_new_tokens=new + n,
            ignore_eos=True,
        )
        for n in (5, 19, 1, 12, 30)
    ]


def _tokens(engine: Engine, speculation: SpeculationConfig) -> list[tuple[int, ...]]:
    run = engine.generate(_requests(), speculation)
    assert run.path == "resident"
    return [r.token_ids for r in run.requests]


@pytest.mark.slow
def test_graphs_and_speculation_leave_fp32_tokens_as_they_are(small_pair: Path) -> None:
    with Engine(_config(small_pair, device="cpu", cuda_graph={})) as cpu:
        run = cpu.generate(_requests(), OFF)
        expected = [r.token_ids for r in run.requests]
    for flags in (ALL, {}):
        with Engine(_config(small_pair, cuda_graph=flags)) as engine:
            for speculation in (OFF, CHAIN, TREE):
                assert _tokens(engine, speculation) == expected


@pytest.mark.slow
def test_each_graph_is_switched_alone_and_reported(small_pair: Path) -> None:
    with Engine(_config(small_pair, cuda_graph=ALL | {"verify": False})) as engine:
        plain = engine.generate(_requests(), OFF)
        run = engine.generate(_requests(), TREE)
    assert set(plain.graphs.values()) == {"captured"}
    how = {name.partition("[")[0]: value for name, value in run.graphs.items()}
    assert how["verify"] == "eager: switched off"
    assert how["draft"] == how["extend"] == how["decode"] == "captured"


@pytest.mark.slow
@pytest.mark.parametrize(("speculation", "terms"), [(OFF, DECODE_TERMS), (CHAIN, CYCLE_TERMS)])
def test_phases_come_from_events_and_sum_to_the_cycle(
    small_pair: Path, speculation: SpeculationConfig, terms: tuple[str, ...]
) -> None:
    with Engine(_config(small_pair)) as engine:
        asks = [Request(prompt_ids=(5, 6), max_new_tokens=180, ignore_eos=True)]
        run = engine.generate(asks, speculation)
    assert set(run.phases_ms) <= set(terms)
    assert {name for name in terms if "moe" in name} <= set(run.phases_ms)
    assert sum(run.phases_ms.values()) == pytest.approx(run.cycle_ms, rel=0.02)
    assert run.segments_ms
    assert run.distinct_experts is not None


@pytest.mark.slow
def test_a_slice_with_random_weights_and_synthetic_acceptance(small_pair: Path) -> None:
    config = _config(
        small_pair,
        target={"shape": "qwen3-30b-a3b", "weights": "random", "layers": 1},
        draft={"weights": "random"},
        dtype="bfloat16",
    )
    speculation = CHAIN.model_copy(update={"synthetic_acceptance": (1.0, 1.0, 0.0)})
    with Engine(config) as engine:
        run = engine.generate(_requests(24), speculation)
    assert {n for r in run.requests for n in r.tokens_per_verify} == {3}


@pytest.mark.slow
@pytest.mark.parametrize("flags", [ALL, {}], ids=["graphs", "eager"])
def test_two_gpus_decode_the_fp32_tokens_of_one_cpu_rank(flags: dict[str, bool]) -> None:
    """Sizes of batches and trees that a search tries, the largest among them."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    shared: dict[str, Any] = {
        "target": {"path": str(_TINY / "tiny-moe")},
        "draft": {"path": str(_TINY / "tiny-moe-eagle3")},
        "dtype": "float32",
        "max_concurrency": 16,
    }
    draws = torch.Generator().manual_seed(8)
    asks = [
        Request(
            prompt_ids=tuple(torch.randint(1, 2000, (4 + n,), generator=draws).tolist()),
            max_new_tokens=20 + n,
            ignore_eos=True,
        )
        for n in range(16)
    ]
    with Engine(_config(_TINY, device="cpu", cuda_graph={}, **shared)) as cpu:
        expected = [r.token_ids for r in cpu.generate(asks, OFF).requests]
    bushy = SpeculationConfig(method="eagle3", steps=3, topk=4, draft_tokens=16)
    wrong = {}
    with Engine(_config(_TINY, tp=2, cuda_graph=flags, **shared)) as engine:
        for speculation in (OFF, CHAIN, bushy):
            for at_once in (16, 1):
                run = engine.generate(asks[-at_once:], speculation, concurrency=at_once)
                got = [r.token_ids for r in run.requests]
                if got != expected[-at_once:]:
                    wrong[speculation.num_tokens, at_once] = got
    assert not wrong
