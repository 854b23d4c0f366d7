"""What ranks exchange through memory that all of them see: sums and gathers in one kernel.

Every rank writes its words to its own place in a *box*, each in 8 bytes beside the number of the
exchange (as NCCL's LL protocol does: 8 aligned bytes arrive whole), and reads the others' places
until every word carries that number. Nobody waits for a fence, a flag or the host. A program has
its own part of the box and counts its own exchanges, so programs need not know of one another; the
parts have two slots, taken in turn: a rank writes exchange n + 2 over exchange n only after it has
received n + 1, which the others sent after they had read n.

The box is int64 and zero at first; it may be pinned host memory, which GPUs without peer access
share. Legend: R ranks, W words of 4 bytes, P programs.
"""

import torch
import triton
import triton.language as tl

from kernels.launch import cdiv, launch, pow2, require

#: words that one program exchanges
WORDS_PER_PROGRAM = 256
#: how a word's bits add up
_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def all_reduce_ref(x_RN: torch.Tensor) -> torch.Tensor:
    """The sum over ranks of what each holds, in fp32, rounded once to the type of ``x``."""
    return x_RN.float().sum(0).to(x_RN.dtype)


@triton.jit
def exchange_kernel(
    x, out, box, counters, W,
    RANK: tl.constexpr, RANKS: tl.constexpr, ROWS: tl.constexpr, SLOT_WORDS: tl.constexpr,
    GATHER: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    at = program * BLOCK + tl.arange(0, BLOCK)
    here = at < W
    mine = tl.load(x + at, mask=here, other=0)
    number = tl.load(counters + program) + 1
    tag = number.to(tl.int64) << 32
    word = tag | (mine.to(tl.int64) & 0xFFFFFFFF)
    slot = box + (number & 1).to(tl.int64) * (RANKS * SLOT_WORDS)
    # written through: nothing else makes the word leave this GPU in time
    tl.store(slot + RANK * SLOT_WORDS + at, word, mask=here, cache_modifier=".wt")
    rank = tl.arange(0, ROWS)[:, None]
    own = rank == RANK
    theirs = here[None, :] & (rank < RANKS) & (rank != RANK)
    places = slot + rank * SLOT_WORDS + at[None, :]
    found = tl.zeros((ROWS, BLOCK), tl.int64)
    missing = 1
    while missing > 0:
        found = tl.load(places, mask=theirs, other=0, volatile=True)
        late = theirs & ((found >> 32) != number)
        missing = tl.max(tl.max(late.to(tl.int32), axis=1), axis=0)
    found = tl.where(own, word[None, :], found).to(tl.int32)
    if GATHER:
        tl.store(out + rank * W + at[None, :], found, mask=here[None, :] & (rank < RANKS))
    elif KIND == 0:
        total = tl.sum(found.to(tl.float32, bitcast=True), axis=0)
        tl.store(out + at, total.to(tl.int32, bitcast=True), mask=here)
    else:
        # two 16-bit values a word
        low = _sum16(found.to(tl.int16), KIND)
        high = _sum16((found >> 16).to(tl.int16), KIND)
        tl.store(out + at, (high << 16) | (low & 0xFFFF), mask=here)
    # all threads have read the number by now; ``missing`` is 0, and a loop whose second value
    # nobody uses does not compile
    tl.debug_barrier()
    tl.store(counters + program, number + missing)


@triton.jit
def _sum16(bits, KIND: tl.constexpr):
    """Sum over the first axis of 16-bit floats given as bits; the bits of the rounded sum."""
    if KIND == 1:
        total = tl.sum(bits.to(tl.bfloat16, bitcast=True).to(tl.float32), axis=0)
        return total.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32)
    else:
        total = tl.sum(bits.to(tl.float16, bitcast=True).to(tl.float32), axis=0)
        return total.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)


def box_words(num_ranks: int, message_bytes: int) -> int:
    """int64 words of a box for messages of up to ``message_bytes``."""
    return 2 * num_ranks * _slot_words(message_bytes)


def num_counters(message_bytes: int) -> int:
    """int32 counters of one rank, zero at first, for messages of up to ``message_bytes``."""
    return cdiv(message_bytes, 4 * WORDS_PER_PROGRAM)


def _slot_words(message_bytes: int) -> int:
    return num_counters(message_bytes) * WORDS_PER_PROGRAM


def fits(x: torch.Tensor, message_bytes: int) -> bool:
    """Whether ``x`` is whole words and no longer than a message."""
    size = x.numel() * x.element_size()
    return 0 < size <= message_bytes and size % 4 == 0


class Exchange:
    """One rank's end of a box for messages of up to ``message_bytes``.

    All ranks make the same calls in the same order, on one stream each. ``box`` is what
    ``box_words`` says, seen by all ranks; ``counters`` is this rank's own on its device.
    """

    def __init__(
        self,
        box: torch.Tensor,
        counters_P: torch.Tensor,
        *,
        rank: int,
        num_ranks: int,
        message_bytes: int,
    ) -> None:
        self.rank, self.num_ranks, self.message_bytes = rank, num_ranks, message_bytes
        wanted = box_words(num_ranks, message_bytes)
        require(
            box.dtype == torch.int64 and box.numel() == wanted,
            f"exchange: a box of {wanted} int64 words is needed, got {box.numel()} {box.dtype}",
        )
        require(
            counters_P.dtype == torch.int32 and counters_P.numel() == num_counters(message_bytes),
            f"exchange: {num_counters(message_bytes)} int32 counters are needed",
        )
        self.box, self.counters_P = box, counters_P

    def all_reduce(self, x: torch.Tensor) -> None:
        """Sum ``x`` (contiguous; fp32, bf16, fp16) over ranks in place: fp32, rounded once.

        Every rank gets the same bits.
        """
        require(x.dtype in _KINDS, f"exchange: sums of {x.dtype} are not known")
        words = self._words(x)
        self._launch(words, words, gathers=False, kind=_KINDS[x.dtype])

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """All ranks' ``x`` (contiguous, any type) stacked in front, on every rank."""
        out = torch.empty(self.num_ranks, *x.shape, dtype=x.dtype, device=x.device)
        self._launch(self._words(x), out.view(-1).view(torch.int32), gathers=True, kind=0)
        return out

    def _words(self, x: torch.Tensor) -> torch.Tensor:
        require(
            x.is_contiguous() and fits(x, self.message_bytes),
            f"exchange: a contiguous tensor of whole 4-byte words, at most {self.message_bytes} "
            f"bytes, is needed, got {x.numel() * x.element_size()}",
        )
        return x.view(-1).view(torch.int32)

    def _launch(
        self, words_W: torch.Tensor, out: torch.Tensor, *, gathers: bool, kind: int
    ) -> None:
        num_words = words_W.numel()
        launch(
            exchange_kernel, (cdiv(num_words, WORDS_PER_PROGRAM),),
            words_W, out, self.box, self.counters_P, num_words,
            RANK=self.rank, RANKS=self.num_ranks, ROWS=pow2(self.num_ranks),
            SLOT_WORDS=_slot_words(self.message_bytes), GATHER=gathers, KIND=kind,
            BLOCK=WORDS_PER_PROGRAM, num_warps=4,
        )  # fmt: skip
