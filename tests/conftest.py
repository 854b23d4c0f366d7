"""What all tests share: cases that need a GPU are skipped where there is none."""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip ``gpu`` cases on a host without one, however the tests were chosen."""
    marked = [item for item in items if item.get_closest_marker("gpu") is not None]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
