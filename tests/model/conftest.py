"""What tests of the model share: counting a simulation's events."""

from collections.abc import Callable

import pytest
import simpy


@pytest.fixture
def counted_events(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], int]:
    """Run something and count SimPy's events: the work of a simulation on any host."""
    events = 0
    step = simpy.Environment.step

    def count(env: simpy.Environment) -> None:
        nonlocal events
        events += 1
        step(env)

    def counted(run: Callable[[], object]) -> int:
        nonlocal events
        events = 0
        run()
        return events

    monkeypatch.setattr(simpy.Environment, "step", count)
    return counted
