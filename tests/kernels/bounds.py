"""Under Triton's interpreter: every address a kernel touches lies in one of its arguments.

A GPU answers a stray address with an illegal access, or with a neighbour's data, on one day and not
on another; here it fails the test.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """First and one past the last byte that belongs to the view."""
    if tensor.numel() == 0:
        return tensor.data_ptr(), tensor.data_ptr()
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps)
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


@contextmanager
def checked_bounds(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Within this block a stray load, store or atomic raises ``IndexError``."""
    from triton.runtime import interpreter

    extents: list[tuple[int, int]] = []
    kernel = ""
    prepare = interpreter.GridExecutor._init_args_hst
    builder = interpreter.InterpreterBuilder
    load, store, rmw = (
        getattr(builder, f"create_{name}") for name in ("masked_load", "masked_store", "atomic_rmw")
    )

    def note(self: Any, args: Any, kwargs: Any) -> Any:
        nonlocal kernel
        host = prepare(self, args, kwargs)
        kernel = self.fn.__name__
        extents[:] = [extent(arg) for arg in host[0] if isinstance(arg, torch.Tensor)]
        return host

    def check(what: str, pointers: Any, mask: Any) -> None:
        size = np.dtype(interpreter._get_np_dtype(pointers.get_element_ty())).itemsize
        wanted = np.broadcast_to(mask.data, pointers.data.shape).astype(bool)
        address = pointers.data[wanted].astype(np.int64)
        inside = np.zeros(address.shape, dtype=bool)
        for low, high in extents:
            inside |= (address >= low) & (address + size <= high)
        if not inside.all():
            raise IndexError(f"{kernel}: a {what} at {address[~inside][:4]} outside every argument")

    def checked_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        check("load", pointers, mask)
        return load(self, pointers, mask, *rest)

    def checked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        check("store", pointers, mask)
        return store(self, pointers, value, mask, *rest)

    def checked_rmw(self: Any, op: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        check("atomic", pointers, mask)
        return rmw(self, op, pointers, value, mask, *rest)

    with patch.context() as scope:
        scope.setattr(interpreter.GridExecutor, "_init_args_hst", note)
        scope.setattr(builder, "create_masked_load", checked_load)
        scope.setattr(builder, "create_masked_store", checked_store)
        scope.setattr(builder, "create_atomic_rmw", checked_rmw)
        yield
