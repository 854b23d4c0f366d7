# ruff: noqa: N815 - fields are tensors with shape suffixes
"""What a resident cycle computes: bodies of its segments over fixed buffers, on every rank.

None of them asks the device anything or decides by data, so each can be captured. Legend: B rows, T
tokens of a row in a verify, A = T longest path, X values a row reports, N = B x T, F three hidden
states, Q draws of synthetic acceptance.
"""

from dataclasses import dataclass
from typing import Any

import torch

from engine.config import SpeculationConfig
from engine.cycle import Seeds
from engine.draft import DraftModel
from engine.target import Batch, Sampling, TargetModel
from engine.timing import Timer
from engine.tree import draft, draft_chain
from kernels.cycle import SLOT

#: draws of synthetic acceptance before they repeat
NUM_DRAWS = 4096


def longest_path(speculation: SpeculationConfig) -> int:
    """Nodes on the longest path of a tree, root included."""
    return min(speculation.steps + 1, speculation.num_tokens)


@dataclass(frozen=True, slots=True)
class Draws:
    """Uniform numbers that decide synthetic acceptance, the same on every rank."""

    uniform_QB: torch.Tensor
    #: the row of ``uniform`` that the next verify takes
    next_1: torch.Tensor


class Bodies:
    """One rank's segments of one speculation at one batch size, and what they hand on."""

    def __init__(
        self,
        model: TargetModel,
        draft_model: DraftModel | None,
        seeds: Seeds | None,
        speculation: SpeculationConfig,
        state_4B: torch.Tensor,
        embedded_BH: torch.Tensor,
        draws: Draws,
        sampled: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        self.model, self.draft_model, self.seeds = model, draft_model, seeds
        self.embedded_BH = embedded_BH
        #: temperature and seed of each row; None where all are greedy
        self.sampled = sampled
        self.speculation, self.state_4B, self.draws = speculation, state_4B, draws
        self.device = state_4B.device
        self.rows = rows = state_4B.shape[1]
        num_tokens, shape = speculation.num_tokens, model.shape
        self.num_values = 1 if speculation.method == "off" else 2 * longest_path(speculation)
        kind: dict[str, Any] = {"dtype": torch.int64, "device": self.device}
        chain_T = torch.arange(num_tokens, **kind)
        #: token, parent and rank of each node; a chain's parents and ranks never change
        self.tree_3BT = torch.zeros(3, rows, num_tokens, **kind)
        self.tree_3BT[1] = chain_T - 1
        self._chain_depth_BT = chain_T.repeat(rows, 1)
        self.path_BA = torch.zeros(rows, num_tokens, **kind)
        self.count_B, self.next_B, self.start_B = torch.zeros(3, rows, **kind)
        self.captured_NF: torch.Tensor | None = None
        if speculation.method != "off" and model.capture_points:
            self.captured_NF = torch.zeros(
                rows * num_tokens,
                len(model.capture_points) * shape.hidden,
                dtype=model.weights.embed_VH.dtype,
                device=self.device,
            )
        #: chosen experts of each layer, filled when laps are taken
        self.expert_LNK = torch.full(
            (shape.layers, rows * num_tokens, shape.experts_per_token), -1, **kind
        )
        rates = speculation.synthetic_acceptance
        self._rate_D = None if rates is None else torch.tensor(rates, device=self.device)

    def decode(self, timer: Timer, record_BX: torch.Tensor) -> None:
        """One plain step; its tokens' embeddings come from the step before."""
        slot_B, last_B, prefix_B, _ = self.state_4B
        batch = Batch(last_B[:, None], prefix_B[:, None], slot_B, prefix_B, None)
        hidden_BH = self._forward(batch, timer, "decode", self.embedded_BH)
        sampling = self._sampling(batch.position_BT)
        self.model.finish(hidden_BH, self.state_4B, record_BX, self.embedded_BH, timer, sampling)

    def draft(self) -> None:
        """Draft on rank 0; every rank gets the tree."""
        if self.draft_model is not None:
            assert self.seeds is not None
            model, spec, seeds = self.draft_model, self.speculation, self.seeds
            slot_B, last_B, prefix_B, _ = self.state_4B
            hidden_BH = seeds.hidden_SH[slot_B]
            if spec.topk == 1:
                draft_chain(
                    model, last_B, hidden_BH, seeds.best_S[slot_B], slot_B, prefix_B,
                    out_BT=self.tree_3BT[0],
                )  # fmt: skip
            else:
                logits_BR = seeds.logits_SR[slot_B]
                tree = draft(model, spec, last_B, hidden_BH, logits_BR, slot_B, prefix_B)
                parts = (tree.token_BT, tree.parent_BT, tree.rank_BT)
                torch.stack(parts, out=self.tree_3BT)
        self.model.group.broadcast(self.tree_3BT)

    def verify(self, timer: Timer, record_BX: torch.Tensor) -> None:
        """The target over the tree, acceptance, and the report."""
        ops = self.model.ops
        slot_B, _, prefix_B, _ = self.state_4B
        token_BT, parent_BT, rank_BT = self.tree_3BT
        mask, depth_BT = None, self._chain_depth_BT
        if self.speculation.topk > 1:
            mask, depth_BT = ops.tree_mask(parent_BT)
        batch = Batch(token_BT, prefix_B[:, None] + depth_BT, slot_B, prefix_B, mask)
        hidden_NH = self._forward(batch, timer, "verify")
        target_N, value_N = self.model.best(hidden_NH, self._sampling(batch.position_BT))
        timer.mark("verify.head")
        judged_BT = target_BT = target_N.view(self.rows, -1)
        draw_1 = None
        if self._rate_D is not None:
            draw_1 = self.draws.next_1
            judged_BT = ops.force(
                token_BT, parent_BT, depth_BT, self.draws.uniform_QB, draw_1, self._rate_D
            )
        path_BA, count_B, next_B = self.path_BA, self.count_B, self.next_B
        ops.verify_greedy(token_BT, parent_BT, judged_BT, out=(path_BA, count_B, next_B))
        if self.speculation.topk > 1:
            self.model.compact(slot_B, prefix_B, path_BA, count_B + 1)
        ops.settle(
            token_BT,
            rank_BT,
            path_BA,
            count_B,
            next_B,
            target_BT,
            value_N.view(self.rows, -1),
            self.state_4B,
            self.start_B,
            record_BX,
            draw_1,
            NUM_DRAWS,
        )
        timer.mark("sample")

    def extend(self) -> None:
        """Settle the accepted tokens in the head's cache; the last row is the next seed."""
        model, seeds = self.draft_model, self.seeds
        assert model is not None
        assert seeds is not None
        assert self.captured_NF is not None
        longest, slot_B = longest_path(self.speculation), self.state_4B[SLOT]
        following_BL, captured_XF = self.model.ops.follow(
            self.tree_3BT[0], self.path_BA, self.count_B, self.next_B, self.captured_NF, longest
        )
        seed_BH = model.forward(
            following_BL,
            model.fuse(captured_XF),
            self.start_B[:, None] + self._chain_depth_BT[:, :longest],
            slot_B,
            self.start_B,
            only_B=self.count_B,
        )
        seeds.settle(model, slot_B, seed_BH, with_logits=self.speculation.topk > 1)

    def _sampling(self, position_BT: torch.Tensor) -> Sampling | None:
        """How the tokens after these positions are drawn.

        Noise goes with the position, so the target's token at a node is the one that plain
        decoding would draw there: acceptance by equality is lossless.
        """
        if self.sampled is None:
            return None
        temperature_B, seed_B = self.sampled
        # of one sequence an expanded row would be one element repeated, which no kernel can walk
        temperature_BT, seed_BT = (
            x_B[:, None].expand(position_BT.shape).contiguous() for x_B in (temperature_B, seed_B)
        )
        return Sampling(temperature_BT.view(-1), seed_BT.view(-1), position_BT.reshape(-1))

    def _forward(
        self, batch: Batch, timer: Timer, phase: str, embedded_NH: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The target's forward; keeps captured states, and the experts when laps are taken."""
        takes_laps = hasattr(timer, "marks")
        self.model.expert_log = [] if takes_laps else None
        hidden_NH, _ = self.model.forward_few(
            batch,
            timer,
            phase,
            self.captured_NF,
            captures=self.captured_NF is not None,
            embedded_NH=embedded_NH,
        )
        log, self.model.expert_log = self.model.expert_log, None
        if log:
            torch.stack(log, out=self.expert_LNK)
            timer.mark(f"{phase}.other")
        return hidden_NH
