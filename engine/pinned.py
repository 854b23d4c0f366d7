"""GPU ranks whose small messages go through pinned host memory, in one kernel each.

NCCL takes about 15 us for 4 KiB between two GPUs without peer access (its own figure alone in a
CUDA graph), several times what the bytes need; decode and verify send nothing larger than some
hundred KiB. Larger messages, and host messages, go by the group's *carrier*. Peer access is never
used, so that ``NCCL_P2P_DISABLE=1`` stands in for a PCIe host here too.
"""

import mmap
import os
from typing import Any

import torch

from engine.collectives import Group
from engine.errors import EngineError
from kernels.exchange import Exchange, box_words, fits, num_counters

#: longest message that goes through the box
MESSAGE_BYTES = 1 << 18
#: cudaHostRegisterPortable | cudaHostRegisterMapped
_REGISTER_FLAGS = 1 | 2


def _pin(box: torch.Tensor) -> None:
    """Make host memory readable and writable by this process's GPU."""
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    size = box.numel() * box.element_size()
    status = int(runtime.cudaHostRegister(box.data_ptr(), size, _REGISTER_FLAGS))
    if status != 0:
        raise EngineError(
            "crash",
            "start",
            f"collectives.backend 'one_shot': the driver refuses to pin {size >> 10} KiB of host "
            f"memory (CUDA error {status}); raise the locked-memory limit, or use nccl",
        )


class PinnedGroup:
    """A group over memory that all ranks have mapped (``fd``, zero at first)."""

    def __init__(self, carrier: Group, fd: int, device: torch.device) -> None:
        self.rank, self.tp, self.carrier = carrier.rank, carrier.tp, carrier
        words = box_words(self.tp, MESSAGE_BYTES)
        # every rank asks for the same size; only the first changes anything
        os.ftruncate(fd, words * 8)
        self._map = mmap.mmap(fd, words * 8)
        box = torch.frombuffer(self._map, dtype=torch.int64)
        if device.type == "cuda":
            _pin(box)
        counters_P = torch.zeros(num_counters(MESSAGE_BYTES), dtype=torch.int32, device=device)
        self._exchange = Exchange(
            box, counters_P, rank=self.rank, num_ranks=self.tp, message_bytes=MESSAGE_BYTES
        )

    def all_reduce(self, x: torch.Tensor) -> None:
        """Sum over ranks in place, in fp32."""
        if fits(x, MESSAGE_BYTES):
            self._exchange.all_reduce(x)
        else:
            self.carrier.all_reduce(x)

    def gather(self, x: torch.Tensor) -> torch.Tensor | None:
        """Rank 0: stacked parts."""
        if not fits(x, MESSAGE_BYTES):
            return self.carrier.gather(x)
        parts = self._exchange.all_gather(x.contiguous())
        return parts if self.rank == 0 else None

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Stacked parts on every rank."""
        if not fits(x, MESSAGE_BYTES):
            return self.carrier.all_gather(x)
        return self._exchange.all_gather(x.contiguous())

    def broadcast(self, x: torch.Tensor) -> None:
        """Copy rank 0's device tensor to all."""
        if not fits(x, MESSAGE_BYTES):
            self.carrier.broadcast(x)
            return
        # all send: a sender that never listens could overtake the others
        parts = self._exchange.all_gather(x.contiguous())
        if self.rank != 0:
            x.copy_(parts[0])

    def broadcast_host(self, x: torch.Tensor) -> None:
        """Copy rank 0's host tensor to all."""
        self.carrier.broadcast_host(x)
