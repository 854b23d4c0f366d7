"""Comparing the two op sets."""

from typing import Any

import torch

from kernels.opset import opset

REFERENCE, TRITON = opset("reference"), opset("triton")

#: type -> (relative, absolute); bf16 rounds to 8 bits, and both sides round in several places
TOLERANCE = {torch.float32: (2e-5, 2e-5), torch.bfloat16: (2e-2, 4e-2)}


def clone(value: Any) -> Any:
    """A copy of a tensor, or the value itself."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def assert_same(name: str, *args: Any, **kwargs: Any) -> Any:
    """Both op sets give the same results, and leave the same in arguments they write to."""
    results, left = [], []
    for ops in (REFERENCE, TRITON):
        own = [clone(arg) for arg in args]
        result = getattr(ops, name)(*own, **kwargs)
        results.append(result if isinstance(result, tuple) else (result,))
        left.append([arg for arg in own if isinstance(arg, torch.Tensor)])
    for wanted, got in zip(results[0], results[1], strict=True):
        assert_close(got, wanted)
    for wanted, got in zip(left[0], left[1], strict=True):
        assert_close(got, wanted)
    return results[1]


def assert_close(got: torch.Tensor | None, wanted: torch.Tensor | None) -> None:
    """Equal for integers, within the type's tolerance for floats, type and shape equal."""
    if wanted is None:
        assert got is None
        return
    assert got is not None
    assert got.dtype == wanted.dtype
    relative, absolute = TOLERANCE.get(wanted.dtype, (0.0, 0.0))
    torch.testing.assert_close(got, wanted, rtol=relative, atol=absolute, equal_nan=True)


def randn(
    device: torch.device, dtype: torch.dtype, *shape: int, scale: float = 1.0
) -> torch.Tensor:
    """Normal random numbers, the same on every device."""
    return (torch.randn(*shape) * scale).to(device=device, dtype=dtype)
