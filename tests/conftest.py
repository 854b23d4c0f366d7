"""What all tests share: Triton's interpreter, Ctrl-C, and no ``gpu`` case without a GPU."""

import argparse
import os
import signal
import sys
from collections.abc import Callable

import pytest


def _wants_gpu(expression: str | None) -> bool:
    return "gpu" in (expression or "").replace("not gpu", "")


def gpu_asked(config: pytest.Config) -> bool:
    """Whether the run was asked for its ``gpu`` tests."""
    return _wants_gpu(config.getoption("-m"))


def _asked_on_the_command_line() -> bool:
    """The same before pytest has read its options."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("-m", default="")
    return _wants_gpu(parser.parse_known_args(sys.argv[1:])[0].m)


# Triton reads it once, when kernels are imported: a folder's conftest may do so before pytest is
# configured. Workers of xdist have it from their parent.
if not _asked_on_the_command_line():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_configure(config: pytest.Config) -> None:
    """Choose the interpreter unless GPU tests are asked for; let Ctrl-C be heard."""
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


@pytest.fixture
def python_calls() -> Callable[[Callable[[], object]], int]:
    """Run something and count the Python functions it calls: its work on any host, in counts."""

    def counted(run: Callable[[], object]) -> int:
        calls = 0

        def note(_frame: object, what: str, _argument: object) -> None:
            nonlocal calls
            calls += what == "call"

        before = sys.getprofile()
        sys.setprofile(note)
        try:
            run()
        finally:
            sys.setprofile(before)
        return calls

    return counted
