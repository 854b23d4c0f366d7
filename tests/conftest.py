"""What all tests share: Triton's interpreter, Ctrl-C, and no ``gpu`` case without a GPU."""

import os
import signal

import pytest


def gpu_asked(config: pytest.Config) -> bool:
    """Whether the run was asked for its ``gpu`` tests."""
    expression = config.getoption("-m") or ""
    return "gpu" in expression.replace("not gpu", "")


def pytest_configure(config: pytest.Config) -> None:
    """Choose the interpreter unless GPU tests are asked for; let Ctrl-C be heard.

    Here, not beside the kernels' tests: a test of another folder may import kernels first.
    """
    if not gpu_asked(config):
        os.environ["TRITON_INTERPRET"] = "1"
    # a shell's background job (make test &, nohup) ignores Ctrl-C, and so would all programs that
    # tests start and interrupt
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip ``gpu`` cases on a host without one, however the tests were chosen."""
    marked = [item for item in items if item.get_closest_marker("gpu") is not None]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
