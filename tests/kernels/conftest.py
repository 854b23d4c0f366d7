"""Kernel tests run twice: on Triton's interpreter (CPU tensors), and compiled with ``-m gpu``.

One process can do only one of the two, because Triton decides when a kernel is defined.
"""

from collections.abc import Iterator

import pytest
import torch

from tests.conftest import gpu_asked
from tests.kernels.bounds import checked_bounds


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With ``-m gpu`` the interpreter's variants go, also of tests that are marked ``gpu``."""
    if not gpu_asked(config):
        return
    mine = [item for item in items if _on_interpreter(item)]
    config.hook.pytest_deselected(items=mine)
    items[:] = [item for item in items if item not in mine]


def _on_interpreter(item: pytest.Item) -> bool:
    call = getattr(item, "callspec", None)
    return (
        "tests/kernels" in str(item.path)
        and call is not None
        and call.params.get("device") == "cpu"
    )


@pytest.fixture(
    params=[pytest.param("cpu", id="interpreter"), pytest.param("cuda", marks=pytest.mark.gpu)]
)
def device(request: pytest.FixtureRequest) -> torch.device:
    """The device kernels are tested on."""
    from kernels.device import INTERPRETED

    wanted = torch.device(request.param)
    if wanted.type == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if INTERPRETED.value != (wanted.type == "cpu"):
        pytest.fail("kernels were imported before tests/conftest.py chose the interpreter")
    torch.manual_seed(0)
    return wanted


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """The types the engine runs in."""
    return request.param


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh tensors hold NaN (or a huge integer), so that an unwritten element cannot pass."""

    def poison(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type == "meta":
            return tensor
        if tensor.is_floating_point():
            return tensor.fill_(float("nan"))
        if tensor.dtype in (torch.int32, torch.int64):
            return tensor.fill_(2_000_000_000)
        return tensor

    empty, empty_like, new_empty = torch.empty, torch.empty_like, torch.Tensor.new_empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: poison(empty(*a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: poison(empty_like(*a, **k)))
    monkeypatch.setattr(
        torch.Tensor, "new_empty", lambda self, *a, **k: poison(new_empty(self, *a, **k))
    )


@pytest.fixture(autouse=True)
def bounds(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """On the interpreter, an address outside a kernel's arguments fails the test."""
    from kernels.device import INTERPRETED

    if not INTERPRETED.value:
        yield
        return
    with checked_bounds(monkeypatch):
        yield
