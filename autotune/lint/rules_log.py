"""Health rules on a log's numbers: is speculation alive, the verify captured, a GPU spinning?"""

from collections.abc import Iterator

from autotune.health_rules import (
    SPIN_UTILIZATION_PERCENT,
    STARTED_LENGTH,
    not_started,
    spins,
    wiring_fault,
)
from autotune.lint.findings import Hit, error, info, rule, warning
from autotune.lint.log_facts import Decode, LogFacts
from autotune.lint.setup import Setup

#: below this the draft adds nothing that pays for its own pass
_DEAD_LENGTH = 1.1


def _log(setup: Setup) -> LogFacts:
    return setup.log if setup.log is not None else LogFacts()


def _with_length(setup: Setup) -> list[Decode]:
    return [d for d in _log(setup).steady() if d.accept_length is not None]


def _faked(setup: Setup) -> bool:
    config = setup.command.config("--speculative-config")
    simulated = setup.env.get("SGLANG_SIMULATE_ACC_LEN", "-1")
    return config.get("rejection_sample_method") == "synthetic" or simulated not in ("-1", "")


@rule("log-not-known", "what `--log` takes: docs/lint.md")
def nothing_read(setup: Setup) -> Iterator[Hit]:
    """Files in which no line is known: that nothing was found in them says nothing."""
    log = setup.log
    if log is not None and log.tells_nothing:
        yield warning(
            ", ".join(log.files),
            f"none of {log.num_lines} lines is of SGLang, vLLM, their benchmarks, NCCL, nvidia-smi "
            "or /metrics: nothing could be judged by it",
            "give the server's own output from its start on",
        )


@rule("log-spec-not-started", "issue C: accept length 1.00 means speculation did not start")
def nothing_accepted(setup: Setup) -> Iterator[Hit]:
    """Exactly one token per verify, always: no draft ever got through."""
    lengths = _with_length(setup)
    if _faked(setup) or not not_started([d.accept_length or 0.0 for d in lengths]):
        return
    yield error(
        f"accept length 1.00 ({lengths[0].evidence})",
        f"all {len(lengths)} reports say 1.00: not one draft was accepted, so speculation did not "
        "start (draft not loaded, not fed, or its tokens mapped wrongly); every step pays for it",
        "check that the draft was loaded and belongs to this target; do not tune steps",
    )


@rule("log-wrong-draft", "sgl-project/sglang#25673")
def next_to_nothing_accepted(setup: Setup) -> Iterator[Hit]:
    """Accept length near 1: a wrong or unsupported draft; no step count can help."""
    lengths = _with_length(setup)
    median = _log(setup).accept_length
    if median is None or _faked(setup) or not STARTED_LENGTH < median < _DEAD_LENGTH:
        return
    where = f" ({lengths[0].evidence})" if lengths else ""
    yield error(
        f"accept length {median:.2f}{where}",
        f"{median - 1:.2f} drafts a verify: the draft does not fit the target (other version, "
        "other architecture, unsupported in this server), or the context is far beyond its "
        "training",
        "stop tuning; try another draft or server version, and compare its config with the "
        "target's",
    )


@rule("log-wiring-fault", "speculation.md 1.5 (RTX PRO 6000, Qwen3-Coder-30B: 0.69, then 0)")
def dead_after_first(setup: Setup) -> Iterator[Hit]:
    """A good first position and nothing after: the draft is fed wrong hidden states."""
    if _faked(setup):
        return
    for decode in _with_length(setup):
        fault = wiring_fault(decode.positions)
        if fault is None:
            continue
        depth, conditional = fault
        yield error(
            f"acceptance by position ({decode.evidence})",
            f"position {depth - 1} is accepted at {decode.positions[depth - 1]:.2f}, position "
            f"{depth} at {conditional:.2f} of those: a chain falls off gently (0.5 to 0.8 a "
            f"step), so draft pass {depth + 1} gets wrong inputs (hidden states, positions or KV)",
            "a wiring fault of draft and server, no tuning result: other version or draft "
            f"backend; {depth} draft token{'s' if depth > 1 else ''} meanwhile",
        )
        return


@rule("log-verify-eager", "rtx6kpro kimi-k26 notes, vllm-project/vllm#40608, SafeAILab/EAGLE#298")
def verify_not_captured(setup: Setup) -> Iterator[Hit]:
    """The log itself says that the verify left the CUDA graph."""
    log = _log(setup)
    for what, where in log.downgrades[:1]:
        yield error(
            f"attention backend {what} ({where})",
            "vLLM set cudagraph_mode to PIECEWISE or NONE because this backend takes no uniform "
            "batch of 1 + k tokens: the attention of every layer of the verify runs eager and "
            "grows with context",
            "another attention backend or a newer vLLM, before touching NCCL",
        )
    eager = [d for d in log.steady() if d.cuda_graph is False]
    seen = [d for d in log.steady() if d.cuda_graph is not None]
    if eager:
        sizes = sorted({d.running for d in eager if d.running is not None})
        captured = [d.running for d in seen if d.cuda_graph and d.running is not None]
        beyond = bool(captured) and bool(sizes) and min(sizes) > max(captured)
        cause = (
            f"batches above {max(captured)} exceed the largest captured one" if beyond
            else "graphs are off, or these batches are excluded from them"
        )  # fmt: skip
        yield error(
            f"cuda graph: False ({eager[0].evidence})",
            f"{len(eager)} of {len(seen)} decode reports (running requests "
            f"{', '.join(map(str, sizes[:8]))}) ran eager: {cause}",
            "raise the capture size to the load x verify width, and look at the attention backend",
        )


@rule("log-draft-not-captured", "sgl-project/sglang#40762", "sglang")
def draft_graphs_missing(setup: Setup) -> Iterator[Hit]:
    """ "cuda graph: True" is about the verify; the draft passes have capture lines of their own."""
    log, spec = _log(setup), setup.speculation
    if spec is None or "target" not in log.captured or spec.algorithm not in ("EAGLE", "EAGLE3"):
        return
    missing = []
    if "draft" not in log.captured and (spec.steps or 2) > 1:
        missing.append("draft")
    if "draft_extend" not in log.captured:
        missing.append("draft extend")
    if missing:
        yield warning(
            f"capture lines ({log.captured['target']})",
            f"the target's graphs were captured, but no line says so for {' and '.join(missing)}: "
            "those forwards run eager once or more a step",
            "--speculative-draft-attention-backend triton, or a newer version",
        )


@rule("log-spin", "local-inference-lab/rtx6kpro#21, #25; vllm-project/vllm#33041")
def busy_without_work(setup: Setup) -> Iterator[Hit]:
    """Full utilisation at idle power: a kernel spins in a peer wait."""
    busy = [p for p in _log(setup).power if p.utilisation >= SPIN_UTILIZATION_PERCENT]
    low = [p for p in busy if spins(p.utilisation, p.draw_w, p.limit_w)]
    if not busy or len(low) * 2 < len(busy):
        return
    first = low[0]
    limit = "" if first.limit_w is None else f" of {first.limit_w:.0f} W"
    moving = any((d.tokens_per_s or 0) > 0 for d in _log(setup).decodes)
    consequence = (
        "tokens still come, so the waits end: a fixed cost per forward that speculation cannot fix"
        if moving
        else "if no tokens come it is a hang: mark the configuration as failed, not as slow"
    )
    yield error(
        f"{first.utilisation:.0f} % at {first.draw_w:.0f} W ({first.evidence})",
        f"{len(low)} of {len(busy)} busy readings draw {first.draw_w:.0f} W{limit}: kernels wait "
        f"for a peer instead of working (all-reduce or broken peer-to-peer); {consequence}",
        "run the all-reduce micro-benchmark with a time-out (`autotune probe`) and `autotune "
        "doctor` for IOMMU/ACS; NCCL_P2P_DISABLE=1 and --disable-custom-all-reduce separate the "
        "causes",
    )


@rule("log-allreduce-nccl", "sgl-project/sglang#34528, vllm-project/vllm#56128")
def every_reduction_by_nccl(setup: Setup) -> Iterator[Hit]:
    """The servers' fast all-reduce refused this host."""
    log = _log(setup)
    where = log.custom_refused
    if where is None and log.allreduce is not None and log.allreduce[0] == ("PYNCCL",):
        where = log.allreduce[1]
    if where is None:
        return
    name = (
        "VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC" if (log.engine or setup.engine) == "vllm"
        else "SGLANG_ENABLE_PCIE_IPC_ALLREDUCE"
    )  # fmt: skip
    yield info(
        f"all-reduce backend ({where})",
        "the custom all-reduce refused these GPUs (more than two without full NVLink, checked at "
        "start and at every call): all reductions go through NCCL",
        f"measure `autotune probe`; where NCCL is slow at 14 to 64 KiB try {name}=1 (newest "
        "versions)",
    )


@rule("log-args-differ", "sgl-project/sglang#22780")
def arguments_in_force_differ(setup: Setup) -> Iterator[Hit]:
    """What the server says it runs with, against what was asked."""
    log = _log(setup)
    for option in setup.command.options:
        key = option.name.removeprefix("--").replace("-", "_")
        if (
            key not in log.arguments
            or len(option.values) != 1
            or option.name in setup.command.configs
        ):
            continue
        asked, found = option.values[0], log.arguments[key]
        if isinstance(found, bool) or found is None or isinstance(found, list | dict):
            continue
        if str(found) != asked and not _same_number(asked, found):
            yield warning(
                option.text,
                f"the server's log says {key}={found}: the argument in force is not the one asked",
                "read back GET /server_info after start; compare runs by it, not by the command "
                "line",
            )


def _same_number(text: str, value: object) -> bool:
    try:
        return float(text) == float(str(value))
    except ValueError:
        return False


@rule(
    "log-includes-prefill",
    "local-inference-lab/rtx6kpro models/kimi-k25 (9 instead of 30-35 tok/s)",
)
def wall_clock_throughput(setup: Setup) -> Iterator[Hit]:
    """Output tokens over wall time holds prefill and queueing; TPOT does not."""
    bench = _log(setup).bench
    throughput, tpot = bench.get("output_throughput"), bench.get("mean_tpot_ms")
    concurrency = bench.get("concurrency", 1.0)
    if not throughput or not tpot:
        return
    decode = concurrency * 1e3 / tpot
    if throughput < 0.75 * decode:
        yield warning(
            f"output throughput {throughput:.1f} tok/s",
            f"mean TPOT {tpot:.1f} ms at concurrency {concurrency:.1f} is {decode:.1f} tok/s of "
            "decoding; the difference is prefill and waiting",
            "compare decode-only numbers (TPOT); never a wall-clock number with a decode number",
        )


@rule("log-accept-rate", "vllm-project/vllm#42508; servers.md A.7", "sglang", "vllm")
def rates_are_defined_differently(setup: Setup) -> Iterator[Hit]:
    """ "accept rate" changed its meaning between versions; accept length did not."""
    if any(d.accept_length is not None for d in _log(setup).decodes):
        meaning = (
            "cumulative per position, in percent over all drafts"
            if setup.engine == "vllm"
            else {
                True: "accepted with the bonus token over (forwards x draft tokens)",
                False: "correct drafts over (forwards x (draft tokens - 1))",
                None: "one of two definitions, by version",
            }[setup.before("0.5.10")]
        )
        yield info(
            "accept rate",
            f"here it is {meaning}; SGLang's meaning changed after 0.5.9, vLLM's per-position "
            "rates are cumulative, EAGLE's n-alpha conditional",
            "compare accept lengths (bonus token included) only",
        )
