# ruff: noqa: N815 - fields are tensors with shape suffixes
"""Greedy cycles whose whole state lives on the device, the same on every rank.

A cycle is a few segments (``engine.bodies``): plain decoding one, speculation three (draft, verify
with acceptance and compaction, extend). No rank asks its device or another rank's host what to do
next: acceptance follows from all-gathered pairs that are bit for bit the same everywhere, and only
the drafted tree travels, from rank 0 by a broadcast on the stream, because the head lives there.
Where every segment can be captured, whole cycles are graphs too, singly and as a *flight* of
several.

Rows of the batch are positions in fixed buffers; ``arrange`` says which sequence a row is. Rows
beyond the batch are padding in a slot of their own. Legend: B rows, K cycles, X values a row
reports.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch.nn.functional import embedding

from engine.bodies import NUM_DRAWS, Bodies, Draws
from engine.config import CudaGraph, SpeculationConfig
from engine.cycle import Seeds
from engine.draft import DraftModel
from engine.graphs import NO_GPU, Segment, SegmentTimes
from engine.prefill import Prefill
from engine.resident_orders import PREFILL, PREPARE, PREPARE_PREFILL, START
from engine.target import TargetModel
from engine.timing import NoTimer, Timer
from kernels.cycle import LAST, SLOT

#: batch sizes that get graphs; a batch runs at the next of them
BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
#: cycles in one flight
FLIGHT = 8


def bucket(num_rows: int) -> int:
    """The batch size that ``num_rows`` sequences run at."""
    return next((b for b in BUCKETS if b >= num_rows), num_rows)


@dataclass(frozen=True, slots=True)
class _Shape:
    """What runs cycles of one speculation at one batch size."""

    bodies: Bodies
    #: reports of the cycles of a flight; a single cycle's is the first
    record_KBX: torch.Tensor
    segments: list[Segment]
    #: number of cycles -> the segment that runs them all
    flights: dict[int, Segment] = field(default_factory=dict)


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
        self.slots = slots
        self.speculation, self.sampled = SpeculationConfig(), False
        #: how each row's tokens are drawn, where any is
        self.temperature_B = torch.zeros(bucket(slots), device=self.device)
        self.seed_B = torch.zeros(bucket(slots), dtype=torch.int64, device=self.device)
        #: [slot, last token, settled rows, tokens still to deliver] of each row
        self.state_4B = torch.zeros(4, bucket(slots), dtype=torch.int64, device=self.device)
        embed_VH = model.weights.embed_VH
        #: embeddings of the rows' last tokens: what a plain cycle starts from
        self.embedded_BH = embed_VH.new_zeros(bucket(slots), embed_VH.shape[1])
        self._blank()
        self._pool = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None
        self._shapes: dict[tuple[SpeculationConfig, bool, int], _Shape] = {}
        draws = torch.rand(NUM_DRAWS, bucket(slots), generator=torch.Generator().manual_seed(seed))
        next_draw_1 = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._draws = Draws(draws.to(self.device), next_draw_1)
        self.prefill = Prefill(
            model, draft_model, seeds, captured=graphs.captures_prefill, spare_slot=slots
        )
        self._untimed = SegmentTimes(torch.device("cpu"))

    @property
    def num_slots(self) -> int:
        """Slots of the caches, the padding's included."""
        return self.slots + 1

    def start(self, speculation: SpeculationConfig, *, sampled: bool = False) -> None:
        """Begin a run: no sequences. ``sampled``: some may have a temperature above 0."""
        self.speculation, self.sampled = speculation, sampled
        self._blank()

    def report(self) -> dict[str, str]:
        """Every segment built so far: "captured", or eager and why."""
        found = {}
        for segment in self._all_segments():
            how = "captured" if segment.reason is None else f"eager: {segment.reason}"
            if segment.laps_reason is not None:
                how += f" (no laps: {segment.laps_reason})"
            found[segment.name] = how
        return found

    def forget(self) -> None:
        """Drop every segment of a cycle: the next run builds them anew."""
        self._shapes.clear()

    def prepared(self, num_rows: int) -> bool:
        """Whether the segments for a batch of ``num_rows`` exist."""
        return self._key(num_rows) in self._shapes

    def prepare(self, num_rows: int) -> None:
        """Build, warm and capture the segments for a batch of ``num_rows``; all ranks together."""
        if self.prepared(num_rows):
            return
        rows = bucket(num_rows)
        kept_4B, draw_1 = self.state_4B.clone(), self._draws.next_1.clone()
        self._blank()
        self._shapes[self._key(rows)] = self._shape(rows)
        self._set_state(kept_4B)
        self._draws.next_1.copy_(draw_1)

    def prepare_prefill(self, length: int, last: bool) -> None:
        """The same for chunks of a prompt."""
        self.prefill.prepare(length, last, self._drafts, self.sampled, self._pool)

    def prefill_chunk(self, values: list[int], last: bool) -> None:
        """Queue a chunk (``engine.prefill``)."""
        self.prefill.run(values, last, self._drafts, self.sampled)

    def arrange(self, plan_XB: torch.Tensor) -> None:
        """Make the rows what ``plan`` says (int64, host).

        Row 0 is the old row a new one continues, or -1: then rows 1 to 4 are its state and, where
        tokens are drawn, rows 5 and 6 its temperature (the bits of fp32) and its seed.
        """
        num_rows = plan_XB.shape[1]
        plan_XB = plan_XB.to(self.device, non_blocking=True)
        plan_5B = plan_XB[:5]
        if len(plan_XB) > 5:
            self._arrange_sampling(plan_5B[0], plan_XB[5], plan_XB[6])
        kept_4B = self.state_4B[:, plan_5B[0].clamp(min=0)]
        self.state_4B.zero_()
        self.state_4B[SLOT] = self.slots
        self.state_4B[:, :num_rows] = torch.where(plan_5B[0] < 0, plan_5B[1:], kept_4B)
        self._embed()

    def _arrange_sampling(
        self, from_B: torch.Tensor, heat_bits_B: torch.Tensor, fresh_seed_B: torch.Tensor
    ) -> None:
        num_rows, old_B = len(from_B), from_B.clamp(min=0)
        for kept, fresh_B in (
            (self.temperature_B, heat_bits_B.int().view(torch.float32)),
            (self.seed_B, fresh_seed_B),
        ):
            kept_B = kept[old_B]
            kept.zero_()
            kept[:num_rows] = torch.where(from_B < 0, fresh_B, kept_B)

    def cycle(self, num_rows: int, times: SegmentTimes) -> torch.Tensor:
        """Queue one cycle; returns the buffer that will hold its report (rank 0 reads it), 1BX."""
        shape = self._shapes[self._key(num_rows)]
        special = times.start_cycles(1)
        if special is None and 1 in shape.flights:
            shape.flights[1].run()
            return shape.record_KBX[:1]
        for segment in shape.segments:
            if special == "laps":
                segment.read_laps(times.laps_ms)
                segment.run_with_laps()
            else:
                segment.run()
            times.mark(segment.name.partition("[")[0])
        return shape.record_KBX[:1]

    def flies(self, num_rows: int) -> bool:
        """Whether cycles of this batch size can be queued ``FLIGHT`` at a time."""
        return FLIGHT in self._shapes[self._key(num_rows)].flights

    def fly(self, num_rows: int, times: SegmentTimes) -> torch.Tensor:
        """Queue ``FLIGHT`` cycles; returns the buffer that will hold their reports, KBX."""
        shape = self._shapes[self._key(num_rows)]
        times.start_cycles(FLIGHT)
        shape.flights[FLIGHT].run()
        return shape.record_KBX

    def obey(self, payload: list[int]) -> None:
        """Other ranks: carry out what rank 0's orders say (``engine.resident_orders``)."""
        kind, *values = payload
        if kind == START:
            speculation = SpeculationConfig.model_validate_json(bytes(values[1:]))
            self.start(speculation, sampled=bool(values[0]))
        elif kind == PREPARE:
            self.prepare(values[0])
        elif kind == PREPARE_PREFILL:
            self.prepare_prefill(values[0], bool(values[1]))
        elif kind == PREFILL:
            self.prefill_chunk(values[1:], bool(values[0]))
        else:
            num_rows, num_cycles, *plan = values
            if plan:
                self.arrange(torch.tensor(plan).view(-1, num_rows))
            while num_cycles >= FLIGHT and self.flies(num_rows):
                self.fly(num_rows, self._untimed)
                num_cycles -= FLIGHT
            for _ in range(num_cycles):
                self.cycle(num_rows, self._untimed)

    def finish_laps(self, times: SegmentTimes) -> None:
        """Read what the last cycles left; waits for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        for segment in self._all_segments():
            segment.read_laps(times.laps_ms)

    def distinct_experts(self, num_rows: int) -> float | None:
        """Mean over layers of how many experts the last cycle with laps touched."""
        found = self._shapes.get(self._key(num_rows))
        if found is None or self.device.type != "cuda":
            return None
        chosen = found.bodies.expert_LNK
        if chosen.numel() == 0 or int(chosen[0, 0, 0]) < 0:
            return None
        return sum(int(layer.unique().numel()) for layer in chosen) / len(chosen)

    @property
    def _drafts(self) -> bool:
        return self.speculation.method != "off"

    def _key(self, num_rows: int) -> tuple[SpeculationConfig, bool, int]:
        return (self.speculation, self.sampled, bucket(num_rows))

    def _blank(self) -> None:
        self.state_4B.zero_()
        self.state_4B[SLOT] = self.slots
        self._embed()

    def _set_state(self, state_4B: torch.Tensor) -> None:
        self.state_4B.copy_(state_4B)
        self._embed()

    def _embed(self) -> None:
        self.embedded_BH.copy_(embedding(self.state_4B[LAST], self.model.weights.embed_VH))

    def _all_segments(self) -> Iterator[Segment]:
        for shape in self._shapes.values():
            yield from shape.segments
            yield from shape.flights.values()
        yield from self.prefill.segments()

    def _shape(self, rows: int) -> _Shape:
        spec, graphs = self.speculation, self.graphs
        bodies = Bodies(
            self.model,
            self.draft_model,
            self.seeds,
            spec,
            self.state_4B[:, :rows],
            self.embedded_BH[:rows],
            self._draws,
            (self.temperature_B[:rows], self.seed_B[:rows]) if self.sampled else None,
        )
        size = (FLIGHT, rows, bodies.num_values)
        record_KBX = torch.zeros(size, dtype=torch.int64, device=self.device)

        def build(
            name: str, on: bool, body: Callable[[Timer], None], laps: bool = False
        ) -> Segment:
            segment = Segment(name, body, self.device)
            segment.capture(self._pool, switched_on=on, with_laps=laps)
            return segment

        drawn = ",sampled" if self.sampled else ""
        if spec.method == "off":
            at = f"[B={rows}{drawn}]"
            segments = [
                build(f"decode{at}", graphs.decode, lambda t: bodies.decode(t, record_KBX[0]), True)
            ]
        else:
            at = f"[B={rows},T={spec.num_tokens},steps={spec.steps},topk={spec.topk}{drawn}]"
            segments = [
                build(f"draft{at}", graphs.draft, lambda _: bodies.draft()),
                build(
                    f"verify{at}", graphs.verify, lambda t: bodies.verify(t, record_KBX[0]), True
                ),
            ]
            if self.draft_model is not None:
                segments.append(build(f"extend{at}", graphs.extend, lambda _: bodies.extend()))
        shape = _Shape(bodies, record_KBX, segments)
        if all(segment.reason in (None, NO_GPU) for segment in segments):
            self._add_flights(shape, at)
        return shape

    def _add_flights(self, shape: _Shape, at: str) -> None:
        """Whole cycles as graphs; one that cannot be captured is left out and reported."""
        single = [] if len(shape.segments) == 1 else [1]
        for count in (*single, FLIGHT):

            def body(_: Timer, count: int = count) -> None:
                for record_BX in shape.record_KBX[:count]:
                    whole_cycle(shape.bodies, record_BX, extends=self.draft_model is not None)

            segment = Segment(f"{count}-cycle{at}", body, self.device)
            segment.capture(self._pool, switched_on=True, with_laps=False, warm=False)
            if segment.reason in (None, NO_GPU):
                shape.flights[count] = segment


def whole_cycle(bodies: Bodies, record_BX: torch.Tensor, *, extends: bool) -> None:
    """All segments of one cycle."""
    timer = NoTimer()
    if bodies.speculation.method == "off":
        bodies.decode(timer, record_BX)
        return
    bodies.draft()
    bodies.verify(timer, record_BX)
    if extends:
        bodies.extend()
