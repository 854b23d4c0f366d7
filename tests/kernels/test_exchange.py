"""Exchanges between ranks: right sums, the same bits everywhere, whatever the ranks' pace."""

import mmap
import multiprocessing
import os
import random
import time
from typing import Any

import numpy as np
import pytest
import torch

from kernels.exchange import (
    WORDS_PER_PROGRAM,
    Exchange,
    all_reduce_ref,
    box_words,
    fits,
    num_counters,
)

_LIMIT = 8 * WORDS_PER_PROGRAM * 4
#: type and elements: less than a program's part, a whole one, several with a rest, the longest
_CASES = [
    (torch.bfloat16, 2),
    (torch.float32, 256),
    (torch.bfloat16, 1026),
    (torch.float16, 512),
    (torch.float32, 2048),
] * 3


def _part(rank: int, number: int) -> torch.Tensor:
    dtype, count = _CASES[number]
    draws = torch.Generator().manual_seed(100 * rank + number)
    return torch.randn(count, generator=draws).to(dtype)


def _exchange(box: torch.Tensor, rank: int, num_ranks: int, device: torch.device) -> Exchange:
    counters_P = torch.zeros(num_counters(_LIMIT), dtype=torch.int32, device=device)
    return Exchange(box, counters_P, rank=rank, num_ranks=num_ranks, message_bytes=_LIMIT)


def _assert_sums(number: int, got: list[torch.Tensor]) -> None:
    dtype, _ = _CASES[number]
    wanted = all_reduce_ref(torch.stack([_part(rank, number) for rank in range(len(got))]))
    for sums in got:
        assert torch.equal(sums, got[0])
        # the interpreter cuts bfloat16 off where a GPU rounds it
        tolerance = {"rtol": 2**-7, "atol": 2**-9} if dtype == torch.bfloat16 else {}
        torch.testing.assert_close(sums, wanted, **tolerance)


def _rank_main(rank: int, num_ranks: int, fd: int, pipe: Any) -> None:
    torch.set_num_threads(1)
    box = torch.frombuffer(mmap.mmap(fd, box_words(num_ranks, _LIMIT) * 8), dtype=torch.int64)
    exchange = _exchange(box, rank, num_ranks, torch.device("cpu"))
    pace, out = random.Random(rank), []
    for number in range(len(_CASES)):
        x = _part(rank, number)
        # ranks overtake one another by as much as the protocol lets them
        time.sleep(pace.choice((0, 0, 0.02)))
        exchange.all_reduce(x)
        gathered = exchange.all_gather(torch.tensor([[rank, number]]))
        # numpy has no bfloat16; fp32 holds the same bits
        out.append((x.float().numpy(), gathered.tolist()))
    pipe.send(out)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_at_their_own_pace_get_the_same_sums(num_ranks: int) -> None:
    fd = os.memfd_create("test")
    os.ftruncate(fd, box_words(num_ranks, _LIMIT) * 8)
    context = multiprocessing.get_context("fork")
    pipes, children = [], []
    for rank in range(num_ranks):
        ours, theirs = context.Pipe()
        child = context.Process(target=_rank_main, args=(rank, num_ranks, fd, theirs))
        child.start()
        theirs.close()
        pipes.append(ours)
        children.append(child)
    try:
        outputs = [pipe.recv() if pipe.poll(60) else pytest.fail("no answer") for pipe in pipes]
    finally:
        for child in children:
            child.kill()
            child.join(20)
        os.close(fd)
    for number, (dtype, _) in enumerate(_CASES):
        got = [torch.from_numpy(np.array(out[number][0])).to(dtype) for out in outputs]
        _assert_sums(number, got)
        for out in outputs:
            assert out[number][1] == [[[rank, number]] for rank in range(num_ranks)]


@pytest.mark.gpu
def test_two_ranks_on_streams_of_one_gpu_get_the_same_sums() -> None:
    device = torch.device("cuda")
    box = torch.zeros(box_words(2, _LIMIT), dtype=torch.int64).pin_memory()
    ends = [_exchange(box, rank, 2, device) for rank in range(2)]
    streams = [torch.cuda.Stream() for _ in ends]
    # loading a kernel may wait for the device: first all of them, with nobody to wait for
    box.fill_(1 << 32)
    for number in range(len(_CASES)):
        for rank, end in enumerate(ends):
            end.all_reduce(_part(rank, number).to(device))
            torch.cuda.synchronize()
            end.counters_P.zero_()
    torch.cuda.synchronize()
    box.zero_()
    for number in range(len(_CASES)):
        sums = [_part(rank, number).to(device) for rank in range(2)]
        torch.cuda.synchronize()
        for end, x, stream in zip(ends, sums, streams, strict=True):
            with torch.cuda.stream(stream):
                end.all_reduce(x)
        torch.cuda.synchronize()
        _assert_sums(number, [x.cpu() for x in sums])


@pytest.mark.parametrize(
    ("x", "expected"),
    [
        pytest.param(torch.zeros(2, dtype=torch.bfloat16), True, id="one-word"),
        pytest.param(torch.zeros(3, dtype=torch.bfloat16), False, id="half-a-word"),
        pytest.param(torch.zeros(_LIMIT // 4), True, id="longest"),
        pytest.param(torch.zeros(_LIMIT // 4 + 1), False, id="too-long"),
        pytest.param(torch.zeros(0), False, id="nothing"),
    ],
)
def test_what_fits_is_whole_words_up_to_the_limit(x: torch.Tensor, expected: bool) -> None:
    assert fits(x, _LIMIT) is expected


def test_what_it_cannot_exchange_is_refused() -> None:
    exchange = _exchange(
        torch.zeros(box_words(2, _LIMIT), dtype=torch.int64), 0, 2, torch.device("cpu")
    )
    with pytest.raises(ValueError, match="whole 4-byte words, at most 8192 bytes, is needed"):
        exchange.all_reduce(torch.zeros(_LIMIT))
    with pytest.raises(ValueError, match=r"sums of torch\.int64 are not known"):
        exchange.all_reduce(torch.zeros(4, dtype=torch.int64))
    with pytest.raises(ValueError, match="a box of 8192 int64 words is needed, got 5"):
        _exchange(torch.zeros(5, dtype=torch.int64), 0, 2, torch.device("cpu"))
