"""Tiny models for the oracle tests, made once a session, and engines inside the test process."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import known_acceptance
import pytest
import torch

from engine.build import Shapes, build, resident, resolve
from engine.collectives import LocalGroup
from engine.config import DraftSpec, LaunchConfig, TargetSpec
from engine.draft import DraftModel
from engine.executor import Executor
from engine.runner import Runner


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield
    torch.set_num_threads(before)


@dataclass
class Local:
    """A one-rank engine in this process."""

    shapes: Shapes
    executor: Executor
    draft: DraftModel | None
    runner: Runner


@pytest.fixture(scope="session")
def local() -> Callable[..., Local]:
    """Build a one-rank engine from folders, without worker processes.

    ``on_device``: cycles as on a GPU, with state on the device and fused ops.
    """

    def make(
        target: Path, draft: Path | None = None, *, on_device: bool = False, **settings: Any
    ) -> Local:
        config = LaunchConfig(
            target=TargetSpec(path=str(target)),
            draft=None if draft is None else DraftSpec(path=str(draft)),
            **settings,
        )
        shapes = resolve(config)
        executor, head = build(config, shapes, LocalGroup(), torch.device("cpu"))
        if on_device:
            # what a GPU runs: cycles with their state on the device, and the fused ops
            executor.resident = resident(executor, head, config)
            if head is not None:
                head.fused = True
        runner = Runner(executor, head, slots=config.max_concurrency, eos_ids=shapes.target.eos_ids)
        return Local(shapes, executor, head, runner)

    return make


@pytest.fixture(scope="session")
def hf_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A random transformers Qwen3-MoE (fp32) and the folder it was saved to.

    Weights are drawn wide so that logits differ by much more than fp32 rounding, and every norm
    weight is random, so that a forgotten or swapped one shows.
    """
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(3)
    config = Qwen3MoeConfig(
        vocab_size=203,
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=16,
        moe_intermediate_size=32,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation="eager",
    )
    with torch.inference_mode(mode=False):
        model = Qwen3MoeForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(torch.rand_like(parameter) + 0.5)
            else:
                parameter.copy_(torch.randn_like(parameter) * 0.15)
    folder = tmp_path_factory.mktemp("hf")
    model.save_pretrained(folder)
    return model, folder


@pytest.fixture(scope="session")
def small_pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Target and head with known acceptance, fp32, a few hundred tokens of vocabulary."""
    folder = tmp_path_factory.mktemp("small")
    known_acceptance.make(folder, known_acceptance.SMALL)
    return folder
