# ruff: noqa: N812, N815 - torch's customary F; fields are tensors with shape suffixes
"""The target's forward: B sequences of T new tokens each, over a slotted key/value cache.

The same function serves prefill (B = 1, causal), plain decoding (T = 1), and verify (T tree nodes
under a tree mask). It syncs with nothing and decides nothing by data, so it can be captured.
Legend: N = B x T tokens in a row, H hidden, n/g query and key heads of this rank, D head size,
X caches (keys and values of every layer), S slots, C rows a slot, R rows of the head.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from engine.collectives import Group
from engine.dense import Dense
from engine.policy import Policies
from engine.shapes import TargetShape
from engine.timing import Timer
from engine.weights import TargetLayer, TargetWeights
from kernels.opset import OpSet


@dataclass(frozen=True, slots=True)
class Batch:
    """Input of one forward; token t of sequence b is stored at row ``prefix_b + t`` of its slot."""

    token_BT: torch.Tensor
    #: positions in the sequence: prefix + depth in the tree
    position_BT: torch.Tensor
    slot_B: torch.Tensor
    #: rows already in the cache
    prefix_B: torch.Tensor
    #: which of the T tokens each token sees; None is causal
    mask_BTT: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Forward:
    """Output of one forward."""

    #: final hidden states before the last norm, as (last addend, residual)
    x_NH: torch.Tensor
    residual_NH: torch.Tensor
    #: the three captured hidden states side by side, (N, 3H); None unless asked for
    captured_NF: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a row's token is drawn (``kernels.draw``); temperature 0 takes the likeliest."""

    temperature_N: torch.Tensor
    seed_N: torch.Tensor
    #: of the row's input token
    position_N: torch.Tensor


#: tokens of a sequence, and rows in all, up to which the fused ops serve a forward
FUSED_TOKENS, FUSED_ROWS = 64, 512


def rope_tables(
    theta: float, head_dim: int, positions: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 cosines and sines, (positions, head_dim), both halves of a row the same."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    angle = torch.arange(positions).float()[:, None] * (1.0 / theta**exponent)
    table = torch.cat((angle, angle), dim=-1)
    return table.cos().to(device), table.sin().to(device)


class TargetModel:
    """One rank's share of the target, with its cache."""

    def __init__(
        self,
        shape: TargetShape,
        weights: TargetWeights,
        group: Group,
        ops: OpSet,
        *,
        slots: int,
        rows: int,
        capture_points: tuple[int, ...] = (),
    ) -> None:
        self.shape, self.weights, self.group, self.ops = shape, weights, group, ops
        self.capture_points = capture_points
        embed = weights.embed_VH
        self.dense, self.policies = Dense(ops), Policies(alone=group.tp == 1)
        #: where set, every fused forward appends each layer's chosen experts
        self.expert_log: list[torch.Tensor] | None = None
        self.heads = shape.heads // group.tp
        self.kv_heads = max(shape.kv_heads // group.tp, 1)
        self.scale = shape.head_dim**-0.5
        self.cache_XSCGD = torch.zeros(
            2 * shape.layers,
            slots,
            rows,
            self.kv_heads,
            shape.head_dim,
            dtype=embed.dtype,
            device=embed.device,
        )
        self.caches = tuple(
            (self.cache_XSCGD[2 * i], self.cache_XSCGD[2 * i + 1]) for i in range(shape.layers)
        )
        self.cos_PD, self.sin_PD = rope_tables(shape.rope_theta, shape.head_dim, rows, embed.device)

    def forward(self, batch: Batch, timer: Timer, phase: str) -> Forward:
        """Run all layers; ``phase`` ("decode" or "verify") names the laps."""
        shape, ops, weights = self.shape, self.ops, self.weights
        attention, moe, allreduce = f"{phase}.attention", f"{phase}.moe", f"{phase}.allreduce"
        position_N = batch.position_BT.contiguous().view(-1)
        residual = F.embedding(batch.token_BT.reshape(-1), weights.embed_VH)
        captured = [residual] if 0 in self.capture_points else []
        x = residual
        timer.mark(f"{phase}.other")
        for i, layer in enumerate(weights.layers):
            if i == 0:
                y = ops.rms_norm(residual, layer.input_norm_H, shape.rms_eps)
            else:
                y, residual = ops.add_rms_norm(x, residual, layer.input_norm_H, shape.rms_eps)
                if i in self.capture_points:
                    captured.append(residual)
            x = self._attention(layer, i, y, position_N, batch)
            timer.mark(attention)
            self.group.all_reduce(x)
            timer.mark(allreduce)
            y, residual = ops.add_rms_norm(x, residual, layer.post_norm_H, shape.rms_eps)
            weight_NK, expert_NK = ops.route(
                F.linear(y, layer.router_EH), shape.experts_per_token, renormalize=shape.renormalize
            )
            x = ops.moe_mlp(y, layer.gate_up_EJH, layer.down_EHI, weight_NK, expert_NK)
            timer.mark(moe)
            self.group.all_reduce(x)
            timer.mark(allreduce)
        if shape.layers in self.capture_points:
            captured.append(x + residual)
        fused = self._in_order(captured) if captured else None
        return Forward(x, residual, fused)

    def forward_few(
        self,
        batch: Batch,
        timer: Timer,
        phase: str,
        captured_out: torch.Tensor | None = None,
        *,
        captures: bool,
        embedded_NH: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As ``forward`` for few tokens, in six kernels a layer where the ops are fused.

        Returns the residual stream (N, H) before the last norm and, with ``captures``, the captured
        hidden states, which are written to ``captured_out`` where given. ``embedded`` are the
        tokens' embeddings where they are at hand. Larger batches go through ``forward``.
        """
        num_tokens = batch.token_BT.shape[1]
        if num_tokens > FUSED_TOKENS or batch.token_BT.numel() > FUSED_ROWS:
            out = self.forward(batch, timer, phase)
            captured_NF = out.captured_NF
            if captured_out is not None and captured_NF is not None:
                captured_NF = captured_out.copy_(captured_NF)
            return out.x_NH + out.residual_NH, captured_NF
        hidden_NH = embedded_NH
        if hidden_NH is None:
            hidden_NH = F.embedding(batch.token_BT.reshape(-1), self.weights.embed_VH)
        timer.mark(f"{phase}.other")
        # a kernel after an event has no kernel before it to start early beside
        takes_laps = hasattr(timer, "marks")
        with self.policies.launching(0 if takes_laps else len(hidden_NH)):
            hidden_NH, captured = self._layers_few(
                batch, hidden_NH, self.capture_points if captures else (), timer, phase
            )
        return hidden_NH, self._in_order(captured, captured_out) if captured else None

    def _layers_few(
        self,
        batch: Batch,
        hidden_NH: torch.Tensor,
        points: tuple[int, ...],
        timer: Timer,
        phase: str,
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """All layers with the fused ops; the residual stream at the end and at ``points``."""
        shape, ops = self.shape, self.ops
        moe, allreduce = f"{phase}.moe", f"{phase}.allreduce"
        position_N = batch.position_BT.contiguous().view(-1)
        leads = self.group.rank == 0
        captured = []
        for i, layer in enumerate(self.weights.layers):
            if i in points:
                captured.append(hidden_NH)
            qkv_NP = self.dense.norm_linear(
                hidden_NH, layer.input_norm_H, shape.rms_eps, layer.qkv_PH
            )
            o_NQ = ops.qkv_attention(
                qkv_NP,
                layer.q_norm_D,
                layer.k_norm_D,
                shape.rms_eps,
                position_N,
                self.cos_PD,
                self.sin_PD,
                *self.caches[i],
                batch.slot_B,
                batch.prefix_B,
                batch.mask_BTT,
                self.scale,
            )
            routed = self._project_and_route(layer, o_NQ, hidden_NH, timer, phase)
            hidden_NH, weight_NK, expert_NK, normed = routed
            if self.expert_log is not None:
                self.expert_log.append(expert_NK)
            hidden_NH = ops.norm_moe_add(
                hidden_NH,
                layer.post_norm_H,
                shape.rms_eps,
                layer.gate_up_EJH,
                layer.down_EHI,
                weight_NK,
                expert_NK,
                # one rank carries the residual stream into the sum
                hidden_NH if leads else None,
                normed=normed,
            )
            timer.mark(moe)
            self.group.all_reduce(hidden_NH)
            timer.mark(allreduce)
        if shape.layers in points:
            captured.append(hidden_NH)
        return hidden_NH, captured

    def _project_and_route(
        self,
        layer: TargetLayer,
        o_NQ: torch.Tensor,
        hidden_NH: torch.Tensor,
        timer: Timer,
        phase: str,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Any]:
        """The residual stream after attention, each token's experts and their weights, the norm.

        One kernel where no sum over ranks comes between; the norm is None where two ran.
        """
        shape, ops = self.shape, self.ops
        router = (layer.post_norm_H, shape.rms_eps, layer.router_EH, shape.experts_per_token)
        num_rows = len(o_NQ)
        if self.policies.joins_router(num_rows) and not self.dense.uses_vendor(num_rows):
            routed = ops.linear_route(
                o_NQ, layer.o_HQ, hidden_NH, *router, renormalize=shape.renormalize
            )
            timer.mark(f"{phase}.attention")
            return tuple(routed)
        leads = self.group.rank == 0
        hidden_NH = self.dense.linear_add(o_NQ, layer.o_HQ, hidden_NH if leads else None)
        timer.mark(f"{phase}.attention")
        self.group.all_reduce(hidden_NH)
        timer.mark(f"{phase}.allreduce")
        weight_NK, expert_NK = ops.norm_route(hidden_NH, *router, renormalize=shape.renormalize)
        return hidden_NH, weight_NK, expert_NK, None

    def best(
        self, hidden_NH: torch.Tensor, sampling: Sampling | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The likeliest or drawn token of each row (N), and what it won by: the same on every rank.

        Every rank compares the same gathered pairs, so all decide alike without a message.
        """
        token_N, value_N = self._best_here(hidden_NH, sampling)
        if self.group.tp == 1:
            return token_N, value_N
        token_N, value_N = self.ops.best_of_ranks(self._gathered(token_N, value_N))
        return token_N, value_N

    def _best_here(
        self, hidden_NH: torch.Tensor, sampling: Sampling | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of this rank's share of the vocabulary."""
        weights = self.weights
        head = (hidden_NH, weights.norm_H, self.shape.rms_eps, weights.head_RH)
        if sampling is None:
            return self.dense.norm_argmax(*head)
        token_N, value_N = self.ops.draw(
            self.dense.norm_logits(*head),
            sampling.temperature_N,
            sampling.seed_N,
            sampling.position_N,
            weights.vocab_start,
        )
        return token_N, value_N

    def _gathered(self, token_N: torch.Tensor, value_N: torch.Tensor) -> torch.Tensor:
        """Every rank's best logits and ids (R, 2, N), on every rank."""
        pair_2N = self.ops.pair_best(token_N, value_N, self.weights.vocab_start)
        return self.group.all_gather(pair_2N)

    def finish(
        self,
        hidden_BH: torch.Tensor,
        state_4B: torch.Tensor,
        record_BX: torch.Tensor,
        next_BH: torch.Tensor,
        timer: Timer,
        sampling: Sampling | None = None,
    ) -> None:
        """End a plain cycle: best tokens, state, report, and the next cycle's embeddings."""
        ops, weights = self.ops, self.weights
        fused = self.group.tp == 1 and not self.dense.uses_vendor(len(hidden_BH))
        if fused and sampling is None:
            ops.finish(
                hidden_BH,
                weights.norm_H,
                self.shape.rms_eps,
                weights.head_RH,
                state_4B,
                record_BX,
                weights.embed_VH,
                next_BH,
            )
            timer.mark("decode.head")
            return
        pairs_R2B = self._gathered(*self._best_here(hidden_BH, sampling))
        timer.mark("decode.head")
        ops.finish_ranks(pairs_R2B, state_4B, record_BX, weights.embed_VH, next_BH)
        timer.mark("sample")

    def _attention(
        self, layer: TargetLayer, i: int, y_NH: torch.Tensor, position_N: torch.Tensor, batch: Batch
    ) -> torch.Tensor:
        """This rank's heads, projected back to hidden; the sum over ranks is still to come."""
        n, g, d = self.heads, self.kv_heads, self.shape.head_dim
        num_sequences, num_tokens = batch.token_BT.shape
        qkv = F.linear(y_NH, layer.qkv_PH).view(-1, n + 2 * g, d)
        q, k, v = qkv[:, :n], qkv[:, n : n + g], qkv[:, n + g :]
        q, k = self.ops.qk_norm_rope(
            q,
            k,
            layer.q_norm_D,
            layer.k_norm_D,
            self.shape.rms_eps,
            position_N,
            self.cos_PD,
            self.sin_PD,
        )
        k_cache, v_cache = self.caches[i]
        k_BTGD = k.reshape(num_sequences, num_tokens, g, d)
        v_BTGD = v.reshape(num_sequences, num_tokens, g, d)
        self.ops.store_kv(k_BTGD, v_BTGD, k_cache, v_cache, batch.slot_B, batch.prefix_B)
        o = self.ops.tree_attention(
            q.reshape(num_sequences, num_tokens, n, d),
            k_cache,
            v_cache,
            batch.slot_B,
            batch.prefix_B,
            batch.mask_BTT,
            self.scale,
        )
        return F.linear(o.reshape(-1, n * d), layer.o_HQ)

    def _in_order(
        self, captured: list[torch.Tensor], out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Side by side in the order of ``capture_points``, which may repeat or descend."""
        by_point = dict(zip(sorted(set(self.capture_points)), captured, strict=True))
        return torch.cat([by_point[p] for p in self.capture_points], dim=-1, out=out)

    def logits(self, forward: Forward, rows_M: torch.Tensor | None) -> torch.Tensor:
        """This rank's logits (M, R) fp32 of the given rows, or of all."""
        x, residual = forward.x_NH, forward.residual_NH
        if rows_M is not None:
            x, residual = x[rows_M], residual[rows_M]
        y, _ = self.ops.add_rms_norm(x, residual, self.weights.norm_H, self.shape.rms_eps)
        return F.linear(y, self.weights.head_RH).float()

    def compact(
        self,
        slot_B: torch.Tensor,
        start_B: torch.Tensor,
        src_BA: torch.Tensor,
        count_B: torch.Tensor,
    ) -> None:
        """Close the gaps that rejected tree nodes left (see ``kv_compact``)."""
        self.ops.kv_compact(self.cache_XSCGD, slot_B, start_B, src_BA, count_B)
