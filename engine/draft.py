# ruff: noqa: N812 - torch's customary name
"""The EAGLE-3 head's forward, for draft steps (tree nodes) and draft-extend (accepted tokens).

Row i of the head's cache belongs to the pair (embedding of token i + 1, hidden state of position
i) and stands at position i: its output predicts token i + 2. Legend as in ``engine.target``; H is
the head's hidden size, R its vocabulary, M nodes of the draft tree forwarded so far.
"""

import torch
import torch.nn.functional as F

from engine.dense import Dense
from engine.draft_weights import DraftWeights
from engine.policy import Policies
from engine.shapes import DraftShape
from engine.target import FUSED_ROWS, FUSED_TOKENS, rope_tables
from kernels.opset import OpSet


class DraftModel:
    """The head with its cache; on rank 0 only, because one layer does not pay for all-reduces."""

    def __init__(
        self, shape: DraftShape, weights: DraftWeights, ops: OpSet, *, slots: int, rows: int
    ) -> None:
        self.shape, self.weights, self.ops = shape, weights, ops
        # the head lives on one rank, whatever the target does
        self.dense, self.policies = Dense(ops), Policies(alone=True)
        #: whether forwards of few tokens use the fused ops
        self.fused = ops.name == "triton"
        fc = weights.fc_HF
        self.cache_XSCGD = torch.zeros(
            2, slots, rows, shape.kv_heads, shape.head_dim, dtype=fc.dtype, device=fc.device
        )
        self.cos_PD, self.sin_PD = rope_tables(shape.rope_theta, shape.head_dim, rows, fc.device)
        self.scale = shape.head_dim**-0.5

    def fuse(self, captured_NF: torch.Tensor) -> torch.Tensor:
        """Three hidden states of the target -> one of the head."""
        if self.fused:
            return self.dense.linear_add(captured_NF, self.weights.fc_HF, None)
        return F.linear(captured_NF, self.weights.fc_HF)

    def forward(
        self,
        token_BT: torch.Tensor,
        hidden_NH: torch.Tensor,
        position_BT: torch.Tensor,
        slot_B: torch.Tensor,
        prefix_B: torch.Tensor,
        tree_mask_BMM: torch.Tensor | None = None,
        only_B: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Hidden states (N, H) before the last norm: what the next draft step takes as input.

        Without a mask the T tokens follow row ``prefix_b`` causally. With one, M nodes hang below
        ``prefix_b`` and the T tokens are the last of them; the others are in the cache already.
        ``only``: the one token of each sequence whose hidden state is wanted, (B, H); the others
        are settled in the cache and go no further.
        """
        num_tokens = token_BT.shape[1]
        # kernels read rows one after the other; of one sequence, an expanded level reshapes to a
        # view whose rows are all the same memory
        hidden_NH, position_BT = hidden_NH.contiguous(), position_BT.contiguous()
        if self.fused and num_tokens <= FUSED_TOKENS and token_BT.numel() <= FUSED_ROWS:
            with self.policies.launching(len(hidden_NH)):
                o, residual = self._attend_few(
                    token_BT, hidden_NH, position_BT, slot_B, prefix_B, tree_mask_BMM
                )
        else:
            o, residual = self._attend(
                token_BT, hidden_NH, position_BT, slot_B, prefix_B, tree_mask_BMM
            )
        if only_B is not None:
            o, residual = self.ops.pick(o, residual.contiguous(), only_B)
        if self.fused and len(o) <= FUSED_ROWS:
            with self.policies.launching(len(o)):
                return self._rest_few(o, residual)
        weights, eps = self.weights, self.shape.rms_eps
        x = F.linear(o, weights.o_HQ)
        y, residual = self.ops.add_rms_norm(x, residual, weights.post_norm_H, eps)
        gate, up = F.linear(y, weights.gate_up_JH).chunk(2, dim=-1)
        out_NH: torch.Tensor = F.linear(F.silu(gate) * up, weights.down_HI) + residual
        return out_NH

    def _attend_few(
        self,
        token_BT: torch.Tensor,
        hidden_NH: torch.Tensor,
        position_BT: torch.Tensor,
        slot_B: torch.Tensor,
        prefix_B: torch.Tensor,
        tree_mask_BMM: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention's outputs (N, Q) before the projection, and the residual stream (N, H)."""
        shape, weights, ops = self.shape, self.weights, self.ops
        num_tokens = token_BT.shape[1]
        y, normed_NH = ops.draft_input(
            token_BT.reshape(-1),
            weights.embed_VH,
            hidden_NH,
            weights.input_norm_H,
            weights.hidden_norm_H,
            shape.rms_eps,
        )
        mask_BTM = None if tree_mask_BMM is None else tree_mask_BMM[:, -num_tokens:].contiguous()
        o = ops.qkv_attention(
            self.dense.linear_add(y, weights.qkv_PX, None),
            None,
            None,
            0.0,
            position_BT.reshape(-1),
            self.cos_PD,
            self.sin_PD,
            self.cache_XSCGD[0],
            self.cache_XSCGD[1],
            slot_B,
            prefix_B,
            mask_BTM,
            self.scale,
        )
        return o, normed_NH if shape.norm_before_residual else hidden_NH

    def _rest_few(self, o_NQ: torch.Tensor, residual_NH: torch.Tensor) -> torch.Tensor:
        weights, dense = self.weights, self.dense
        x = dense.linear_add(o_NQ, weights.o_HQ, residual_NH)
        gate_up = dense.norm_linear(x, weights.post_norm_H, self.shape.rms_eps, weights.gate_up_JH)
        out_NH: torch.Tensor = dense.linear_add(self.ops.silu_product(gate_up), weights.down_HI, x)
        return out_NH

    def best(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        """The likeliest draft id of each row (N); fused ops write no logits for it."""
        if not self.fused:
            return self.logits(hidden_NH).argmax(-1)
        token_N: torch.Tensor = self.dense.norm_argmax(
            hidden_NH, self.weights.norm_H, self.shape.rms_eps, self.weights.head_RH
        )[0]
        return token_N

    def logits(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        """fp32 logits (N, R) over the draft vocabulary."""
        normed = self.ops.rms_norm(hidden_NH, self.weights.norm_H, self.shape.rms_eps)
        return F.linear(normed, self.weights.head_RH).float()

    def _attend(
        self,
        token_BT: torch.Tensor,
        hidden_NH: torch.Tensor,
        position_BT: torch.Tensor,
        slot_B: torch.Tensor,
        prefix_B: torch.Tensor,
        tree_mask_BMM: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As ``_attend_few`` with the basic ops."""
        weights, ops, eps = self.weights, self.ops, self.shape.rms_eps
        n, g, d = self.shape.heads, self.shape.kv_heads, self.shape.head_dim
        num_sequences, num_tokens = position_BT.shape
        embed_NH = F.embedding(token_BT.reshape(-1), weights.embed_VH)
        normed_NH = ops.rms_norm(hidden_NH, weights.hidden_norm_H, eps)
        y = torch.cat((ops.rms_norm(embed_NH, weights.input_norm_H, eps), normed_NH), dim=-1)
        qkv = F.linear(y, weights.qkv_PX).view(-1, n + 2 * g, d)
        q, k, v = qkv[:, :n], qkv[:, n : n + g], qkv[:, n + g :]
        position_N = position_BT.reshape(-1)
        q, k = ops.qk_norm_rope(q, k, None, None, 0.0, position_N, self.cos_PD, self.sin_PD)
        k_BTGD = k.reshape(num_sequences, num_tokens, g, d)
        v_BTGD = v.reshape(num_sequences, num_tokens, g, d)
        q_BTND = q.reshape(num_sequences, num_tokens, n, d)
        num_before = 0 if tree_mask_BMM is None else tree_mask_BMM.shape[1] - num_tokens
        if num_before:
            # the op has as many queries as the mask has nodes: earlier nodes ask nothing
            q_BTND = F.pad(q_BTND, (0, 0, 0, 0, num_before, 0))
        k_cache, v_cache = self.cache_XSCGD[0], self.cache_XSCGD[1]
        ops.store_kv(k_BTGD, v_BTGD, k_cache, v_cache, slot_B, prefix_B + num_before)
        o_BMND = ops.tree_attention(
            q_BTND, k_cache, v_cache, slot_B, prefix_B, tree_mask_BMM, self.scale
        )
        o_NQ = o_BMND[:, num_before:].reshape(-1, n * d)
        return o_NQ, normed_NH if self.shape.norm_before_residual else hidden_NH
