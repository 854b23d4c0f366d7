"""The tiny target's EAGLE-3 head: one layer that drafts from three of the target's hidden states.

Row p of a draft step reads a token's embedding and a hidden state. In the first step these are
token p + 1 and the fused target states of position p; it predicts token p + 2. Each later step
feeds the head's own output back, one token further. Training unrolls those steps ("training-time
test"): in step k, row p attends to the first step's keys of rows up to p, and to its own keys of
steps 1..k, which is what a chain drafted after position p sees.

Shapes: B batch, R rows, H hidden, N heads, D head size, V draft vocabulary, S tokens.
"""

import json
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from tiny_moe import RMSNorm, TinyConfig, TinyMoe, rope_table, rotate
from torch import nn

MLP_WIDTH = 512


def aux_layers(c: TinyConfig) -> tuple[int, int, int]:
    """Layers whose input states the head reads: vLLM's numbering (i = after i layers)."""
    return (2, c.num_layers // 2, c.num_layers - 1)


class EagleHead(nn.Module):
    """The head; the embedding is the target's and is passed in."""

    def __init__(self, c: TinyConfig, keep_V: torch.Tensor) -> None:
        super().__init__()
        self.c = c
        H, D, eps = c.hidden_size, c.head_dim, c.rms_norm_eps
        #: target ids of the draft vocabulary, ascending
        self.register_buffer("keep_V", keep_V)
        self.fc = nn.Linear(3 * H, H, bias=False)
        self.hidden_norm = RMSNorm(H, eps)
        self.input_norm = RMSNorm(H, eps)
        self.post_norm = RMSNorm(H, eps)
        self.q = nn.Linear(2 * H, c.num_heads * D, bias=False)
        self.k = nn.Linear(2 * H, c.num_kv_heads * D, bias=False)
        self.v = nn.Linear(2 * H, c.num_kv_heads * D, bias=False)
        self.o = nn.Linear(c.num_heads * D, H, bias=False)
        self.gate = nn.Linear(H, MLP_WIDTH, bias=False)
        self.up = nn.Linear(H, MLP_WIDTH, bias=False)
        self.down = nn.Linear(MLP_WIDTH, H, bias=False)
        self.norm = RMSNorm(H, eps)
        self.head = nn.Linear(H, len(keep_V), bias=False)
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.5 * p.shape[1] ** -0.5)

    def start_from(self, target: TinyMoe) -> None:
        """Begin with the target's own output norm and head rows."""
        self.norm.weight.data.copy_(target.norm.weight.data)
        self.head.weight.data.copy_(target.head.weight.data[self.keep_V])

    def fuse(self, aux: list[torch.Tensor]) -> torch.Tensor:
        """Three target states -> the hidden state of the first draft step."""
        return self.fc(torch.cat(aux, -1))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits over the draft vocabulary."""
        return self.head(self.norm(hidden))

    def _qkv(self, hidden_BRH, embed_BRH, positions_R):
        c = self.c
        B, R, _ = hidden_BRH.shape
        residual = self.hidden_norm(hidden_BRH)
        x = torch.cat([self.input_norm(embed_BRH), residual], -1)
        rope = rope_table(positions_R, c.head_dim, c.rope_theta)
        q, k, v = (
            linear(x).view(B, R, -1, c.head_dim).transpose(1, 2)
            for linear in (self.q, self.k, self.v)
        )
        repeat = c.num_heads // c.num_kv_heads
        k = rotate(k, rope).repeat_interleave(repeat, 1)
        return residual, rotate(q, rope), k, v.repeat_interleave(repeat, 1)

    def _finish(self, residual_BRH, attention_BNRD):
        attention = attention_BNRD.transpose(1, 2).flatten(2)
        x = residual_BRH + self.o(attention)
        h = self.post_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))

    def sequence(self, hidden_BRH: torch.Tensor, embed_BRH: torch.Tensor) -> torch.Tensor:
        """Plain causal pass over rows at positions 0..R-1; returns the output hidden states."""
        positions = torch.arange(hidden_BRH.shape[1], device=hidden_BRH.device)
        residual, q, k, v = self._qkv(hidden_BRH, embed_BRH, positions)
        attention = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self._finish(residual, attention)


class Unroll:
    """The unrolled draft steps of every row at once; call ``step`` with each step's embeddings."""

    def __init__(self, head: EagleHead, hidden_BRH: torch.Tensor) -> None:
        self.head = head
        self.hidden = hidden_BRH
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def step(self, embed_BRH: torch.Tensor) -> torch.Tensor:
        """One draft step of every row; returns draft logits [B, R, V]."""
        head, number = self.head, len(self.keys)
        R = self.hidden.shape[1]
        positions = torch.arange(number, number + R, device=embed_BRH.device)
        residual, q, k, v = head._qkv(self.hidden, embed_BRH, positions)
        self.keys.append(k)
        self.values.append(v)
        if number == 0:
            attention = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scale = head.c.head_dim**-0.5
            seen = torch.ones(R, R, dtype=torch.bool, device=q.device).tril()
            first = (q @ self.keys[0].mT).masked_fill(~seen, float("-inf"))
            own = [(q * key).sum(-1, keepdim=True) for key in self.keys[1:]]
            scores = torch.cat([first, *(s.to(first.dtype) for s in own)], -1)
            weight = (scores * scale).softmax(-1, dtype=torch.float32).to(v.dtype)
            attention = weight[..., :R] @ self.values[0]
            for i, value in enumerate(self.values[1:]):
                attention = attention + weight[..., R + i : R + i + 1] * value
        self.hidden = head._finish(residual, attention)
        return head.logits(self.hidden)


def distillation_loss(
    head: EagleHead, target: TinyMoe, ids_BS: torch.Tensor, num_steps: int, decay: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weighted soft-label loss of the unrolled steps, and each step's agreement with the target.

    Soft labels are the target's distribution over the draft vocabulary, at the positions where
    the target's most likely token is in it.
    """
    with torch.no_grad():
        states, aux, _ = target(ids_BS, aux_layers(target.c))
        logits = target.head(states).float()
        best_BS = logits.argmax(-1)
        in_vocabulary = torch.zeros(logits.shape[-1], dtype=torch.bool, device=ids_BS.device)
        in_vocabulary[head.keep_V] = True
        usable_BS = in_vocabulary[best_BS]
        soft_BSV = logits[..., head.keep_V].softmax(-1)
        embed = target.embed(ids_BS)
    rows = ids_BS.shape[1] - num_steps
    unroll = Unroll(head, head.fuse([a[:, :rows] for a in aux]))
    loss, agreement = torch.zeros((), device=ids_BS.device), []
    for k in range(num_steps):
        at = slice(k + 1, k + 1 + rows)
        log_p = unroll.step(embed[:, at]).float().log_softmax(-1)
        usable = usable_BS[:, at]
        cross = -(soft_BSV[:, at] * log_p).sum(-1)
        loss = loss + decay**k * (cross * usable).sum() / usable.sum().clamp_min(1)
        agreement.append((head.keep_V[log_p.argmax(-1)] == best_BS[:, at]).float().mean())
    return loss, torch.stack(agreement).detach()


def public_weights(head: EagleHead) -> dict[str, torch.Tensor]:
    """The weights themselves under the public EAGLE-3 names."""
    state = {"fc.weight": head.fc.weight, "norm.weight": head.norm.weight}
    state["lm_head.weight"] = head.head.weight
    names = {"hidden_norm": "hidden_norm", "input_layernorm": "input_norm"}
    names["post_attention_layernorm"] = "post_norm"
    names |= {f"self_attn.{n}_proj": n for n in ("q", "k", "v", "o")}
    names |= {f"mlp.{n}_proj": n for n in ("gate", "up", "down")}
    for public, own in names.items():
        state[f"midlayer.{public}.weight"] = getattr(head, own).weight
    return {name: weight.detach() for name, weight in state.items()}


def load_head(c: TinyConfig, folder: Path) -> EagleHead:
    """The head that ``save_head`` wrote."""
    from safetensors.torch import load_file

    tensors = load_file(str(folder / "model.safetensors"))
    head = EagleHead(c, tensors["t2d"].nonzero()[:, 0])
    for name, weight in public_weights(head).items():
        weight.copy_(tensors[name])
    return head


def save_head(head: EagleHead, folder: Path) -> None:
    """Write the head in the public EAGLE-3 format (``LlamaForCausalLMEagle3``)."""
    from safetensors.torch import save_file

    c = head.c
    tensors = {k: v.to("cpu", torch.bfloat16).contiguous() for k, v in public_weights(head).items()}
    keep = head.keep_V.cpu().long()
    # offsets: target id = draft id + d2t[draft id]
    tensors["d2t"] = keep - torch.arange(len(keep))
    tensors["t2d"] = torch.zeros(c.vocab_size, dtype=torch.bool).index_fill(0, keep, True)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": c.hidden_size,
        "intermediate_size": MLP_WIDTH,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "num_hidden_layers": 1,
        "vocab_size": c.vocab_size,
        "draft_vocab_size": len(keep),
        "rms_norm_eps": c.rms_norm_eps,
        "rope_theta": c.rope_theta,
        "max_position_embeddings": c.max_positions,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 0,
        "attention_bias": False,
        "norm_before_residual": True,
        # two readings are in use: at top level "the states entering layer i" (vLLM), inside
        # eagle_config "the states leaving layer i" (SGLang); both name the same states here
        "eagle_aux_hidden_state_layer_ids": list(aux_layers(c)),
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [i - 1 for i in aux_layers(c)]},
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
