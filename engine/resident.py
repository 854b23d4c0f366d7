# ruff: noqa: N815 - fields are tensors with shape suffixes
"""Greedy cycles whose whole state lives on the device, the same on every rank.

A cycle is a few segments (``engine.graphs``): plain decoding one, speculation three (draft, verify
with acceptance and compaction, extend). No rank asks its device or another rank's host what to do
next: acceptance follows from all-gathered pairs that are bit for bit the same everywhere, and only
the drafted tree travels, from rank 0 by a broadcast on the stream, because the head lives there.

Rows of the batch are positions in fixed buffers; ``arrange`` says which sequence a row is. Rows
beyond the batch are padding in a slot of their own. Legend: B rows, T tokens of a row in a verify,
A longest path, S slots, N = B x T, X values a row reports.
"""

from dataclasses import dataclass

import torch

from engine.config import CudaGraph, SpeculationConfig
from engine.cycle import Seeds
from engine.draft import DraftModel
from engine.graphs import Segment, SegmentTimes
from engine.resident_orders import PREPARE, START
from engine.synthetic import counts, forced_targets, last_targets
from engine.target import Batch, TargetModel
from engine.timing import Timer
from engine.tree import Tree, draft

#: batch sizes that get graphs; a batch runs at the next of them
BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
#: rows of the state matrix
SLOT, LAST, PREFIX, LEFT = range(4)
#: draws of synthetic acceptance before they repeat
_DRAWS = 4096


def bucket(num_rows: int) -> int:
    """The batch size that ``num_rows`` sequences run at."""
    return next((b for b in BUCKETS if b >= num_rows), num_rows)


def longest_path(speculation: SpeculationConfig) -> int:
    """Nodes on the longest path of a tree, root included."""
    return min(speculation.steps + 1, speculation.num_tokens)


@dataclass(frozen=True, slots=True)
class Buffers:
    """What segments of one shape hand to each other."""

    #: token, parent and rank of each node
    tree_3BT: torch.Tensor
    path_BA: torch.Tensor
    count_B: torch.Tensor
    next_B: torch.Tensor
    start_B: torch.Tensor
    captured_NF: torch.Tensor | None
    record_BX: torch.Tensor
    #: chosen experts of each layer, filled when laps are taken
    expert_LNK: torch.Tensor


class Resident:
    """Device state and segments of one rank."""

    def __init__(
        self,
        model: TargetModel,
        draft_model: DraftModel | None,
        seeds: Seeds | None,
        graphs: CudaGraph,
        *,
        slots: int,
        seed: int,
    ) -> None:
        self.model, self.draft_model, self.seeds, self.graphs = model, draft_model, seeds, graphs
        self.device = model.cache_XSCGD.device
        self.slots, self.seed = slots, seed
        self.speculation = SpeculationConfig()
        #: [slot, last token, settled rows, tokens still to deliver] of each row
        self.state_4B = torch.zeros(4, bucket(slots), dtype=torch.int64, device=self.device)
        self._blank()
        self._pool = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None
        self._cycles: dict[tuple[SpeculationConfig, int], tuple[list[Segment], Buffers]] = {}
        draws = torch.rand(_DRAWS, bucket(slots), generator=torch.Generator().manual_seed(seed))
        self._uniform_QB = draws.to(self.device)
        self._draw_1 = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._untimed = SegmentTimes(torch.device("cpu"), 1, 1)

    @property
    def num_slots(self) -> int:
        """Slots of the caches, the padding's included."""
        return self.slots + 1

    def start(self, speculation: SpeculationConfig) -> None:
        """Begin a run: no sequences."""
        self.speculation = speculation
        self._blank()

    def report(self) -> dict[str, str]:
        """Every segment built so far: "captured", or eager and why."""
        found = {}
        for segments, _ in self._cycles.values():
            for segment in segments:
                how = "captured" if segment.reason is None else f"eager: {segment.reason}"
                if segment.laps_reason is not None:
                    how += f" (no laps: {segment.laps_reason})"
                found[segment.name] = how
        return found

    def prepared(self, num_rows: int) -> bool:
        """Whether the segments for a batch of ``num_rows`` exist."""
        return (self.speculation, bucket(num_rows)) in self._cycles

    def prepare(self, num_rows: int) -> None:
        """Build, warm and capture the segments for a batch of ``num_rows``; all ranks together."""
        if self.prepared(num_rows):
            return
        rows = bucket(num_rows)
        kept_4B, draw_1 = self.state_4B.clone(), self._draw_1.clone()
        self._blank()
        buffers = self._buffers(rows)
        self._cycles[self.speculation, rows] = (self._segments(rows, buffers), buffers)
        self.state_4B.copy_(kept_4B)
        self._draw_1.copy_(draw_1)

    def arrange(self, plan_5B: torch.Tensor) -> None:
        """Make the rows what ``plan`` says (int64, host).

        Row 0 is the old row a new one continues, or -1: then rows 1 to 4 are its state.
        """
        num_rows = plan_5B.shape[1]
        plan_5B = plan_5B.to(self.device, non_blocking=True)
        kept_4B = self.state_4B[:, plan_5B[0].clamp(min=0)]
        self._blank()
        self.state_4B[:, :num_rows] = torch.where(plan_5B[0] < 0, plan_5B[1:], kept_4B)

    def cycle(self, num_rows: int, times: SegmentTimes) -> torch.Tensor:
        """Queue one cycle; returns the buffer that will hold its report (rank 0 reads it)."""
        segments, buffers = self._cycles[self.speculation, bucket(num_rows)]
        with_laps = times.start_cycle()
        for segment in segments:
            if with_laps:
                segment.read_laps(times.laps_ms)
                segment.run_with_laps()
            else:
                segment.run()
            times.mark(segment.name.partition("[")[0])
        return buffers.record_BX

    def obey(self, payload: list[int]) -> None:
        """Other ranks: carry out what rank 0's orders say (``engine.resident_orders``)."""
        kind, *values = payload
        if kind == START:
            self.start(SpeculationConfig.model_validate_json(bytes(values)))
        elif kind == PREPARE:
            self.prepare(values[0])
        else:
            num_rows, num_cycles, *plan = values
            if plan:
                self.arrange(torch.tensor(plan).view(5, num_rows))
            for _ in range(num_cycles):
                self.cycle(num_rows, self._untimed)

    def finish_laps(self, times: SegmentTimes) -> None:
        """Read what the last cycles left; waits for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        for segments, _ in self._cycles.values():
            for segment in segments:
                segment.read_laps(times.laps_ms)

    def distinct_experts(self, num_rows: int) -> float | None:
        """Mean over layers of how many experts the last cycle with laps touched."""
        found = self._cycles.get((self.speculation, bucket(num_rows)))
        if found is None or self.device.type != "cuda":
            return None
        chosen = found[1].expert_LNK
        if chosen.numel() == 0 or int(chosen[0, 0, 0]) < 0:
            return None
        return sum(int(layer.unique().numel()) for layer in chosen) / len(chosen)

    def _blank(self) -> None:
        self.state_4B.zero_()
        self.state_4B[SLOT] = self.slots

    def _buffers(self, rows: int) -> Buffers:
        spec, shape = self.speculation, self.model.shape
        num_tokens = spec.num_tokens

        def integers(*sizes: int, fill: int = 0) -> torch.Tensor:
            return torch.full(sizes, fill, dtype=torch.int64, device=self.device)

        num_captured = len(self.model.capture_points) * shape.hidden
        plain = spec.method == "off"
        captured = None
        if num_captured and not plain:
            captured = torch.zeros(
                rows * num_tokens,
                num_captured,
                dtype=self.model.weights.embed_VH.dtype,
                device=self.device,
            )
        return Buffers(
            tree_3BT=integers(3, rows, num_tokens),
            path_BA=integers(rows, num_tokens),
            count_B=integers(rows),
            next_B=integers(rows),
            start_B=integers(rows),
            captured_NF=captured,
            record_BX=integers(rows, 1 if plain else 2 * longest_path(spec)),
            expert_LNK=integers(shape.layers, rows * num_tokens, shape.experts_per_token, fill=-1),
        )

    def _segments(self, rows: int, buffers: Buffers) -> list[Segment]:
        spec, graphs = self.speculation, self.graphs

        def build(name: str, on: bool, body: object, laps: bool) -> Segment:
            assert callable(body)
            segment = Segment(name, body, self.device)
            segment.capture(self._pool, switched_on=on, with_laps=laps)
            return segment

        if spec.method == "off":
            name = f"decode[B={rows}]"
            return [build(name, graphs.decode, lambda t: self._decode(rows, buffers, t), True)]
        at = f"[B={rows},T={spec.num_tokens},steps={spec.steps},topk={spec.topk}]"
        parts = [
            build(f"draft{at}", graphs.draft, lambda _: self._draft(rows, buffers), False),
            build(f"verify{at}", graphs.verify, lambda t: self._verify(rows, buffers, t), True),
        ]
        if self.draft_model is not None:
            parts.append(
                build(f"extend{at}", graphs.extend, lambda _: self._extend(rows, buffers), False)
            )
        return parts

    def _forward(
        self, batch: Batch, buffers: Buffers, timer: Timer, phase: str
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The target's forward; notes the experts when laps are taken."""
        takes_laps = hasattr(timer, "marks")
        self.model.expert_log = [] if takes_laps else None
        hidden_NH, captured_NF = self.model.forward_few(batch, timer, phase)
        log, self.model.expert_log = self.model.expert_log, None
        if log:
            torch.stack(log, out=buffers.expert_LNK)
            timer.mark(f"{phase}.other")
        return hidden_NH, captured_NF

    def _decode(self, rows: int, buffers: Buffers, timer: Timer) -> None:
        slot_B, last_B, prefix_B, left_B = self.state_4B[:, :rows]
        batch = Batch(last_B[:, None], prefix_B[:, None], slot_B, prefix_B, None)
        hidden_NH, _ = self._forward(batch, buffers, timer, "decode")
        token_B, value_B = self.model.best(hidden_NH)
        timer.mark("decode.head")
        # the host refuses a token of -1: the logits were not numbers
        buffers.record_BX[:, 0].copy_(torch.where(value_B.isfinite(), token_B, -1))
        alive_B = left_B > 0
        last_B.copy_(torch.where(alive_B, token_B, last_B))
        left_B -= alive_B.long()
        # a row that has ended stays where it is
        prefix_B += (left_B > 0).long()
        timer.mark("sample")

    def _draft(self, rows: int, buffers: Buffers) -> None:
        if self.draft_model is not None:
            assert self.seeds is not None
            slot_B, last_B, prefix_B, _ = self.state_4B[:, :rows]
            seeds = self.seeds
            tree = draft(
                self.draft_model,
                self.speculation,
                last_B,
                seeds.hidden_SH[slot_B],
                seeds.logits_SR[slot_B] if self.speculation.topk > 1 else seeds.logits_SR,
                slot_B,
                prefix_B,
                seeds.best_S[slot_B] if self.speculation.topk == 1 else None,
            )
            for part, values in zip(
                buffers.tree_3BT, (tree.token_BT, tree.parent_BT, tree.rank_BT), strict=True
            ):
                part.copy_(values)
        self.model.group.broadcast(buffers.tree_3BT)

    def _verify(self, rows: int, buffers: Buffers, timer: Timer) -> None:
        ops, spec = self.model.ops, self.speculation
        slot_B, last_B, prefix_B, left_B = self.state_4B[:, :rows]
        tree = Tree(*buffers.tree_3BT)
        if spec.topk == 1:
            mask = None
            depth_BT = torch.arange(spec.num_tokens, device=self.device).expand(rows, -1)
        else:
            mask, depth_BT = ops.tree_mask(tree.parent_BT)
        batch = Batch(tree.token_BT, prefix_B[:, None] + depth_BT, slot_B, prefix_B, mask)
        hidden_NH, captured_NF = self._forward(batch, buffers, timer, "verify")
        if buffers.captured_NF is not None and captured_NF is not None:
            buffers.captured_NF.copy_(captured_NF)
        target_N, value_N = self.model.best(hidden_NH)
        timer.mark("verify.head")
        target_BT = target_N.view(rows, -1)
        path_BA, count_B, next_B = self._accept(tree, depth_BT, target_BT)
        buffers.path_BA.copy_(path_BA)
        buffers.count_B.copy_(count_B)
        buffers.next_B.copy_(next_B)
        buffers.start_B.copy_(prefix_B)
        if spec.topk > 1:
            self.model.compact(slot_B, prefix_B, path_BA, count_B + 1)
        if self.draft_model is not None:
            self._report(tree, path_BA, count_B, next_B, value_N.view(rows, -1), buffers)
        alive_B = left_B > 0
        last_B.copy_(torch.where(alive_B, next_B, last_B))
        left_B -= torch.where(alive_B, count_B + 1, 0)
        prefix_B += torch.where(left_B > 0, count_B + 1, 0)
        timer.mark("sample")

    def _accept(
        self, tree: Tree, depth_BT: torch.Tensor, target_BT: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Path, number of accepted drafts, and the token after them."""
        ops, rates = self.model.ops, self.speculation.synthetic_acceptance
        judged_BT = target_BT
        if rates is not None:
            rate_D = self._rates(rates)
            uniform_B = self._uniform_QB[self._draw_1, : len(target_BT)][0]
            self._draw_1.add_(1).remainder_(_DRAWS)
            judged_BT = forced_targets(
                tree.token_BT, tree.parent_BT, depth_BT, counts(uniform_B, rate_D)
            )
        path_BA, count_B, next_B = ops.verify_greedy(tree.token_BT, tree.parent_BT, judged_BT)
        if rates is not None:
            next_B = last_targets(path_BA, count_B, target_BT)
        return path_BA, count_B, next_B

    def _rates(self, rates: tuple[float, ...]) -> torch.Tensor:
        # filled on the device: a copy from the host may not be captured
        rate_D = torch.empty(len(rates), device=self.device)
        for depth, rate in enumerate(rates):
            rate_D[depth].fill_(rate)
        return rate_D

    def _report(
        self,
        tree: Tree,
        path_BA: torch.Tensor,
        count_B: torch.Tensor,
        next_B: torch.Tensor,
        value_BT: torch.Tensor,
        buffers: Buffers,
    ) -> None:
        """count, next token (-1: logits were not numbers), accepted tokens, their ranks."""
        longest = longest_path(self.speculation)
        nodes_BX = path_BA[:, 1:longest].clamp(min=0)
        sound_B = value_BT.isfinite().all(-1)
        torch.cat(
            (
                count_B[:, None],
                torch.where(sound_B, next_B, -1)[:, None],
                tree.token_BT.gather(1, nodes_BX),
                tree.rank_BT.gather(1, nodes_BX),
            ),
            dim=1,
            out=buffers.record_BX,
        )

    def _extend(self, rows: int, buffers: Buffers) -> None:
        """Settle the accepted tokens in the head's cache; the last row is the next seed."""
        model, seeds = self.draft_model, self.seeds
        assert model is not None
        assert seeds is not None
        assert buffers.captured_NF is not None
        longest, slot_B = longest_path(self.speculation), self.state_4B[SLOT, :rows]
        token_BT, count_B, next_B = buffers.tree_3BT[0], buffers.count_B, buffers.next_B
        path_BA = buffers.path_BA[:, :longest].clamp(min=0)
        following_BA = torch.cat((token_BT.gather(1, path_BA)[:, 1:], next_B[:, None]), dim=1)
        following_BA = following_BA.scatter(1, count_B[:, None], next_B[:, None])
        captured_BTF = buffers.captured_NF.view(rows, self.speculation.num_tokens, -1)
        index = path_BA[:, :, None].expand(-1, -1, captured_BTF.shape[-1])
        step_A = torch.arange(longest, device=self.device)
        hidden_NH = model.fuse(captured_BTF.gather(1, index).flatten(0, 1))
        out_NH = model.forward(
            following_BA,
            hidden_NH,
            buffers.start_B[:, None] + step_A,
            slot_B,
            buffers.start_B,
        )
        row_B = torch.arange(rows, device=self.device) * longest + count_B
        seeds.settle(model, slot_B, out_NH[row_B], with_logits=self.speculation.topk > 1)
