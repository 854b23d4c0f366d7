# ruff: noqa: N815 - fields are tensors with shape suffixes
"""One rank's target under rank 0's orders.

Rank 0 decides everything (admission, drafts, acceptance); before each forward it sends one order to
all ranks: the batch, and which cache rows of the last verify to keep. The other ranks only follow.
Legend: B sequences, T tokens each, A longest accepted path, M rows of logits asked for, V
vocabulary.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from engine.collectives import Group
from engine.target import Batch, Forward, TargetModel
from engine.timing import NoTimer, Timer

if TYPE_CHECKING:
    from engine.resident import Resident

#: what comes back from the head: nothing, the best token, the best two, or all logits
Want = Literal["none", "best", "lead", "full"]
_WANTS: tuple[Want, ...] = ("none", "best", "lead", "full")
_STOP, _FORWARD, _RESIDENT = 0, 1, 2
#: int64 values every order message has room for; longer orders take a second message
_INLINE = 256
_HEADER = 9


@dataclass(frozen=True, slots=True)
class Keep:
    """Rows of the last verify that stay: node ``src_bi`` of slot b moves to ``start_b + i``."""

    slot_B: torch.Tensor
    start_B: torch.Tensor
    src_BA: torch.Tensor
    count_B: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One forward. Host tensors; ``parent_BT`` None means a causal run of tokens."""

    token_BT: torch.Tensor
    slot_B: torch.Tensor
    prefix_B: torch.Tensor
    parent_BT: torch.Tensor | None = None
    want: Want = "best"
    #: logits of this token of each sequence only (prefill); -1: of all tokens
    only_token: int = -1
    keep: Keep | None = None
    phase: str = "decode"


@dataclass(frozen=True, slots=True)
class Heads:
    """What rank 0 learns of the logits. ``nan_R``: which ranks saw a NaN."""

    token_M: torch.Tensor | None
    #: lead of the best token over the second in log-probability, and the second
    lead_M: torch.Tensor | None
    second_M: torch.Tensor | None
    logits_MV: torch.Tensor | None
    nan_R: torch.Tensor


class Executor:
    """Runs orders on this rank."""

    def __init__(self, model: TargetModel, group: Group, device: torch.device) -> None:
        self.model, self.group, self.device = model, group, device
        #: greedy cycles that need no order each; None: every cycle is ordered
        self.resident: Resident | None = None

    def order_resident(self, payload: list[int]) -> None:
        """Rank 0: tell the others' ``Resident`` what to do (see ``Resident.obey``)."""
        if self.group.tp > 1:
            values = [_RESIDENT, len(payload) + 2, *payload]
            message = torch.zeros(max(len(values), _INLINE), dtype=torch.int64)
            message[: len(values)] = torch.tensor(values)
            self._broadcast(message, len(values))

    def forward(self, order: Order, timer: Timer) -> tuple[Forward, Heads | None]:
        """Rank 0: send the order and run it."""
        if self.group.tp > 1:
            self._send(order)
        timer.mark(f"{order.phase}.other")
        return self._run(order, timer)

    def stop(self) -> None:
        """Rank 0: end the others' ``follow``."""
        if self.group.tp > 1:
            message = torch.zeros(_INLINE, dtype=torch.int64)
            message[0] = _STOP
            self.group.broadcast_host(message)

    def follow(self) -> None:
        """Other ranks: run orders until told to stop."""
        timer = NoTimer()
        while (order := self._receive()) is not None:
            if isinstance(order, Order):
                self._run(order, timer)
            else:
                assert self.resident is not None
                self.resident.obey(order)

    def _run(self, order: Order, timer: Timer) -> tuple[Forward, Heads | None]:
        model, device = self.model, self.device
        if order.keep is not None:
            keep = order.keep
            model.compact(
                keep.slot_B.to(device),
                keep.start_B.to(device),
                keep.src_BA.to(device),
                keep.count_B.to(device),
            )
        prefix_B = order.prefix_B.to(device)
        if order.parent_BT is None:
            mask, depth = None, torch.arange(order.token_BT.shape[1], device=device)
        else:
            mask, depth = model.ops.tree_mask(order.parent_BT.to(device))
        batch = Batch(
            token_BT=order.token_BT.to(device),
            position_BT=prefix_B[:, None] + depth,
            slot_B=order.slot_B.to(device),
            prefix_B=prefix_B,
            mask_BTT=mask,
        )
        forward = model.forward(batch, timer, order.phase)
        heads = self._heads(order, forward)
        timer.mark(f"{order.phase}.head")
        return forward, heads

    def _heads(self, order: Order, forward: Forward) -> Heads | None:
        if order.want == "none":
            return None
        rows = None
        if order.only_token >= 0:
            num_sequences, num_tokens = order.token_BT.shape
            rows = torch.arange(num_sequences, device=self.device) * num_tokens + order.only_token
        logits_MR = self.model.logits(forward, rows)
        if order.want == "full":
            return self._gather_full(logits_MR)
        count = 1 if order.want == "best" else 2
        best = logits_MR.max(-1, keepdim=True)
        top, token_MK = best
        if count > 1:
            top, token_MK = logits_MR.topk(count, dim=-1)
            # of equal logits topk returns any: plain decoding takes the first
            token_MK = torch.cat((best.indices, token_MK[:, 1:]), dim=-1)
        token_MK = token_MK + self.model.weights.vocab_start
        # token ids are exact in fp32 up to 2^24
        packed = self.group.gather(torch.cat((top, token_MK.float()), dim=-1))
        if packed is None:
            return None
        value_RMK, token_RMK = packed[..., :count], packed[..., count:]
        nan_R = value_RMK.isnan().flatten(1).any(1)
        value_MX, token_MX = value_RMK.transpose(0, 1).flatten(1), token_RMK.transpose(0, 1)
        best_M1 = value_MX.argmax(-1, keepdim=True)
        token_M = token_MX.flatten(1).gather(1, best_M1)[:, 0].long()
        lead_M = second_M = None
        if count > 1:
            two = value_MX.topk(2, dim=-1)
            lead_M = two.values[:, 0] - two.values[:, 1]
            second_M = token_MX.flatten(1).gather(1, two.indices[:, 1:])[:, 0].long()
        return Heads(token_M, lead_M, second_M, None, nan_R)

    def _gather_full(self, logits_MR: torch.Tensor) -> Heads | None:
        tp, vocab = self.group.tp, self.model.shape.vocab
        width = -(-vocab // tp)
        # shares may differ by one row, parts of a gather may not
        padded = torch.nn.functional.pad(
            logits_MR, (0, width - logits_MR.shape[1]), value=-torch.inf
        )
        parts = self.group.gather(padded)
        if parts is None:
            return None
        starts = [r * vocab // tp for r in range(tp + 1)]
        logits_MV = torch.cat([parts[r, :, : starts[r + 1] - starts[r]] for r in range(tp)], dim=-1)
        return Heads(None, None, None, logits_MV, parts.isnan().flatten(1).any(1))

    def _send(self, order: Order) -> None:
        num_sequences, num_tokens = order.token_BT.shape
        fields = [order.slot_B, order.prefix_B, order.token_BT.reshape(-1)]
        if order.parent_BT is not None:
            fields.append(order.parent_BT.reshape(-1))
        kept, longest = 0, 0
        if order.keep is not None:
            keep = order.keep
            kept, longest = keep.src_BA.shape
            fields += [keep.slot_B, keep.start_B, keep.count_B, keep.src_BA.reshape(-1)]
        length = _HEADER + sum(f.numel() for f in fields)
        header = torch.tensor(
            [
                _FORWARD,
                length,
                num_sequences,
                num_tokens,
                order.parent_BT is not None,
                _WANTS.index(order.want),
                order.only_token,
                kept,
                longest,
            ]
        )
        message = torch.zeros(max(length, _INLINE), dtype=torch.int64)
        torch.cat([header, *(f.cpu() for f in fields)], out=message[:length])
        self._broadcast(message, length)

    def _broadcast(self, message: torch.Tensor, length: int) -> None:
        self.group.broadcast_host(message[:_INLINE])
        if length > _INLINE:
            self.group.broadcast_host(message[_INLINE:])

    def _receive(self) -> Order | list[int] | None:
        message = torch.zeros(_INLINE, dtype=torch.int64)
        self.group.broadcast_host(message)
        kind, length = message[:2].tolist()
        if kind == _STOP:
            return None
        if length > _INLINE:
            rest = torch.zeros(length - _INLINE, dtype=torch.int64)
            self.group.broadcast_host(rest)
            message = torch.cat((message, rest))
        if kind == _RESIDENT:
            payload: list[int] = message[2:length].tolist()
            return payload
        num_sequences, num_tokens, tree, want, only_token, kept, longest = message[
            2:_HEADER
        ].tolist()
        size = num_sequences * num_tokens
        sizes = [num_sequences, num_sequences, size, size if tree else 0, kept, kept, kept]
        sizes.append(kept * longest)
        parts = torch.split(message[_HEADER:length], sizes)
        slot_B, prefix_B, token_N, parent_N, *keep = parts
        return Order(
            token_BT=token_N.view(num_sequences, num_tokens),
            slot_B=slot_B,
            prefix_B=prefix_B,
            parent_BT=parent_N.view(num_sequences, num_tokens) if tree else None,
            want=_WANTS[want],
            only_token=only_token,
            keep=Keep(keep[0], keep[1], keep[3].view(kept, longest), keep[2]) if kept else None,
        )
