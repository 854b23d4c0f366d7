"""What all tests share: the choice of Triton's interpreter, and no ``gpu`` case without a GPU."""

import os

import pytest


def gpu_asked(config: pytest.Config) -> bool:
    """Whether the run was asked for its ``gpu`` tests."""
    expression = config.getoption("-m") or ""
    return "gpu" in expression.replace("not gpu", "")


def pytest_configure(config: pytest.Config) -> None:
    """Choose the interpreter unless GPU tests are asked for.

    Here, not beside the kernels' tests: a test of another folder may import kernels first.
    """
    if not gpu_asked(config):
        os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip ``gpu`` cases on a host without one, however the tests were chosen."""
    marked = [item for item in items if item.get_closest_marker("gpu") is not None]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
