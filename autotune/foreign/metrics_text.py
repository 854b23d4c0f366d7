"""A server's Prometheus text (``/metrics``) as one run: counters since the server started.

Names: servers reference A.7 and B.4. Sums over labels other than the position of a draft.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from autotune.foreign.run import ForeignRun, Sample

_LINE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+([-+0-9.eE]+|NaN|[+-]Inf)\s*(?:\d+)?$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
#: what of vLLM's cache_config_info says how the server was configured
_CONFIG_LABELS = ("block_size", "cache_dtype", "enable_prefix_caching", "gpu_memory_utilization")

Table = dict[str, list[tuple[dict[str, str], float]]]


def parse_metrics(lines: Iterable[str]) -> tuple[Table, int]:
    """Name -> (labels, value) of each sample, and the number of lines."""
    table: Table = {}
    count = 0
    for line in lines:
        count += 1
        match = _LINE.match(line.strip())
        if match is None or line.startswith("#"):
            continue
        try:
            value = float(match[3])
        except ValueError:
            # a damaged line
            continue
        labels = dict(_LABEL.findall(match[2] or ""))
        table.setdefault(match[1], []).append((labels, value))
    return table, count


def read_metrics(lines: Iterable[str], path: str) -> ForeignRun:
    """Times and acceptance of a vLLM or SGLang server since its start."""
    table, count = parse_metrics(lines)
    if any(name.startswith("sglang:") for name in table):
        return _sglang(table, path, count)
    return _vllm(table, path, count)


def _total(table: Mapping[str, Any], name: str) -> float | None:
    rows = table.get(name)
    return None if not rows else sum(value for _, value in rows)


def _ratio(top: float | None, bottom: float | None) -> float | None:
    return None if top is None or not bottom else top / bottom


def _label(table: Table, label: str) -> str | None:
    for rows in table.values():
        for labels, _ in rows:
            if label in labels:
                return labels[label]
    return None


def _by_position(table: Table, name: str) -> tuple[float, ...]:
    rows = sorted(
        (int(labels["position"]), value)
        for labels, value in table.get(name, [])
        if labels.get("position", "").isdigit()
    )
    return tuple(value for _, value in rows)


def _vllm(table: Table, path: str, count: int) -> ForeignRun:
    decode_s = _total(table, "vllm:request_decode_time_seconds_sum")
    requests = _total(table, "vllm:request_decode_time_seconds_count")
    tokens = _total(table, "vllm:generation_tokens_total")
    chunks = _total(table, "vllm:inter_token_latency_seconds_count")
    chunk_s = _total(table, "vllm:inter_token_latency_seconds_sum")
    drafts = _total(table, "vllm:spec_decode_num_drafts_total")
    accepted = _total(table, "vllm:spec_decode_num_accepted_tokens_total")
    accept = None if not drafts else 1.0 + (accepted or 0.0) / drafts
    decoded = None if tokens is None or requests is None else tokens - requests
    tpot = _ratio(decode_s, decoded)
    step = _ratio(chunk_s, chunks)
    ttft = _ratio(
        _total(table, "vllm:time_to_first_token_seconds_sum"),
        _total(table, "vllm:time_to_first_token_seconds_count"),
    )
    per_depth = _by_position(table, "vllm:spec_decode_num_accepted_tokens_per_pos_total")
    proposed = _total(table, "vllm:spec_decode_num_draft_tokens_total")
    knobs: dict[str, Any] = {}
    effective = {}
    if "vllm:spec_decode_num_drafts_total" in table:
        effective["speculation"] = "on"
        if drafts and proposed:
            knobs = {"speculation.steps": round(proposed / drafts), "speculation.topk": 1}
    elif requests:
        # the counters exist from the start where speculation is on
        effective["speculation"] = "off"
        knobs = {"speculation.method": "off"}
    notes = ["counters since the server started: warm-up and every load level are in them"]
    sample = Sample(
        tpot_ms=None if tpot is None else 1e3 * tpot,
        step_ms=None if step is None else 1e3 * step,
        ttft_ms=None if ttft is None else 1e3 * ttft,
        accept_length=accept,
    )
    config = {
        name: labels[name]
        for labels, _ in table.get("vllm:cache_config_info", [])
        for name in _CONFIG_LABELS
        if name in labels
    }
    python = next((labels for labels, _ in table.get("python_info", [])), {})
    return ForeignRun(
        path=path,
        format="vLLM /metrics",
        model=_label(table, "model_name"),
        args=config,
        knobs=knobs,
        effective=effective,
        packages={"python": python["version"]} if "version" in python else {},
        workload=_lengths(
            _total(table, "vllm:request_prompt_tokens_sum"),
            _total(table, "vllm:request_generation_tokens_sum"),
            requests,
        ),
        samples=(sample,) if sample.tpot_ms or sample.step_ms else (),
        accepted_by_depth=per_depth,
        num_verifies=drafts,
        accept_length=accept,
        notes=tuple(notes),
        num_lines=count,
    )


def _sglang(table: Table, path: str, count: int) -> ForeignRun:
    latency = _ratio(
        _total(table, "sglang:inter_token_latency_seconds_sum"),
        _total(table, "sglang:inter_token_latency_seconds_count"),
    )
    ttft = _ratio(
        _total(table, "sglang:time_to_first_token_seconds_sum"),
        _total(table, "sglang:time_to_first_token_seconds_count"),
    )
    # a gauge of the last interval, one per scheduler
    length = next((v for _, v in table.get("sglang:spec_accept_length", [])), None)
    verifies = _total(table, "sglang:spec_verify_calls_total")
    verify_s = sum(
        value
        for labels, value in table.get("sglang:forward_execution_seconds_total", [])
        if labels.get("category") == "target_verify"
    )
    effective = {}
    if verify_s and verifies:
        effective["verify, ms (device timer)"] = f"{1e3 * verify_s / verifies:.3f}"
    graph = next((v for _, v in table.get("sglang:is_cuda_graph", [])), None)
    if graph is not None:
        effective["last batch in a CUDA graph"] = str(graph > 0)
    throughput = next((v for _, v in table.get("sglang:gen_throughput", [])), None)
    sample = Sample(
        tpot_ms=None if latency is None else 1e3 * latency,
        ttft_ms=None if ttft is None else 1e3 * ttft,
        accept_length=length or None,
    )
    notes = ["counters since the server started: warm-up and every load level are in them"]
    if throughput is not None:
        notes.append(f"gen_throughput {throughput:g} tok/s is a gauge of the last interval only")
    return ForeignRun(
        path=path,
        format="SGLang /metrics",
        model=_label(table, "model_name"),
        effective=effective,
        workload=_lengths(
            _total(table, "sglang:prompt_tokens_total"),
            _total(table, "sglang:generation_tokens_total"),
            _total(table, "sglang:num_requests_total"),
        ),
        samples=(sample,) if sample.tpot_ms else (),
        num_verifies=verifies,
        accept_length=length or None,
        notes=tuple(notes),
        num_lines=count,
    )


def _lengths(
    prompt: float | None, generated: float | None, requests: float | None
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if requests:
        if prompt is not None:
            found["input_len"] = round(prompt / requests)
        if generated is not None:
            found["output_len"] = round(generated / requests)
    return found
