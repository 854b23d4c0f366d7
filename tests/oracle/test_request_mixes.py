"""Whatever runs beside a greedy request, it gets the tokens of plain decoding alone.

Requests of very different lengths, some of one token, some that end by a token, some sampled, more
of them than slots: in the host's cycles and in the device's.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.config import SpeculationConfig
from engine.results import Request

SPECS = {
    "off": SpeculationConfig(),
    "chain": SpeculationConfig(method="eagle3", steps=4, topk=1),
    "tree": SpeculationConfig(method="eagle3", steps=3, topk=3, draft_tokens=9),
}
_SLOTS, _CONTEXT = 3, 160
#: draws differ from the likeliest now and then: the pair's logits lie far apart
_HEAT = 25.0


@pytest.fixture(scope="module", params=[False, True], ids=["stepwise", "resident"])
def engine(request: pytest.FixtureRequest, local: Callable[..., Any], small_pair: Path) -> Any:
    return local(
        small_pair / "target",
        small_pair / "eagle3",
        on_device=request.param,
        max_context=_CONTEXT,
        max_concurrency=_SLOTS,
    )


def _alone(engine: Any, ask: Request) -> tuple[int, ...]:
    """Plain decoding of one request by itself, to its full length."""
    whole = replace(ask, ignore_eos=True)
    tokens: tuple[int, ...] = (
        engine.runner.run([whole], SPECS["off"], concurrency=1).requests[0].token_ids
    )
    return tokens


def _drawn_alone(engine: Any, ask: Request) -> tuple[int, ...]:
    tokens: tuple[int, ...] = (
        engine.runner.run([ask], SPECS["off"], concurrency=1).requests[0].token_ids
    )
    return tokens


def _cut(tokens: tuple[int, ...], eos_ids: tuple[int, ...]) -> tuple[tuple[int, ...], str]:
    ends = [place for place, token in enumerate(tokens) if token in eos_ids]
    return (tokens[: ends[0] + 1], "eos") if ends else (tokens, "length")


def _mix(seed: int) -> list[Request]:
    """Eight greedy requests: prompts of 1 to 60 tokens, outputs of 1 to 48."""
    draw = random.Random(seed)
    return [
        Request(
            prompt_ids=tuple(draw.randrange(1, 300) for _ in range(draw.choice((1, 2, 17, 60)))),
            max_new_tokens=draw.choice((1, 2, 5, 20, 48)),
            ignore_eos=draw.random() < 0.5,
        )
        for _ in range(8)
    ]


@pytest.mark.parametrize("seed", [0, 1])
def test_a_mix_of_requests_changes_none_of_them(engine: Any, seed: int) -> None:
    asks = _mix(seed)
    alone = [_alone(engine, ask) for ask in asks]
    # tokens that end some of the outputs in their middle
    eos_ids = tuple({tokens[len(tokens) // 2] for tokens in alone if len(tokens) > 4})
    engine.runner.eos_ids = eos_ids
    expected = [
        (tokens, "length") if ask.ignore_eos else _cut(tokens, eos_ids)
        for ask, tokens in zip(asks, alone, strict=True)
    ]
    assert {reason for _, reason in expected} == {"eos", "length"}
    for name, spec in SPECS.items():
        for concurrency in (2, _SLOTS):
            run = engine.runner.run(asks, spec, concurrency=concurrency)
            got = [(r.token_ids, r.finish_reason) for r in run.requests]
            assert got == expected, f"{name} at {concurrency}"
            later = sum(len(tokens) - 1 for tokens, _ in expected)
            assert run.decode_tokens == later


@pytest.mark.parametrize("name", list(SPECS))
def test_sampled_requests_leave_greedy_ones_beside_them_alone(engine: Any, name: str) -> None:
    asks = [replace(ask, ignore_eos=True) for ask in _mix(3)]
    alone = [_alone(engine, ask) for ask in asks]
    mixed = [
        replace(ask, temperature=_HEAT, seed=n) if n % 2 else ask for n, ask in enumerate(asks)
    ]
    runs = [engine.runner.run(mixed, SPECS[name], concurrency=_SLOTS) for _ in range(2)]
    for n, (first, second) in enumerate(zip(runs[0].requests, runs[1].requests, strict=True)):
        assert first.token_ids == second.token_ids, "a seed fixes the draws"
        assert len(first.token_ids) == len(alone[n])
        if n % 2 == 0:
            assert first.token_ids == alone[n]
        elif runs[0].path == "resident":
            # noise goes with seed and position: neither speculation nor neighbours change a draw
            assert first.token_ids == _drawn_alone(engine, mixed[n])
            assert len(first.token_ids) < 10 or first.token_ids != alone[n]


@pytest.mark.parametrize("name", list(SPECS))
def test_one_new_token_each_needs_no_cycle(engine: Any, name: str) -> None:
    asks = [replace(ask, max_new_tokens=1) for ask in _mix(4)]
    run = engine.runner.run(asks, SPECS[name], concurrency=_SLOTS)
    assert [r.token_ids for r in run.requests] == [_alone(engine, ask) for ask in asks]
    assert (run.num_cycles, run.decode_tokens, run.tokens_per_s) == (0, 0, None)


@pytest.mark.parametrize("name", list(SPECS))
def test_the_whole_context_can_be_used(engine: Any, name: str) -> None:
    """Trees at its end look past it, into the slot's scratch rows."""
    ask = Request(prompt_ids=(5,) * (_CONTEXT - 20), max_new_tokens=20, ignore_eos=True)
    run = engine.runner.run([ask] * 2, SPECS[name], concurrency=2)
    assert {r.token_ids for r in run.requests} == {_alone(engine, ask)}


def test_no_requests_are_no_run_and_no_error(engine: Any) -> None:
    run = engine.runner.run([], SPECS["chain"], concurrency=2)
    assert (run.requests, run.num_cycles) == ((), 0)
