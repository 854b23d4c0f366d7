"""Results of ``sglang.bench_serving`` (JSONL, a run a line) and ``vllm bench serve`` (JSON).

Keys: servers reference A.8 and B.4. ``output_throughput`` is over the whole duration, prefill
included; decode speed is requests at a time / TPOT. With details, each request is a sample.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from autotune.foreign.run import ForeignRun, Sample

Values = Mapping[str, Any]

#: any two of these make a JSON object a result of a serving benchmark
KEYS = frozenset({"output_throughput", "mean_tpot_ms", "mean_ttft_ms", "request_throughput"})
_CONFIGURED = (
    "backend",
    "endpoint_type",
    "dataset_name",
    "request_rate",
    "burstiness",
    "max_concurrency",
    "num_prompts",
    "temperature",
    "sharegpt_output_len",
    "random_input_len",
    "random_output_len",
    "random_range_ratio",
)
_VLLM_ONLY = ("endpoint_type", "model_id", "tokenizer_id", "spec_decode_num_drafts", "burstiness")


def is_bench(values: object) -> bool:
    """Whether an object is a result of one of the two benchmarks."""
    return isinstance(values, dict) and len(KEYS & values.keys()) >= 2


def read_bench(objects: Sequence[Values], path: str) -> ForeignRun:
    """One run; several lines are repeats of it when their settings agree.

    Raises ``ValueError`` when the lines are different experiments.
    """
    first = objects[0]
    settings = [_settings(values) for values in objects]
    for number, other in enumerate(settings[1:], start=2):
        for name in sorted({*settings[0], *other}):
            if settings[0].get(name) != other.get(name):
                raise ValueError(
                    f"{path} holds different runs: {name} is {settings[0].get(name)} in line 1 and "
                    f"{other.get(name)} in line {number}; give one run a file (or FILE#LINE)"
                )
    is_vllm = any(key in first for key in _VLLM_ONLY)
    samples = [sample for values in objects for sample in _samples(values)]
    lengths = [s.accept_length for s in samples if s.accept_length is not None]
    notes = [
        f"output_throughput {float(v['output_throughput']):.1f} tok/s is over the whole "
        f"duration, prefill included; decode speed is taken from TPOT"
        for v in objects[:1]
        if "output_throughput" in v
    ]
    if not is_vllm and any("accept_length" in v for v in objects):
        notes.append("accept_length is cumulative since the server started (SGLang /server_info)")
    return ForeignRun(
        path=path,
        format="vLLM bench serve JSON" if is_vllm else "SGLang bench_serving JSONL",
        version=_first(objects, "vllm_version", "sglang_version"),
        model=_first(objects, "model_id", "model"),
        args=settings[0],
        knobs=_knobs(first),
        workload=_workload(first),
        samples=tuple(samples),
        definition="decode" if any(s.tokens_per_s for s in samples) else None,
        accepted_by_depth=_by_depth(objects),
        num_verifies=sum(_float(v.get("spec_decode_num_drafts")) or 0.0 for v in objects) or None,
        accept_length=sum(lengths) / len(lengths) if lengths else None,
        notes=tuple(notes),
        num_lines=len(objects),
    )


def _settings(values: Values) -> dict[str, Any]:
    return {name: values[name] for name in _CONFIGURED if name in values}


def _samples(values: Values) -> list[Sample]:
    """A sample per request where their times are there, else one of the means."""
    running = _concurrency(values)
    length = _float(values.get("accept_length", values.get("spec_decode_acceptance_length")))
    ttfts, itls = values.get("ttfts"), values.get("itls")
    counts = values.get("output_lens")
    if isinstance(itls, list) and isinstance(ttfts, list) and len(itls) == len(ttfts):
        found = []
        for index, (ttft, gaps) in enumerate(zip(ttfts, itls, strict=True)):
            if not isinstance(gaps, list) or not gaps:
                continue
            tokens = len(gaps)
            if isinstance(counts, list) and index < len(counts) and counts[index] > 1:
                tokens = counts[index] - 1
            tpot = 1e3 * sum(gaps) / tokens
            found.append(_sample(running, tpot, 1e3 * ttft, length))
        if found:
            return found
    tpot_ms = _float(values.get("mean_tpot_ms"))
    if tpot_ms is None or tpot_ms <= 0:
        return []
    return [_sample(running, tpot_ms, _float(values.get("mean_ttft_ms")), length)]


def _sample(
    running: int | None, tpot_ms: float, ttft_ms: float | None, length: float | None
) -> Sample:
    return Sample(
        running=running,
        tokens_per_s=None if running is None or tpot_ms <= 0 else 1e3 * running / tpot_ms,
        tpot_ms=tpot_ms,
        ttft_ms=ttft_ms,
        step_ms=None if length is None else tpot_ms * length,
        accept_length=length,
    )


def _concurrency(values: Values) -> int | None:
    """Requests at a time: the limit, unless the benchmark itself counted fewer."""
    limit = _float(values.get("max_concurrency"))
    seen = _float(values.get("concurrency"))
    if limit is not None and (seen is None or seen > 0.8 * limit):
        return int(limit)
    return None if seen is None else max(1, round(seen))


def _workload(values: Values) -> dict[str, Any]:
    found: dict[str, Any] = {}
    completed = _float(values.get("completed"))
    if completed:
        for name, key in (
            ("input_len", "total_input_tokens"),
            ("output_len", "total_output_tokens"),
        ):
            total = _float(values.get(key))
            if total is not None:
                found[name] = round(total / completed)
    if "dataset_name" in values:
        found["prompts"] = values["dataset_name"]
    level = _concurrency(values)
    if level is not None:
        found["concurrency"] = level
    if "temperature" in values:
        found["temperature"] = values["temperature"]
    return found


def _knobs(values: Values) -> dict[str, Any]:
    drafts, proposed = (
        _float(values.get("spec_decode_num_drafts")),
        _float(values.get("spec_decode_draft_tokens")),
    )
    if drafts and proposed:
        return {"speculation.steps": round(proposed / drafts), "speculation.topk": 1}
    return {}


def _by_depth(objects: Sequence[Values]) -> tuple[float, ...]:
    """Accepted by depth, from vLLM's rates per position."""
    totals: list[float] = []
    for values in objects:
        rates = values.get("spec_decode_per_position_acceptance_rates")
        drafts = _float(values.get("spec_decode_num_drafts"))
        if isinstance(rates, list) and drafts:
            totals += [0.0] * (len(rates) - len(totals))
            for depth, rate in enumerate(rates):
                totals[depth] += float(rate) * drafts
    return tuple(totals)


def _first(objects: Sequence[Values], *names: str) -> str | None:
    for values in objects:
        for name in names:
            if isinstance(values.get(name), str):
                return str(values[name])
    return None


def _float(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value)


def parse_objects(text: str) -> list[Values] | None:
    """The JSON objects of a file: one document, or one a line; None when it is no JSON.

    A last line that is cut off is left out.
    """
    try:
        whole = json.loads(text)
    except ValueError:
        whole = None
    if isinstance(whole, dict):
        return [whole]
    if isinstance(whole, list):
        return [item for item in whole if isinstance(item, dict)]
    lines = [line for line in text.splitlines() if line.strip()]
    found: list[Values] = []
    for number, line in enumerate(lines):
        try:
            value = json.loads(line)
        except ValueError:
            if number == len(lines) - 1 and found:
                break
            return None
        if isinstance(value, dict):
            found.append(value)
    return found or None
