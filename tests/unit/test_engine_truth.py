"""The tiny model's stages judge outputs by plain decoding of the same engine, made once."""

from types import SimpleNamespace
from typing import Any

import pytest

from bench import engine_tiny
from engine.config import SpeculationConfig
from engine.results import Request, RequestResult

_PROMPTS = [(7,), (8, 9), (3, 3, 3)]


def _next(text: tuple[int, ...]) -> int:
    return (31 * sum(text) + len(text)) % 97


class _Engine:
    """Decodes by a rule; every token leads by ``margin``."""

    def __init__(self, margin: float) -> None:
        self.margin, self.loads = margin, []

    def generate(
        self,
        asks: list[Request],
        speculation: SpeculationConfig,
        *,
        concurrency: int,
        margins: bool,
    ) -> Any:
        assert speculation.method == "off"
        assert margins
        self.loads.append((len(asks), concurrency))
        return SimpleNamespace(requests=[self._decode(ask) for ask in asks])

    def _decode(self, ask: Request) -> RequestResult:
        text = ask.prompt_ids
        for _ in range(ask.max_new_tokens):
            text = (*text, _next(text))
        tokens = text[len(ask.prompt_ids) :]
        return RequestResult(
            token_ids=tokens,
            finish_reason="length",
            tokens_per_verify=(),
            ttft_s=0.0,
            decode_s=0.0,
            margins=(self.margin,) * len(tokens),
            runners_up=tuple((t + 1) % 97 for t in tokens),
        )


def _asks() -> list[Request]:
    return [Request(prompt_ids=p, max_new_tokens=12, ignore_eos=True) for p in _PROMPTS]


def _run(engine: _Engine, count: int, change: tuple[int, int] | None) -> Any:
    """Outputs of the first prompts; ``change``: prompt and place of a token that is another."""
    found = [list(r.token_ids) for r in engine.generate(
        _asks()[:count], engine_tiny.OFF, concurrency=1, margins=True
    ).requests]  # fmt: skip
    if change is not None:
        prompt, place = change
        text = (*_PROMPTS[prompt], *found[prompt][:place], (found[prompt][place] + 1) % 97)
        while len(text) < len(_PROMPTS[prompt]) + 12:
            text = (*text, _next(text))
        found[prompt] = list(text[len(_PROMPTS[prompt]) :])
    return SimpleNamespace(requests=[SimpleNamespace(token_ids=tuple(t)) for t in found])


@pytest.mark.parametrize(
    ("margin", "change", "verdict"),
    [
        pytest.param(4.0, None, "exact", id="equal"),
        pytest.param(0.01, (1, 5), "near_tie", id="second-best-in-a-near-tie"),
        pytest.param(4.0, (1, 5), "incorrect", id="another-token-where-the-lead-is-clear"),
    ],
)
@pytest.mark.parametrize("count", [2, 3])
def test_outputs_of_any_load_are_judged_by_one_reference(
    margin: float, change: tuple[int, int] | None, verdict: str, count: int
) -> None:
    engine: Any = _Engine(margin)
    truth = engine_tiny.Truth(engine, _asks(), 16)
    assert engine.loads[0] == (3, 16)
    assert truth.check(_run(engine, count, change)).verdict == verdict
