"""Prefills of resident runs: a chunk of a prompt as one segment, nothing asked of the device.

A chunk has one of a few lengths, so that each can be a graph; what padding leaves in the caches
lies past the prompt, where the next tokens overwrite it. The host queues the chunks of all waiting
requests and only then reads their first tokens. Legend: T tokens of a chunk, F three hidden states.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from engine.cycle import PREFILL_CHUNK, PREFILL_LENGTHS, Seeds
from engine.draft import DraftModel
from engine.graphs import Segment
from engine.target import Batch, Sampling, TargetModel
from engine.timing import NoTimer

#: values in front of a chunk's tokens: slot, first row, index of the last token that is no padding
_HEADER = 3
#: and, where tokens are drawn, the request's temperature (the bits of fp32) and seed
_DRAWN = 2


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a prompt. ``last``: it ends the prompt, so that the first token follows from it."""

    slot: int
    start: int
    tokens: tuple[int, ...]
    #: the token after each token; of the last one 0 where the prompt ends
    following: tuple[int, ...]
    last: bool

    def values(self, length: int, drawn: list[int]) -> list[int]:
        """What the segment of ``length`` tokens reads; ``drawn``: how tokens are, if any is."""
        padding = [0] * (length - len(self.tokens))
        header = [self.slot, self.start, len(self.tokens) - 1, *drawn]
        return [*header, *self.tokens, *padding, *self.following, *padding]


def chunks_of(prompt: tuple[int, ...], slot: int) -> Iterator[Chunk]:
    """A prompt's chunks in order."""
    for start in range(0, len(prompt), PREFILL_CHUNK):
        stop = min(start + PREFILL_CHUNK, len(prompt))
        last = stop == len(prompt)
        following = prompt[start + 1 : stop + 1] + ((0,) if last else ())
        yield Chunk(slot, start, prompt[start:stop], following, last)


class Prefill:
    """Segments of one rank, by length, by whether the prompt ends, a head follows, and sampling."""

    def __init__(
        self,
        model: TargetModel,
        draft_model: DraftModel | None,
        seeds: Seeds | None,
        *,
        captured: bool,
        spare_slot: int,
    ) -> None:
        self.model, self.draft_model, self.seeds = model, draft_model, seeds
        self.captured, self.spare_slot = captured, spare_slot
        self.device = model.cache_XSCGD.device
        self._rows = model.cache_XSCGD.shape[2]
        #: the first token, -1 where the logits were no finite numbers
        self.token_1 = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._segments: dict[tuple[int, bool, bool, bool], tuple[Segment, torch.Tensor]] = {}

    def length_of(self, chunk: Chunk) -> int:
        """Tokens the chunk is run at: on a CPU its own."""
        if self.device.type == "cpu":
            return len(chunk.tokens)
        room = self._rows - chunk.start
        fitting = (n for n in PREFILL_LENGTHS if len(chunk.tokens) <= n <= room)
        return next(fitting, len(chunk.tokens))

    def prepared(self, length: int, last: bool, drafts: bool, sampled: bool) -> bool:
        """Whether the segment exists."""
        return (length, last, drafts, sampled) in self._segments

    def prepare(self, length: int, last: bool, drafts: bool, sampled: bool, pool: object) -> None:
        """Build, warm and capture a segment; all ranks together."""
        key = (length, last, drafts, sampled)
        if key in self._segments:
            return
        size = _HEADER + sampled * _DRAWN + 2 * length
        input_X = torch.zeros(size, dtype=torch.int64, device=self.device)
        input_X[0] = self.spare_slot
        kind = "end" if last else "part"
        flags = (",head" if drafts else "") + (",sampled" if sampled else "")
        name = f"prefill[T={length},{kind}{flags}]"
        segment = Segment(
            name, lambda _: self._body(length, last, drafts, sampled, input_X), self.device
        )
        # lengths of which one is wanted once only are not worth a graph
        usual = length in PREFILL_LENGTHS
        segment.capture(pool, switched_on=self.captured and usual, with_laps=False)
        self._segments[key] = (segment, input_X)

    def run(self, values: list[int], last: bool, drafts: bool, sampled: bool) -> None:
        """Queue a chunk; its first token will be in ``token_1``."""
        length = (len(values) - _HEADER - sampled * _DRAWN) // 2
        segment, input_X = self._segments[length, last, drafts, sampled]
        on_gpu = self.device.type == "cuda"
        input_X.copy_(torch.tensor(values, pin_memory=on_gpu), non_blocking=True)
        segment.run()

    def segments(self) -> Iterator[Segment]:
        """All built so far."""
        for segment, _ in self._segments.values():
            yield segment

    def _body(
        self, length: int, last: bool, drafts: bool, sampled: bool, input_X: torch.Tensor
    ) -> None:
        slot_1, start_1, end_1 = input_X[0:1], input_X[1:2], input_X[2:3]
        sampling = None
        if sampled:
            heat_1 = input_X[_HEADER : _HEADER + 1].int().view(torch.float32)
            sampling = Sampling(heat_1, input_X[_HEADER + 1 : _HEADER + 2], start_1 + end_1)
        token_T, following_T = input_X[_HEADER + sampled * _DRAWN :].view(2, length)
        position_1T = start_1[:, None] + torch.arange(length, device=self.device)
        batch = Batch(token_T[None], position_1T, slot_1, start_1, None)
        drafts = drafts and self.draft_model is not None
        hidden_TH, captured_TF = self.model.forward_few(
            batch, NoTimer(), "prefill", captures=drafts
        )
        if last:
            token_1, value_1 = self.model.best(hidden_TH[end_1], sampling)
            self.token_1.copy_(torch.where(value_1.isfinite(), token_1, -1))
            following_T[end_1] = token_1
        if drafts:
            assert self.draft_model is not None
            assert self.seeds is not None
            assert captured_TF is not None
            model = self.draft_model
            seed_1H = model.forward(
                following_T[None],
                model.fuse(captured_TF),
                position_1T,
                slot_1,
                start_1,
                only_B=end_1,
            )
            if last:
                self.seeds.settle(model, slot_1, seed_1H, with_logits=True)
