"""The target's fp32 logits equal transformers' Qwen3MoeForCausalLM."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.executor import Order
from engine.timing import NoTimer

#: fp32 rounding through 4 layers on logits of magnitude about 10
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}
#: (name, parents): node 0 is the root
TREES = [
    pytest.param([-1, 0, 1, 2], id="chain"),
    pytest.param([-1, 0, 0, 0], id="star"),
    pytest.param([-1, 0, 0, 1, 1, 2, 3, 3, 5], id="bushy"),
]


def _tokens(count: int, seed: int) -> torch.Tensor:
    return torch.randint(1, 203, (count,), generator=torch.Generator().manual_seed(seed))


def _run(engine: Any, order: Order) -> torch.Tensor:
    _, heads = engine.executor.forward(order, NoTimer())
    assert heads is not None
    return heads.logits_MV


def _prefill(engine: Any, slot: int, tokens_T: torch.Tensor, start: int = 0) -> torch.Tensor:
    return _run(
        engine,
        Order(
            token_BT=tokens_T[None],
            slot_B=torch.tensor([slot]),
            prefix_B=torch.tensor([start]),
            want="full",
        ),
    )


@pytest.fixture(scope="module")
def engine(local: Callable[..., Any], hf_model: tuple[Any, Path]) -> Any:
    return local(hf_model[1], max_context=128, max_concurrency=3)


def test_prefill_logits_equal(engine: Any, hf_model: tuple[Any, Path]) -> None:
    tokens_T = _tokens(37, 1)
    expected_TV = hf_model[0](tokens_T[None]).logits[0]
    torch.testing.assert_close(_prefill(engine, 0, tokens_T), expected_TV, **TOLERANCE)


def test_prefill_in_chunks_equals_prefill_at_once(engine: Any, hf_model: tuple[Any, Path]) -> None:
    tokens_T = _tokens(29, 2)
    _prefill(engine, 1, tokens_T[:13])
    rest_TV = _prefill(engine, 1, tokens_T[13:], start=13)
    expected_TV = hf_model[0](tokens_T[None]).logits[0, 13:]
    torch.testing.assert_close(rest_TV, expected_TV, **TOLERANCE)


def test_decoding_a_batch_with_caches_of_different_lengths_equals(
    engine: Any, hf_model: tuple[Any, Path]
) -> None:
    texts = [_tokens(n, n) for n in (20, 7, 33)]
    slots = [2, 0, 1]
    for slot, text in zip(slots, texts, strict=True):
        _prefill(engine, slot, text[:-3])
    for step in (3, 2, 1):
        got_BV = _run(
            engine,
            Order(
                token_BT=torch.stack([t[-step : len(t) - step + 1] for t in texts]),
                slot_B=torch.tensor(slots),
                prefix_B=torch.tensor([len(t) - step for t in texts]),
                want="full",
            ),
        )
        for row, text in enumerate(texts):
            expected_V = hf_model[0](text[None, : len(text) - step + 1]).logits[0, -1]
            torch.testing.assert_close(got_BV[row], expected_V, **TOLERANCE)


@pytest.mark.parametrize("parents", TREES)
def test_tree_logits_equal_under_a_four_dimensional_mask(
    engine: Any, hf_model: tuple[Any, Path], parents: list[int]
) -> None:
    texts = [_tokens(18, 5), _tokens(11, 6)]
    nodes = [_tokens(len(parents), seed) for seed in (7, 8)]
    for slot, text in enumerate(texts):
        _prefill(engine, slot, text)
    got_NV = _run(
        engine,
        Order(
            token_BT=torch.stack(nodes),
            slot_B=torch.tensor([0, 1]),
            prefix_B=torch.tensor([len(t) for t in texts]),
            parent_BT=torch.tensor([parents, parents]),
            want="full",
        ),
    )
    expected = [
        _tree_logits(hf_model[0], text, node_T, parents)
        for text, node_T in zip(texts, nodes, strict=True)
    ]
    torch.testing.assert_close(got_NV, torch.cat(expected), **TOLERANCE)


def _tree_logits(
    model: Any, text_T: torch.Tensor, node_T: torch.Tensor, parents: list[int]
) -> torch.Tensor:
    """transformers' logits of all tree nodes in one forward, by an explicit mask and positions."""
    prefix, count = len(text_T), len(parents)
    visible = torch.ones(prefix + count, prefix + count, dtype=torch.bool).tril()
    depths = []
    for node, parent in enumerate(parents):
        row = visible[prefix + node]
        row[prefix:] = visible[prefix + parent, prefix:] if parent >= 0 else False
        row[prefix + node] = True
        depths.append(0 if parent < 0 else depths[parent] + 1)
    mask = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
    positions = torch.cat((torch.arange(prefix), prefix + torch.tensor(depths)))
    output = model(
        torch.cat((text_T, node_T))[None],
        attention_mask=mask[None, None],
        position_ids=positions[None],
    )
    return output.logits[0, prefix:]


def test_captured_hidden_states_are_inputs_of_the_named_layers(
    local: Callable[..., Any], hf_model: tuple[Any, Path]
) -> None:
    engine = local(hf_model[1], max_context=64)
    engine.executor.model.capture_points = (4, 0, 2)
    tokens_T = _tokens(9, 11)
    order = Order(
        token_BT=tokens_T[None], slot_B=torch.tensor([0]), prefix_B=torch.tensor([0]), want="none"
    )
    forward, _ = engine.executor.forward(order, NoTimer())
    seen: dict[int, torch.Tensor] = {}
    hooks = [
        layer.register_forward_pre_hook(
            lambda _m, args, kwargs, i=i: seen.__setitem__(
                i, args[0] if args else kwargs["hidden_states"]
            ),
            with_kwargs=True,
        )
        for i, layer in enumerate(hf_model[0].model.layers)
    ]
    final = hf_model[0].model.norm.register_forward_pre_hook(
        lambda _m, args: seen.__setitem__(4, args[0])
    )
    hf_model[0](tokens_T[None])
    for hook in (*hooks, final):
        hook.remove()
    expected_TF = torch.cat([seen[i][0] for i in (4, 0, 2)], dim=-1)
    torch.testing.assert_close(forward.captured_NF, expected_TF, **TOLERANCE)
