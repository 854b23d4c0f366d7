"""The engine's fp32 logits and greedy tokens equal transformers' MixtralForCausalLM."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import SpeculationConfig
from engine.executor import Order
from engine.results import Request
from engine.shapes import named_target_shape
from engine.timing import NoTimer


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A random Mixtral with weights drawn wide, and its folder."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(4)
    config = MixtralConfig(
        vocab_size=151,
        hidden_size=48,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        intermediate_size=40,
        num_local_experts=5,
        num_experts_per_tok=2,
        max_position_embeddings=128,
        sliding_window=None,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation="eager",
    )
    with torch.inference_mode(mode=False):
        model = MixtralForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(torch.rand_like(parameter) + 0.5)
            else:
                parameter.copy_(torch.randn_like(parameter) * 0.15)
    folder = tmp_path_factory.mktemp("mixtral")
    model.save_pretrained(folder)
    return model, folder


def test_prefill_logits_equal(local: Callable[..., Any], mixtral: tuple[Any, Path]) -> None:
    engine = local(mixtral[1], max_context=96)
    tokens_T = torch.randint(1, 151, (31,), generator=torch.Generator().manual_seed(2))
    order = Order(
        token_BT=tokens_T[None], slot_B=torch.tensor([0]), prefix_B=torch.tensor([0]), want="full"
    )
    _, heads = engine.executor.forward(order, NoTimer())
    expected_TV = mixtral[0](tokens_T[None]).logits[0]
    torch.testing.assert_close(heads.logits_MV, expected_TV, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("on_device", [False, True], ids=["stepwise", "resident"])
def test_greedy_tokens_equal(
    local: Callable[..., Any], mixtral: tuple[Any, Path], on_device: bool
) -> None:
    engine = local(mixtral[1], on_device=on_device, max_context=96)
    prompt = tuple(range(7, 19))
    run = engine.runner.run(
        [Request(prompt_ids=prompt, max_new_tokens=20, ignore_eos=True)],
        SpeculationConfig(),
        concurrency=1,
    )
    expected = mixtral[0].generate(
        torch.tensor([prompt]), max_new_tokens=20, min_new_tokens=20, do_sample=False
    )
    assert 0 not in run.requests[0].token_ids
    assert run.requests[0].token_ids == tuple(expected[0, len(prompt) :].tolist())


def test_published_shapes_are_read() -> None:
    small = named_target_shape("mixtral-8x7b", 4)
    assert (small.family, small.experts, small.experts_per_token) == ("mixtral", 8, 2)
    assert (small.layers, small.whole_layers, small.moe_intermediate) == (4, 32, 14336)
