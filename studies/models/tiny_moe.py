"""The tiny target: a Qwen3-MoE written for fast training, exported under Hugging Face's names.

Every expert is computed for every token and weighted by its routing weight (zero for the experts
that were not chosen): with 8 narrow experts that is two large matrix products a layer, faster on
a GPU than any dispatch, and the same function as ``Qwen3MoeForCausalLM``.

Shapes: B batch, S tokens, H hidden, N query heads, G key-value heads, D head size, E experts,
I expert width, V vocabulary.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyConfig:
    """Sizes of the target; heads, widths and vocabulary divide by 8, for 8 ranks."""

    vocab_size: int = 2048
    hidden_size: int = 192
    num_layers: int = 16
    num_heads: int = 8
    num_kv_heads: int = 4
    head_dim: int = 32
    num_experts: int = 8
    experts_per_token: int = 2
    expert_width: int = 64
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    max_positions: int = 2048
    #: of each layer's two outputs, in training
    dropout: float = 0.1

    def hf(self):
        """The same as a ``transformers`` configuration."""
        from transformers import Qwen3MoeConfig

        return Qwen3MoeConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.expert_width * self.num_experts,
            moe_intermediate_size=self.expert_width,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            num_experts=self.num_experts,
            num_experts_per_tok=self.experts_per_token,
            norm_topk_prob=True,
            decoder_sparse_step=1,
            mlp_only_layers=[],
            max_position_embeddings=self.max_positions,
            rope_parameters={"rope_type": "default", "rope_theta": self.rope_theta},
            rms_norm_eps=self.rms_norm_eps,
            tie_word_embeddings=False,
            bos_token_id=0,
            eos_token_id=0,
            pad_token_id=0,
        )


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in fp32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x32 = x.float()
        x32 = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight.to(x.dtype) * x32.to(x.dtype)


def rope_table(positions_S: torch.Tensor, head_dim: int, theta: float) -> torch.Tensor:
    """cos and sin, [2, S, D], fp32, half-rotation layout."""
    half = torch.arange(0, head_dim, 2, device=positions_S.device, dtype=torch.float32)
    angle = positions_S.float()[:, None] * theta ** (-half / head_dim)
    angle = torch.cat([angle, angle], -1)
    return torch.stack([angle.cos(), angle.sin()])


def rotate(x_BNSD: torch.Tensor, rope_2SD: torch.Tensor) -> torch.Tensor:
    """Apply rotary positions (Hugging Face's half rotation)."""
    first, second = x_BNSD.chunk(2, -1)
    turned = torch.cat([-second, first], -1)
    rope = rope_2SD.to(x_BNSD.dtype)
    return x_BNSD * rope[0] + turned * rope[1]


class Layer(nn.Module):
    """Attention with q and k norms, then a mixture of experts."""

    def __init__(self, c: TinyConfig) -> None:
        super().__init__()
        self.c = c
        H, D, E, width = c.hidden_size, c.head_dim, c.num_experts, c.expert_width
        self.input_norm = RMSNorm(H, c.rms_norm_eps)
        self.post_norm = RMSNorm(H, c.rms_norm_eps)
        self.q = nn.Linear(H, c.num_heads * D, bias=False)
        self.k = nn.Linear(H, c.num_kv_heads * D, bias=False)
        self.v = nn.Linear(H, c.num_kv_heads * D, bias=False)
        self.o = nn.Linear(c.num_heads * D, H, bias=False)
        self.q_norm = RMSNorm(D, c.rms_norm_eps)
        self.k_norm = RMSNorm(D, c.rms_norm_eps)
        self.router = nn.Linear(H, E, bias=False)
        self.gate = nn.Linear(H, E * width, bias=False)
        self.up = nn.Linear(H, E * width, bias=False)
        self.down = nn.Linear(E * width, H, bias=False)

    def forward(
        self,
        x_BSH: torch.Tensor,
        rope_2SD: torch.Tensor,
        cache: tuple[torch.Tensor, torch.Tensor] | None,
        start: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output hidden states and this layer's load-balancing loss (1 when balanced)."""
        c = self.c
        B, S, _ = x_BSH.shape
        h = self.input_norm(x_BSH)
        q = rotate(self.q_norm(self.q(h).view(B, S, -1, c.head_dim)).transpose(1, 2), rope_2SD)
        k = rotate(self.k_norm(self.k(h).view(B, S, -1, c.head_dim)).transpose(1, 2), rope_2SD)
        v = self.v(h).view(B, S, -1, c.head_dim).transpose(1, 2)
        if cache is not None:
            cache[0][:, :, start : start + S] = k
            cache[1][:, :, start : start + S] = v
            k, v = cache[0][:, :, : start + S], cache[1][:, :, : start + S]
        repeat = c.num_heads // c.num_kv_heads
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        # a single query sees all of the cache; several start from an empty one
        a = F.scaled_dot_product_attention(q, k, v, is_causal=S > 1)
        a = self.o(a.transpose(1, 2).reshape(B, S, -1))
        x_BSH = x_BSH + F.dropout(a, c.dropout, self.training)
        moe, balance = self.moe(self.post_norm(x_BSH))
        return x_BSH + F.dropout(moe, c.dropout, self.training), balance

    def moe(self, h_BSH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """All experts on all tokens, weighted by the renormalised top-k routing probabilities."""
        c = self.c
        probability = self.router(h_BSH).float().softmax(-1)
        top, chosen = probability.topk(c.experts_per_token, -1)
        top = top / top.sum(-1, keepdim=True)
        weight = torch.zeros_like(probability).scatter(-1, chosen, top)
        inner = F.silu(self.gate(h_BSH)) * self.up(h_BSH)
        inner = inner.unflatten(-1, (c.num_experts, c.expert_width))
        inner = inner * weight.to(inner.dtype).unsqueeze(-1)
        # Switch Transformer's auxiliary loss: E * sum_e (share of tokens) * (mean probability)
        share = (weight > 0).float().flatten(0, -2).mean(0) / c.experts_per_token
        balance = c.num_experts * (share * probability.flatten(0, -2).mean(0)).sum()
        return self.down(inner.flatten(-2)), balance


class TinyMoe(nn.Module):
    """The target. ``forward`` also returns the hidden states that an EAGLE-3 head reads."""

    def __init__(self, c: TinyConfig) -> None:
        super().__init__()
        self.c = c
        self.embed = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.num_layers))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                last = name.endswith(("o.weight", "down.weight"))
                nn.init.normal_(p, std=0.02 / (2 * c.num_layers) ** 0.5 if last else 0.02)
        nn.init.normal_(self.embed.weight, std=0.5)

    def forward(
        self,
        ids_BS: torch.Tensor,
        aux_layers: tuple[int, ...] = (),
        cache: list[tuple[torch.Tensor, torch.Tensor]] | None = None,
        start: int = 0,
    ) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
        """Normed final states [B, S, H], the states that enter ``aux_layers``, balance loss."""
        c = self.c
        positions = torch.arange(start, start + ids_BS.shape[1], device=ids_BS.device)
        rope = rope_table(positions, c.head_dim, c.rope_theta)
        x = self.embed(ids_BS)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.bfloat16)
        aux, balance = [], []
        for index, layer in enumerate(self.layers):
            if index in aux_layers:
                aux.append(x)
            # with a cache every step has another shape: not for the compiled layer
            run = layer if cache is None else layer.forward
            x, layer_balance = run(x, rope, None if cache is None else cache[index], start)
            balance.append(layer_balance)
        return self.norm(x), aux, torch.stack(balance).mean()

    def new_cache(self, batch: int, rows: int, like: torch.Tensor):
        """Empty key and value caches, [B, G, rows, D] a layer."""
        c = self.c
        shape = (batch, c.num_kv_heads, rows, c.head_dim)
        return [(like.new_empty(shape), like.new_empty(shape)) for _ in range(c.num_layers)]

    def hf_views(self) -> dict[str, torch.Tensor]:
        """The weights themselves under a Qwen3-MoE checkpoint's names, one matrix an expert."""
        c = self.c
        state = {
            "model.embed_tokens.weight": self.embed.weight,
            "model.norm.weight": self.norm.weight,
            "lm_head.weight": self.head.weight,
        }
        for i, layer in enumerate(self.layers):
            p = f"model.layers.{i}."
            state |= {
                f"{p}input_layernorm.weight": layer.input_norm.weight,
                f"{p}post_attention_layernorm.weight": layer.post_norm.weight,
                f"{p}mlp.gate.weight": layer.router.weight,
            }
            for name in ("q", "k", "v", "o"):
                state[f"{p}self_attn.{name}_proj.weight"] = getattr(layer, name).weight
            for name in ("q_norm", "k_norm"):
                state[f"{p}self_attn.{name}.weight"] = getattr(layer, name).weight
            for e in range(c.num_experts):
                rows = slice(e * c.expert_width, (e + 1) * c.expert_width)
                state[f"{p}mlp.experts.{e}.gate_proj.weight"] = layer.gate.weight[rows]
                state[f"{p}mlp.experts.{e}.up_proj.weight"] = layer.up.weight[rows]
                state[f"{p}mlp.experts.{e}.down_proj.weight"] = layer.down.weight[:, rows]
        return {name: weight.detach() for name, weight in state.items()}

    def hf_state(self) -> dict[str, torch.Tensor]:
        """bf16 copies for a checkpoint."""
        views = self.hf_views()
        return {k: v.to("cpu", torch.bfloat16).contiguous() for k, v in views.items()}

    def load_hf_state(self, state: dict[str, torch.Tensor]) -> None:
        """The inverse of ``hf_state``."""
        for name, weight in self.hf_views().items():
            weight.copy_(state[name])

    def round_to_bf16(self) -> None:
        """Round the weights to what the checkpoint holds, so that measurements are of that."""
        for p in self.parameters():
            p.data = p.data.to(torch.bfloat16).to(p.dtype)
