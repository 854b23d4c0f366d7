"""Analytic time of a decode step and of a speculative cycle, by term.

Per rank a host thread launches kernels and a device stream runs them. Launched one by one, a phase
takes the longer of the two; captured as a graph it takes the device time plus one launch; on a CPU
rank every operator's call overhead adds up. Collectives wait for the last rank.
A cycle: draft (steps - 1 forwards; the extend before gave the first tokens), verify (one target
forward over the tree), extend (the draft's forward over what was accepted), sampling, host gaps.
Suffixes: D constant vectors, U rows.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model import compute
from model.collectives import CollectiveKey, CollectiveTimes, in_step_us
from model.compute import Constants, Device, Forwards
from model.machine import Machine
from model.normal import ndtri
from model.servers import GENERIC, KernelCounts, Server
from model.shapes import DraftShape, ModelShape
from model.spec import Knobs
from model.step_columns import StepRows

Array = NDArray[Any]
Terms = Mapping[str, Array]
Index = NDArray[np.intp]

SUB_TERMS = ("attention", "moe", "allreduce", "head", "other")


@dataclass(frozen=True, slots=True)
class StepModel:
    """Times of one target (and draft) on one machine."""

    target: ModelShape
    draft: DraftShape | None
    machine: Machine
    collectives: CollectiveTimes
    server: Server = GENERIC

    def device(self, tp: float) -> Device:
        """What one of ``tp`` ranks computes on."""
        return Device.of(self.machine, int(tp), self.server)

    def target_terms_us(
        self,
        rows: StepRows,
        tokens_U: Array,
        graphed_U: NDArray[np.bool_],
        c: Constants,
        slow: bool,
    ) -> Terms:
        """A target forward of ``tokens_U`` tokens per request: sub-term -> us [D, U]."""

        def run(i: Index, tp: float) -> dict[str, Array]:
            return self._target(rows.take(i), tokens_U[i], graphed_U[i], tp, c, slow)

        return _per_tp(rows.tp, run)

    def draft_us(self, rows: StepRows, c: Constants, slow: bool) -> Array:
        """All draft steps of a cycle: [D, U]; 0 where speculation is off."""

        def run(i: Index, tp: float) -> dict[str, Array]:
            return {"draft": self._draft(rows.take(i), tp, c, slow)}

        return _per_tp(rows.tp, run)["draft"]

    def extend_us(self, rows: StepRows, c: Constants, slow: bool) -> Array:
        """The draft's forward over the accepted tokens (padded to steps + 1): [D, U]."""

        def run(i: Index, tp: float) -> dict[str, Array]:
            return {"extend": self._extend(rows.take(i), tp, c, slow)}

        return _per_tp(rows.tp, run)["extend"]

    def terms_ms(self, rows: StepRows, c: Constants, slow: bool) -> Terms:
        """Every term of each row's cycle (or decode step), ms [D, U].

        Target sub-terms are under ``target.<sub>``: verify.* of a cycle, decode.* of plain steps.
        """
        tokens = np.where(rows.speculative, rows.draft_tokens, 1.0)
        graphed = np.where(rows.speculative, rows.graph_verify, rows.graph_decode)
        target = self.target_terms_us(rows, tokens, graphed, c, slow)
        sample, gap = self.host_us(rows, c)
        terms = {f"target.{name}": value for name, value in target.items()}
        if self.draft is not None and rows.speculative.any():
            terms["draft"] = self.draft_us(rows, c, slow)
            terms["extend"] = self.extend_us(rows, c, slow)
        terms |= {"sample": sample, "host_gap": gap}
        return {name: value / 1e3 for name, value in terms.items()}

    def _allreduce(self, rows: StepRows, bytes_U: Array, c: Constants) -> Array:
        """All-reduce of each row inside a step; equal (key, size) pairs are timed once."""
        sizes, size_code = np.unique(bytes_U, return_inverse=True)
        pairs, inverse = np.unique(rows.key_index * sizes.size + size_code, return_inverse=True)
        keys = [self.collectives.usable(rows.keys[i]) for i in pairs // sizes.size]
        table = self.collectives.table_us(keys, sizes[pairs % sizes.size], c)
        tp = np.array([float(key.tp) for key in keys])
        result: Array = in_step_us(table, tp, c)[:, inverse]
        return result

    def _reduces_us(self, rows: StepRows, count: int, one: Array) -> Array:
        """All all-reduces of a target forward; one rank only passes the marks around them."""
        result: Array = count * (np.where(rows.tp > 1, one, 0.0) + self.server.mark_us)
        return result

    def _gather(self, rows: StepRows, bytes_U: Array, c: Constants) -> Array:
        """All-gather of logits: the second half of a ring all-reduce, where it is whole."""
        result: Array = 0.5 * c["gather_factor"] * self._allreduce(rows, bytes_U, c)
        return result

    def message_sizes(self, trees: Sequence[tuple[str, int, int, int]], requests: int) -> list[int]:
        """Bytes of every all-reduce that steps of these trees run, ascending."""
        shape, sizes = self.target, set()
        width = shape.allreduce_bytes_per_token // shape.hidden
        for method, steps, topk, draft_tokens in trees:
            rows = requests * (draft_tokens if method != "off" else 1)
            sizes |= {rows * shape.hidden * width, rows * shape.vocab * width}
            if method == "off" or self.draft is None:
                continue
            width_draft = 4 if self.draft.weight_format == "fp32" else 2
            for tokens in (topk * requests, (steps + 1) * requests):
                sizes |= {
                    tokens * self.draft.hidden * width_draft,
                    tokens * self.draft.draft_vocab * width_draft,
                }
        return sorted(sizes)

    def host_us(self, rows: StepRows, c: Constants) -> tuple[Array, Array]:
        """(sampling, host gap) of a step, us [D, U].

        Where some phase is launched kernel by kernel, the host also takes part between cycles and
        launches the sampling; on a CPU nothing is ever captured and the constants say it all.
        """
        speculative = np.where(rows.speculative, c["host_gap_spec_us"], 0.0)
        gap = c["host_gap_us"] + speculative + c["host_gap_request_us"] * rows.requests
        sample = np.broadcast_to(c["sample_us"], gap.shape).copy()
        if self.device(1).is_gpu:
            eager = ~all_captured(rows)
            gap = gap + np.where(eager, c["eager_gap_us"], 0.0)
            launch, _ = launch_us(rows, c, False)
            sample = sample + np.where(eager, self.server.kernels.sample * launch, 0.0)
        return sample, gap

    def reduce_us(self, knobs: Knobs, size_bytes: float, c: Constants) -> float:
        """One all-reduce of these knobs inside a step at the first constant vector, us."""
        key = self.collectives.usable(CollectiveKey.of(knobs))
        table = self.collectives.table_us([key], [size_bytes], c)
        return float(in_step_us(table, np.array([float(knobs.tp)]), c)[0, 0])

    def phase_us(self, phase: str, rows: StepRows, c: Constants) -> tuple[Array, Array]:
        """(device, host in its fast mode) time of a whole phase, us [D, U] each.

        ``phase`` is "target", "draft" or "extend". What only depends on the number of tokens is
        computed once per such number, so rows that differ in communication are cheap.
        """

        def run(i: Index, tp: float) -> dict[str, Array]:
            some = rows.take(i)
            if phase == "target":
                device, host = self._target_total(some, tp, c)
            else:
                parts = (self.draft_parts if phase == "draft" else self.extend_parts)(
                    some, tp, c, False
                )
                device, host = parts.device_us[phase], parts.host_us[phase]
            shape = (max(len(v) for v in c.values()), i.size)
            return {
                "device": np.broadcast_to(device, shape),
                "host": np.broadcast_to(host, shape),
            }

        both = _per_tp(rows.tp, run)
        return both["device"], both["host"]

    def _target_total(self, rows: StepRows, tp: float, c: Constants) -> tuple[Array, Array]:
        shape, device = self.target, self.device(tp)
        tokens = np.where(rows.speculative, rows.draft_tokens, 1.0)
        _, first, inverse = np.unique(tokens, return_index=True, return_inverse=True)
        f = Forwards(
            tokens_per_request=tokens[first],
            requests=rows.requests[first],
            context=rows.context[first],
            tp=rows.tp[first],
        )
        forward = compute.attention_us(shape, f, device, c) + compute.moe_us(shape, f, device, c)
        forward = forward + compute.head_us(shape, f, device, c)
        forward = (forward + compute.other_us(shape, f, device, c))[:, inverse]
        width = shape.allreduce_bytes_per_token
        count = shape.allreduces_per_forward + 1
        rows_bytes = tokens * rows.requests * width
        one = self._allreduce(rows, rows_bytes, c)
        gather = self._gather(rows, rows_bytes * shape.vocab / shape.hidden, c)
        launch, collective = launch_us(rows, c, False)
        host = sum(compute.kernel_counts(shape, device.kernels).values()) * launch
        host = host + np.where(rows.tp > 1, (count + 1) * collective, 0.0)
        return forward + self._reduces_us(rows, count, one) + gather, host

    def target_parts(
        self, rows: StepRows, tokens_U: Array, tp: float, c: Constants, slow: bool
    ) -> "PhaseParts":
        """Work of a target forward before host and device are brought together."""
        shape, device = self.target, self.device(tp)
        f = Forwards(
            tokens_per_request=tokens_U, requests=rows.requests, context=rows.context, tp=rows.tp
        )
        width = shape.allreduce_bytes_per_token
        count = shape.allreduces_per_forward + 1
        one = self._allreduce(rows, f.tokens * width, c)
        gather = self._gather(rows, f.tokens * shape.vocab * width / shape.hidden, c)
        device_us = {
            "attention": compute.attention_us(shape, f, device, c),
            "moe": compute.moe_us(shape, f, device, c),
            "allreduce": self._reduces_us(rows, count, one),
            "head": compute.head_us(shape, f, device, c) + gather,
            "other": compute.other_us(shape, f, device, c),
        }
        kernels = compute.kernel_counts(shape, device.kernels)
        launch, collective = launch_us(rows, c, slow)
        host = {name: kernels[name] * launch for name in kernels}
        host["allreduce"] = np.where(rows.tp > 1, count * collective, 0.0)
        host["head"] = host["head"] + np.where(rows.tp > 1, collective, 0.0)
        return PhaseParts(device_us, host)

    def draft_parts(self, rows: StepRows, tp: float, c: Constants, slow: bool) -> "PhaseParts":
        """Work of a cycle's draft steps."""
        forwards = np.maximum(rows.steps - 1.0, 0.0)
        device_us = forwards * self._draft_forward(rows, rows.topk, tp, c)
        device_us = device_us + rows.steps * c["draft_step_us"]
        tree = c["tree_us"] + rows.steps * c["tree_step_us"]
        device_us = device_us + np.where(rows.topk > 1, tree, 0.0)
        launch, _ = launch_us(rows, c, slow)
        select = rows.steps * self.server.kernels.select * launch
        host = forwards * self._draft_host(rows, c, slow) + select
        return PhaseParts({"draft": device_us}, {"draft": host})

    def extend_parts(self, rows: StepRows, tp: float, c: Constants, slow: bool) -> "PhaseParts":
        """Work of the draft-extend forward."""
        device_us = self._draft_forward(rows, rows.steps + 1.0, tp, c) + c["extend_us"]
        return PhaseParts({"extend": device_us}, {"extend": self._draft_host(rows, c, slow)})

    def _target(
        self, rows: StepRows, tokens_U: Array, graphed_U: Array, tp: float, c: Constants, slow: bool
    ) -> dict[str, Array]:
        parts = self.target_parts(rows, tokens_U, tp, c, slow)
        return elapsed(parts, graphed_U, rows.tp, c, self.device(tp).is_gpu)

    def _draft(self, rows: StepRows, tp: float, c: Constants, slow: bool) -> Array:
        parts = self.draft_parts(rows, tp, c, slow)
        total = elapsed(parts, rows.graph_draft, rows.tp, c, self.device(tp).is_gpu)
        return np.where(rows.speculative, total["draft"], 0.0)

    def _extend(self, rows: StepRows, tp: float, c: Constants, slow: bool) -> Array:
        parts = self.extend_parts(rows, tp, c, slow)
        total = elapsed(parts, rows.graph_extend, rows.tp, c, self.device(tp).is_gpu)
        return np.where(rows.speculative, total["extend"], 0.0)

    def _draft_forward(self, rows: StepRows, tokens_U: Array, tp: float, c: Constants) -> Array:
        """Device time of one draft forward with its all-reduces."""
        draft = self.draft
        assert draft is not None
        split = np.ones_like(rows.tp) if self.server.whole_draft else rows.tp
        f = Forwards(
            tokens_per_request=tokens_U, requests=rows.requests, context=rows.context, tp=split
        )
        width = 4 if draft.weight_format == "fp32" else 2
        one = self._allreduce(rows, f.tokens * draft.hidden * width, c)
        gather = self._gather(rows, f.tokens * draft.draft_vocab * width, c)
        forward = compute.draft_forward_us(draft, f, self.device(tp), c)
        reduces = (2 * draft.layers + 1) * one + gather
        result: Array = forward + c["draft_reduce_factor"] * reduces
        return result

    def _draft_host(self, rows: StepRows, c: Constants, slow: bool) -> Array:
        """Host time to launch one draft forward."""
        assert self.draft is not None
        launch, collective = launch_us(rows, c, slow)
        kernels = draft_kernels(self.draft, self.server.kernels)
        # a whole draft hands its tokens on, once
        reduces = 1 if self.server.whole_draft else 2 * self.draft.layers + 2
        collectives = np.where(rows.tp > 1, reduces, 0)
        result: Array = kernels * launch + collectives * collective
        return result


@dataclass(frozen=True, slots=True)
class PhaseParts:
    """A phase by term: device time with all launches there already, host time to launch it."""

    device_us: Mapping[str, Array]
    host_us: Mapping[str, Array]


def launch_us(rows: StepRows, c: Constants, slow: bool) -> tuple[Array, Array]:
    """Host time to launch a kernel and a collective, [D, U]; ``slow`` is the host's slow mode."""
    factor = np.where(rows.numa, c["numa_bind_factor"], 1.0)
    factor = factor * (c["host_slow_ratio"] if slow else 1.0)
    return c["launch_us"] * factor, c["collective_launch_us"] * factor


def draft_kernels(draft: DraftShape, kernels: KernelCounts) -> int:
    """Kernels of one draft forward, its head included."""
    return draft.layers * kernels.draft + kernels.head


def all_captured(rows: StepRows) -> NDArray[np.bool_]:
    """Whether every phase of each row's cycle is a graph, [U]: a host may queue such cycles."""
    # a cycle of one step has no draft forward of its own, but its selection is captured with it
    whole = rows.graph_draft & rows.graph_verify & rows.graph_extend
    return np.where(rows.speculative, whole, rows.graph_decode)


def elapsed(
    parts: PhaseParts, graphed_U: Array, tp_U: Array, c: Constants, is_gpu: bool
) -> dict[str, Array]:
    """Time of a phase by term: device time, plus what waiting for the host adds.

    Launched one by one on a GPU, the phase lasts max(device, host of the slowest rank); the excess
    is spread over the terms by their share of launches. On a CPU rank calls and work alternate, so
    both add.
    """
    device_us, host_us = parts.device_us, parts.host_us
    if not is_gpu:
        return {name: device_us[name] + host_us[name] for name in device_us}
    host_total = sum(host_us.values())
    slowest = host_total * (1.0 + c["host_jitter"] * expected_maximum(tp_U))
    excess = np.maximum(slowest - sum(device_us.values()), 0.0)
    last = list(device_us)[-1]
    terms = {}
    for name, value in device_us.items():
        share = host_us[name] / np.maximum(host_total, 1e-12)
        once = c["graph_launch_us"] if name == last else 0.0
        terms[name] = value + np.where(graphed_U, once, excess * share)
    return terms


def expected_maximum(count_U: Array) -> Array:
    """Mean of the largest of n standard normals (Blom's approximation; 0 for one)."""
    n = np.maximum(np.asarray(count_U, dtype=float), 1.0)
    result: Array = np.where(n > 1, ndtri((n - 0.375) / (n + 0.25)), 0.0)
    return result


def _per_tp(tp_U: Array, run: Callable[[Index, float], dict[str, Array]]) -> dict[str, Array]:
    """Run a function for the rows of each tp (a rank's device depends on it) and join the parts."""
    sizes = np.unique(tp_U)
    if sizes.size == 1:
        return run(np.arange(tp_U.size), float(sizes[0]))
    out: dict[str, Array] = {}
    for tp in sizes:
        index = np.flatnonzero(tp_U == tp)
        for name, value in run(index, float(tp)).items():
            if name not in out:
                out[name] = np.zeros((value.shape[0], tp_U.size))
            out[name][:, index] = value
    return out
