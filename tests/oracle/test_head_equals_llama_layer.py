"""An EAGLE-3 head of any permitted shape computes what transformers' Llama layer computes.

The reference has no cache: for every path it runs the whole text through the layer again, with
its query, key and value projections widened to (embedding, hidden state).
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from engine.config import SpeculationConfig
from engine.tree import draft

_VOCAB, _TARGET_HIDDEN = 203, 64
_TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}
_LENGTH = 11


@dataclass(frozen=True, kw_only=True)
class Head:
    """What varies between public heads."""

    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int | None = None
    draft_vocab: int = 90
    rope_theta: float = 10_000.0
    rope_key: str = "rope_theta"
    norm_before_residual: bool = False
    prefix: str = "midlayer."
    dtype: torch.dtype = torch.float32
    d2t: bool = True


HEADS = [
    pytest.param(Head(), id="public-default"),
    pytest.param(Head(norm_before_residual=True), id="norm-before-residual"),
    pytest.param(Head(hidden=48, heads=6, kv_heads=1, head_dim=16), id="narrower-than-its-target"),
    pytest.param(Head(heads=2, kv_heads=2, head_dim=24), id="head-dim-of-its-own"),
    pytest.param(Head(rope_theta=500.0, rope_key="rope_parameters"), id="rope-theta-of-its-own"),
    pytest.param(Head(prefix="layers.0.", dtype=torch.bfloat16), id="layers-0-bf16"),
    pytest.param(Head(draft_vocab=_VOCAB, d2t=False, dtype=torch.float16), id="whole-vocab-fp16"),
]


class Reference:
    """The head's folder, written and computed independently of the engine."""

    def __init__(self, head: Head, folder: Path) -> None:
        draws = torch.Generator().manual_seed(11)

        def linear(out: int, into: int) -> torch.nn.Linear:
            layer = torch.nn.Linear(into, out, bias=False)
            values = torch.randn(out, into, generator=draws) * 0.2
            layer.weight.copy_(values.to(head.dtype).float())
            return layer

        def norm() -> LlamaRMSNorm:
            layer = LlamaRMSNorm(head.hidden, eps=1e-5)
            values = torch.rand(head.hidden, generator=draws) + 0.5
            layer.weight.copy_(values.to(head.dtype).float())
            return layer

        h, size = head.hidden, head.head_dim or head.hidden // head.heads
        config = LlamaConfig(
            hidden_size=h,
            num_attention_heads=head.heads,
            num_key_value_heads=head.kv_heads,
            head_dim=size,
            intermediate_size=56,
            rope_parameters={"rope_type": "default", "rope_theta": head.rope_theta},
            attn_implementation="eager",
        )
        self.head = head
        self.attention, self.mlp = LlamaAttention(config, 0), LlamaMLP(config)
        self.rotary = LlamaRotaryEmbedding(config)
        self.attention.q_proj = linear(head.heads * size, 2 * h)
        self.attention.k_proj = linear(head.kv_heads * size, 2 * h)
        self.attention.v_proj = linear(head.kv_heads * size, 2 * h)
        self.attention.o_proj = linear(h, head.heads * size)
        self.mlp.gate_proj, self.mlp.up_proj = linear(56, h), linear(56, h)
        self.mlp.down_proj = linear(h, 56)
        self.input_norm, self.hidden_norm, self.post_norm, self.norm = (norm() for _ in range(4))
        self.fc, self.lm_head = linear(h, 3 * _TARGET_HIDDEN), linear(head.draft_vocab, h)
        self.embed = linear(_VOCAB, h).weight
        order = torch.randperm(_VOCAB, generator=draws)[: head.draft_vocab].sort().values
        self.target_id = order if head.d2t else torch.arange(_VOCAB)
        self._write(folder, size)

    def _write(self, folder: Path, size: int) -> None:
        head, at = self.head, self.head.prefix
        modules = {
            "fc": self.fc,
            "norm": self.norm,
            "lm_head": self.lm_head,
            f"{at}input_layernorm": self.input_norm,
            f"{at}hidden_norm": self.hidden_norm,
            f"{at}post_attention_layernorm": self.post_norm,
        }
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            modules[f"{at}self_attn.{name}"] = getattr(self.attention, name)
        for name in ("gate_proj", "up_proj", "down_proj"):
            modules[f"{at}mlp.{name}"] = getattr(self.mlp, name)
        tensors = {f"{n}.weight": m.weight.detach().to(head.dtype) for n, m in modules.items()}
        tensors["embed_tokens.weight"] = self.embed.detach().to(head.dtype)
        if head.d2t:
            tensors["d2t"] = self.target_id - torch.arange(head.draft_vocab)
            tensors["t2d"] = torch.zeros(_VOCAB, dtype=torch.bool)
            tensors["t2d"][self.target_id] = True
        theta: object = head.rope_theta
        if head.rope_key == "rope_parameters":
            theta = {"rope_type": "default", "rope_theta": head.rope_theta}
        config = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "hidden_act": "silu",
            "hidden_size": head.hidden,
            "target_hidden_size": _TARGET_HIDDEN,
            "intermediate_size": 56,
            "num_attention_heads": head.heads,
            "num_key_value_heads": head.kv_heads,
            "head_dim": head.head_dim,
            "num_hidden_layers": 1,
            "vocab_size": _VOCAB,
            "draft_vocab_size": head.draft_vocab,
            "rms_norm_eps": 1e-5,
            "norm_before_residual": head.norm_before_residual,
            head.rope_key: theta,
        }
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors")

    def fuse(self, captured_NF: torch.Tensor) -> torch.Tensor:
        """Three hidden states of the target to one of the head."""
        fused: torch.Tensor = self.fc(captured_NF)
        return fused

    def layer(self, token_T: torch.Tensor, hidden_TH: torch.Tensor) -> torch.Tensor:
        """Hidden states (T, H) of pairs at positions 0, 1, ..., each seeing those before it."""
        length = len(token_T)
        normed = self.hidden_norm(hidden_TH)
        x = torch.cat((self.input_norm(self.embed[token_T]), normed), -1)[None]
        causal = torch.full((length, length), float("-inf")).triu(1)[None, None]
        turned = self.rotary(x, torch.arange(length)[None])
        attended = self.attention(x, position_embeddings=turned, attention_mask=causal)[0][0]
        residual = attended + (normed if self.head.norm_before_residual else hidden_TH)
        out: torch.Tensor = residual + self.mlp(self.post_norm(residual))
        return out

    def logits(self, hidden_TH: torch.Tensor) -> torch.Tensor:
        """Over the draft vocabulary."""
        scores: torch.Tensor = self.lm_head(self.norm(hidden_TH))
        return scores

    def continued(
        self, token_T: torch.Tensor, hidden_TH: torch.Tensor, path: list[int]
    ) -> torch.Tensor:
        """Logits after ``path`` is drafted below the settled pairs, each step on its own output."""
        for token in path:
            out_TH = self.layer(token_T, hidden_TH)
            token_T = torch.cat((token_T, torch.tensor([token])))
            hidden_TH = torch.cat((hidden_TH, out_TH[-1:]))
        return self.logits(self.layer(token_T, hidden_TH)[-1])


@pytest.fixture(scope="module")
def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens after each position, and three hidden states of the target at it."""
    draws = torch.Generator().manual_seed(5)
    token_T = torch.randint(0, _VOCAB, (_LENGTH,), generator=draws)
    return token_T, torch.randn(_LENGTH, 3 * _TARGET_HIDDEN, generator=draws)


@pytest.mark.parametrize("on_device", [False, True], ids=["stepwise", "resident"])
@pytest.mark.parametrize("head", HEADS)
def test_extends_and_drafts_equal_the_reference(
    local: Callable[..., Any],
    hf_model: tuple[Any, Path],
    tmp_path: Path,
    inputs: tuple[torch.Tensor, torch.Tensor],
    head: Head,
    on_device: bool,
) -> None:
    reference = Reference(head, tmp_path / "head")
    engine = local(
        hf_model[1], tmp_path / "head", on_device=on_device, max_context=64, max_concurrency=1
    )
    model, (token_T, captured_TF) = engine.draft, inputs
    slot, start = torch.tensor([0]), torch.tensor([0])
    hidden_TH = model.forward(
        token_T[None], model.fuse(captured_TF), torch.arange(_LENGTH)[None], slot, start
    )
    expected_TH = reference.layer(token_T, reference.fuse(captured_TF))
    torch.testing.assert_close(hidden_TH, expected_TH, **_TOLERANCE)
    torch.testing.assert_close(model.logits(hidden_TH), reference.logits(expected_TH), **_TOLERANCE)

    # the root is the text's last token; its pair is settled, the tree hangs below
    spec = SpeculationConfig(method="eagle3", steps=3, topk=3, draft_tokens=16)
    logits_1R = model.logits(hidden_TH[-1:])
    tree = draft(
        model, spec, token_T[-1:], hidden_TH[-1:], logits_1R, slot, torch.tensor([_LENGTH])
    )
    parents, tokens = tree.parent_BT[0].tolist(), tree.token_BT[0].tolist()
    paths: list[list[int]] = [[]]
    for node in range(1, len(parents)):
        paths.append([*paths[parents[node]], tokens[node]])
    fused_TH = reference.fuse(captured_TF)
    for node, parent in enumerate(parents[1:], start=1):
        scores_R = reference.continued(token_T, fused_TH, paths[parent])
        best = reference.target_id[scores_R.topk(3).indices].tolist()
        assert best[int(tree.rank_BT[0, node])] == tokens[node], f"node {node}: {paths[node]}"
    assert max(len(path) for path in paths) == 3, "no path reached the last step"
