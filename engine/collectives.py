"""What the ranks exchange: sums of activations, logits towards rank 0, orders from rank 0.

``all_reduce`` and ``gather`` carry tensors of the compute device; ``broadcast_host`` carries int64
host tensors (orders), so that a GPU run never waits for the device to know what to do next.
"""

from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from engine.errors import invalid
from engine.shared_memory import SharedMemoryGroup, check_platform


class Group(Protocol):
    """The tensor-parallel group."""

    rank: int
    tp: int

    def all_reduce(self, x: torch.Tensor) -> None:
        """Sum ``x`` (contiguous) over ranks in place."""

    def gather(self, x: torch.Tensor) -> torch.Tensor | None:
        """Rank 0: all ranks' ``x`` stacked in front; other ranks: None."""

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """All ranks' ``x`` stacked in front, on every rank."""

    def broadcast(self, x: torch.Tensor) -> None:
        """Copy rank 0's int64 tensor of the compute device to all ranks in place."""

    def broadcast_host(self, x: torch.Tensor) -> None:
        """Copy rank 0's int64 host tensor to all ranks in place."""


class LocalGroup:
    """One rank alone: nothing to exchange."""

    rank = 0
    tp = 1

    def all_reduce(self, x: torch.Tensor) -> None:
        """Nothing."""

    def gather(self, x: torch.Tensor) -> torch.Tensor | None:
        """Its own part."""
        return x[None]

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Its own part."""
        return x[None]

    def broadcast(self, x: torch.Tensor) -> None:
        """Nothing."""

    def broadcast_host(self, x: torch.Tensor) -> None:
        """Nothing."""


class DistGroup:
    """torch.distributed: gloo for CPU tensors, NCCL for GPU tensors with gloo for host messages."""

    def __init__(self, store: Any, rank: int, tp: int, backend: str, timeout_s: float):
        self.rank, self.tp = rank, tp
        timeout = timedelta(seconds=timeout_s)
        dist.init_process_group(backend, store=store, rank=rank, world_size=tp, timeout=timeout)
        self._host = dist.group.WORLD
        if backend == "nccl":
            self._host = dist.new_group(backend="gloo", timeout=timeout)

    def all_reduce(self, x: torch.Tensor) -> None:
        """Sum over ranks in place."""
        dist.all_reduce(x)

    def gather(self, x: torch.Tensor) -> torch.Tensor | None:
        """Rank 0: stacked parts."""
        x = x.contiguous()
        if self.rank != 0:
            dist.gather(x, None, dst=0)
            return None
        out = torch.empty(self.tp, *x.shape, dtype=x.dtype, device=x.device)
        dist.gather(x, list(out.unbind(0)), dst=0)
        return out

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Stacked parts on every rank."""
        out = torch.empty(self.tp, *x.shape, dtype=x.dtype, device=x.device)
        dist.all_gather_into_tensor(out, x.contiguous())
        return out

    def broadcast(self, x: torch.Tensor) -> None:
        """Copy rank 0's device tensor to all."""
        dist.broadcast(x, src=0)

    def broadcast_host(self, x: torch.Tensor) -> None:
        """Copy rank 0's host tensor to all."""
        dist.broadcast(x, src=0, group=self._host)


class HostGroup(DistGroup):
    """GPU ranks whose tensors travel through gloo on the host: slow, syncs, cannot be captured.

    For ranks that share a GPU, which NCCL refuses.
    """

    def __init__(self, store: Any, rank: int, tp: int, timeout_s: float):
        super().__init__(store, rank, tp, "gloo", timeout_s)

    def all_reduce(self, x: torch.Tensor) -> None:
        """Sum over ranks in place, in fp32: not every gloo adds 16-bit types."""
        host = x.to("cpu", torch.float32)
        super().all_reduce(host)
        x.copy_(host)

    def gather(self, x: torch.Tensor) -> torch.Tensor | None:
        """Rank 0: stacked parts."""
        parts = super().gather(x.cpu())
        return None if parts is None else parts.to(x.device)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Stacked parts on every rank: a sum in which each rank fills its own place."""
        host = torch.zeros(self.tp, *x.shape, dtype=x.dtype)
        host[self.rank] = x.cpu()
        super().all_reduce(host)
        return host.to(x.device)

    def broadcast(self, x: torch.Tensor) -> None:
        """Copy rank 0's device tensor to all."""
        host = x.cpu()
        super().broadcast(host)
        x.copy_(host)


class OneShotGroup:
    """CPU ranks over shared memory."""

    def __init__(self, memory: SharedMemoryGroup) -> None:
        self.rank, self.tp = memory.rank, memory.tp
        self.all_reduce = memory.all_reduce
        self.gather = memory.gather
        self.broadcast_host = memory.broadcast
        self.broadcast = memory.broadcast

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Stacked parts: a sum in which each rank fills its own place."""
        out = torch.zeros(self.tp, *x.shape, dtype=x.dtype)
        out[self.rank] = x
        self.all_reduce(out)
        return out


def serve_store(tp: int, timeout_s: float) -> tuple[Any, int]:
    """Rank 0: serve the rendezvous at a free loopback port of the kernel's choice."""
    timeout = timedelta(seconds=timeout_s)
    store = TCPStore("127.0.0.1", 0, tp, is_master=True, timeout=timeout, wait_for_workers=False)
    return store, store.port


def create_group(
    backend: str,
    *,
    rank: int,
    tp: int,
    store: Any,
    store_port: int,
    memory_fd: int,
    timeout_s: float,
    device: torch.device,
    shares_gpu: bool = False,
) -> Group:
    """Join the group of ``tp`` ranks; rank 0 passes its ``store``, the others meet at its port.

    ``shares_gpu``: some ranks have the same GPU, which NCCL refuses.
    """
    if tp == 1:
        return LocalGroup()
    if backend == "one_shot" and device.type == "cpu":
        check_platform()
        return OneShotGroup(SharedMemoryGroup(memory_fd, rank, tp, timeout_s))
    if backend not in ("gloo", "nccl", "one_shot"):
        raise invalid(
            f"collectives.backend {backend!r} is not implemented; known: gloo, nccl, one_shot"
        )
    if store is None:
        timeout = timedelta(seconds=timeout_s)
        store = TCPStore("127.0.0.1", store_port, tp, is_master=False, timeout=timeout)
    if device.type == "cpu":
        return DistGroup(store, rank, tp, "gloo", timeout_s)
    if backend == "gloo":
        return HostGroup(store, rank, tp, timeout_s)
    if backend == "nccl":
        return DistGroup(store, rank, tp, "nccl", timeout_s)
    # only here: a CPU rank imports no kernels
    from engine.pinned import PinnedGroup

    carrier: Group = (
        HostGroup(store, rank, tp, timeout_s)
        if shares_gpu
        else DistGroup(store, rank, tp, "nccl", timeout_s)
    )
    return PinnedGroup(carrier, memory_fd, device)
