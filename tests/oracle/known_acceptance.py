"""Makes a target and an EAGLE-3 head whose acceptance is known, for exact comparisons.

The target walks one cycle through the vocabulary whatever came before: embeddings are random unit
rows (with one constant coordinate), the output head maps token t's embedding to its successor, and
attention and experts run but are damped. The head's attention looks at the current token only and
passes its embedding on; its own output head knows the successor for a random share of the tokens.

With the default sizes and ALPHA 0.7 the generator draws in the same order as the maker behind the
recorded vLLM 0.32.0 run, so that the successor table, the draft vocabulary and the known tokens are
the same ones, and vLLM's integers must come out: 417 drafts, 1251 drafted, 620 accepted,
268/209/143 by position.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

ALPHA = 0.7
_SEED = 7


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Defaults: the recorded run's."""

    vocab: int = 4096
    draft_vocab: int = 3072
    hidden: int = 256
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    experts: int = 8
    expert_width: int = 128
    draft_width: int = 512
    max_position: int = 2048
    #: share of the known tokens for which a wrong token scores higher: only a tree finds them
    second_share: float = 0.0
    dtype: torch.dtype = torch.bfloat16


SMALL = Sizes(
    vocab=300,
    draft_vocab=250,
    hidden=64,
    layers=3,
    heads=8,
    kv_heads=2,
    head_dim=16,
    expert_width=16,
    draft_width=64,
    max_position=512,
    second_share=0.3,
    dtype=torch.float32,
)


def make(folder: Path, sizes: Sizes, alpha: float = ALPHA) -> None:
    """Write ``folder/target`` and ``folder/eagle3``; token 0 ends a text and follows nothing."""
    draws = torch.Generator().manual_seed(_SEED)
    count, hidden = sizes.vocab, sizes.hidden
    embed = torch.randn(count, hidden, generator=draws)
    embed[:, 0] = 0
    embed *= (hidden - 16) ** 0.5 / embed.norm(dim=1, keepdim=True)
    embed[:, 0] = 4.0
    cycle = torch.randperm(count - 1, generator=draws) + 1
    successor = torch.zeros(count, dtype=torch.long)
    successor[cycle] = torch.roll(cycle, -1)
    predecessor = torch.zeros_like(successor)
    predecessor[successor[1:]] = torch.arange(1, count)
    _write_target(folder / "target", sizes, embed, predecessor)
    _write_head(folder / "eagle3", sizes, embed, predecessor, alpha, draws)


def successors(sizes: Sizes) -> torch.Tensor:
    """The token that the target says after each token (0 for token 0)."""
    draws = torch.Generator().manual_seed(_SEED)
    torch.randn(sizes.vocab, sizes.hidden, generator=draws)
    cycle = torch.randperm(sizes.vocab - 1, generator=draws) + 1
    successor = torch.zeros(sizes.vocab, dtype=torch.long)
    successor[cycle] = torch.roll(cycle, -1)
    return successor


def recorded_protocol() -> list[tuple[tuple[int, ...], int]]:
    """Prompts and output lengths of the recorded run."""

    def prompt(k: int) -> tuple[int, ...]:
        return tuple((k * 7919 + j * 104729) % 4095 + 1 for j in range(16))

    return [(prompt(0), 8), *((prompt(k), 64) for k in range(16))]


def _write_target(
    folder: Path, sizes: Sizes, embed: torch.Tensor, predecessor: torch.Tensor
) -> None:
    noise = torch.Generator().manual_seed(1)

    def random(*shape: int, scale: float = 0.02) -> torch.Tensor:
        return torch.randn(*shape, generator=noise) * scale

    h, d, width = sizes.hidden, sizes.head_dim, sizes.expert_width
    unembed = embed[predecessor] * 0.5
    unembed[:, 0] = 0
    unembed[0] = 0
    tensors = {
        "model.embed_tokens.weight": embed,
        "model.norm.weight": torch.ones(h),
        "lm_head.weight": unembed,
    }
    for i in range(sizes.layers):
        at = f"model.layers.{i}"
        tensors |= {
            f"{at}.input_layernorm.weight": torch.ones(h),
            f"{at}.post_attention_layernorm.weight": torch.ones(h),
            f"{at}.self_attn.q_norm.weight": torch.ones(d),
            f"{at}.self_attn.k_norm.weight": torch.ones(d),
            f"{at}.self_attn.q_proj.weight": random(sizes.heads * d, h),
            f"{at}.self_attn.k_proj.weight": random(sizes.kv_heads * d, h),
            f"{at}.self_attn.v_proj.weight": random(sizes.kv_heads * d, h),
            f"{at}.self_attn.o_proj.weight": random(h, sizes.heads * d, scale=0.002),
            f"{at}.mlp.gate.weight": random(sizes.experts, h),
        }
        for e in range(sizes.experts):
            mlp = f"{at}.mlp.experts.{e}"
            tensors[f"{mlp}.gate_proj.weight"] = random(width, h)
            tensors[f"{mlp}.up_proj.weight"] = random(width, h)
            tensors[f"{mlp}.down_proj.weight"] = random(h, width, scale=0.002)
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": sizes.vocab,
        "hidden_size": h,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": d,
        "moe_intermediate_size": width,
        "num_experts": sizes.experts,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": sizes.max_position,
        "tie_word_embeddings": False,
        "eos_token_id": 0,
        "hidden_act": "silu",
    }
    _write(folder, config, {n: t.to(sizes.dtype) for n, t in tensors.items()})


def _write_head(
    folder: Path,
    sizes: Sizes,
    embed: torch.Tensor,
    predecessor: torch.Tensor,
    alpha: float,
    draws: torch.Generator,
) -> None:
    h, d, rows = sizes.hidden, sizes.head_dim, sizes.draft_vocab
    q, k = torch.zeros(sizes.heads * d, 2 * h), torch.zeros(sizes.kv_heads * d, 2 * h)
    # equal constant queries and keys: rotary positions alone decide, and distance 0 wins
    q[:, 0], k[:, 0] = 3.0, 3.0
    basis = torch.linalg.qr(torch.randn(h - 1, sizes.kv_heads * d, generator=draws))[0]
    v, o = torch.zeros_like(k), torch.zeros(h, sizes.heads * d)
    v[: basis.shape[1], 1:h] = basis.T
    for head in range(sizes.heads):
        kv = head // (sizes.heads // sizes.kv_heads)
        part = basis[:, kv * d : (kv + 1) * d]
        o[1:, head * d : head * d + part.shape[1]] = part * 20.0
    kept = (torch.randperm(sizes.vocab - 1, generator=draws) + 1)[:rows].sort().values
    known = torch.rand(rows, generator=draws) >= 1 - alpha * (sizes.vocab - 1) / rows
    output = embed[predecessor[kept]] * 0.1
    output[:, 0] = 0
    output[~known] = 0
    second = known & (torch.rand(rows, generator=draws) < sizes.second_share)
    # a wrong row that answers louder to the same token puts the right one on rank 2
    output[torch.roll(second, 1)] += (
        1.3 * torch.roll(output * second[:, None], 1, 0)[torch.roll(second, 1)]
    )
    in_draft = torch.zeros(sizes.vocab, dtype=torch.bool)
    in_draft[kept] = True
    width = sizes.draft_width

    def random(a: int, b: int, scale: float) -> torch.Tensor:
        return torch.randn(a, b, generator=draws) * scale

    ones = torch.ones(h)
    tensors = {
        "fc.weight": torch.cat((torch.zeros(h, 2 * h), torch.eye(h) * 0.01), 1),
        "norm.weight": ones,
        "lm_head.weight": output,
        "midlayer.hidden_norm.weight": ones.clone(),
        "midlayer.input_layernorm.weight": ones.clone(),
        "midlayer.post_attention_layernorm.weight": ones.clone(),
        "midlayer.self_attn.q_proj.weight": q,
        "midlayer.self_attn.k_proj.weight": k,
        "midlayer.self_attn.v_proj.weight": v,
        "midlayer.self_attn.o_proj.weight": o,
        "midlayer.mlp.gate_proj.weight": random(width, h, 0.02),
        "midlayer.mlp.up_proj.weight": random(width, h, 0.02),
        "midlayer.mlp.down_proj.weight": random(h, width, 0.002),
    }
    stored = {name: t.to(sizes.dtype).contiguous() for name, t in tensors.items()}
    stored["d2t"] = kept - torch.arange(rows)
    stored["t2d"] = in_draft
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": h,
        "intermediate_size": width,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": d,
        "num_hidden_layers": 1,
        "vocab_size": sizes.vocab,
        "draft_vocab_size": rows,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "norm_before_residual": True,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
    }
    _write(folder, config, stored)


def _write(folder: Path, config: dict[str, object], tensors: dict[str, torch.Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file(
        {name: t.contiguous() for name, t in tensors.items()}, str(folder / "model.safetensors")
    )
