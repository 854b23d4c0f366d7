"""``engine bench``: TTFT, TPOT and tokens/s by concurrency, each with its spread."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from engine.api import Engine
from engine.config import SpeculationConfig
from engine.results import Request, RunResult


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRow:
    """One load level; medians over repeats with the lowest and highest tokens/s."""

    concurrency: int
    speculation: SpeculationConfig
    repeats: int
    num_requests: int
    ttft_ms: float
    tpot_ms: float | None
    tokens_per_s: float
    tokens_per_s_low: float
    tokens_per_s_high: float
    accept_length: float | None
    cycle_ms: float
    phases_ms: dict[str, float]
    #: how cycles ran, and each segment's "captured" or "eager: " and why
    path: str
    graphs: dict[str, str]

    def as_json(self) -> dict[str, object]:
        """Plain values."""
        return asdict(self) | {"speculation": self.speculation.model_dump()}


def random_prompts(count: int, length: int, vocab: int, seed: int) -> list[tuple[int, ...]]:
    """Distinct uniform token ids; routing is as spread as it gets, acceptance means nothing."""
    draws = np.random.default_rng(seed).integers(1, vocab, size=(count, length))
    return [tuple(int(t) for t in row) for row in draws]


def bench_level(
    engine: Engine,
    prompts: Sequence[tuple[int, ...]],
    *,
    concurrency: int,
    output_len: int,
    repeats: int,
    speculation: SpeculationConfig | None = None,
    temperature: float = 0.0,
    ignore_eos: bool = True,
) -> BenchRow:
    """Measure one concurrency: one warm-up run, then ``repeats`` runs over all prompts."""
    chosen = speculation or engine.config.speculation_at(concurrency)
    requests = [
        Request(
            prompt_ids=prompt,
            max_new_tokens=output_len,
            temperature=temperature,
            seed=index,
            ignore_eos=ignore_eos,
        )
        for index, prompt in enumerate(prompts)
    ]
    engine.generate(requests[:concurrency], chosen, concurrency=concurrency)
    runs = [engine.generate(requests, chosen, concurrency=concurrency) for _ in range(repeats)]
    return _row(runs, chosen, concurrency)


def _row(runs: list[RunResult], speculation: SpeculationConfig, concurrency: int) -> BenchRow:
    rates = [run.tokens_per_s or 0.0 for run in runs]
    finished = [r for run in runs for r in run.requests]
    tpots = [t for r in finished if (t := r.tpot_ms) is not None]
    lengths = [a for run in runs if (a := run.counters.accept_length) is not None]
    names = runs[0].phases_ms
    return BenchRow(
        concurrency=concurrency,
        speculation=speculation,
        repeats=len(runs),
        num_requests=len(runs[0].requests),
        ttft_ms=statistics.median(r.ttft_s for r in finished) * 1e3,
        tpot_ms=statistics.median(tpots) if tpots else None,
        tokens_per_s=statistics.median(rates),
        tokens_per_s_low=min(rates),
        tokens_per_s_high=max(rates),
        accept_length=statistics.median(lengths) if lengths else None,
        cycle_ms=statistics.median(run.cycle_ms for run in runs),
        phases_ms={n: statistics.median(run.phases_ms.get(n, 0.0) for run in runs) for n in names},
        path=runs[-1].path,
        graphs=dict(runs[-1].graphs),
    )
