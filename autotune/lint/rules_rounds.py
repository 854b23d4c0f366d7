"""Rounds of speculation by their measured time: what physics does not ask for, where GPUs wait."""

from collections.abc import Iterator

from autotune.lint.findings import Hit, error, rule, warning
from autotune.lint.rules_model import measured_speed
from autotune.lint.setup import Setup

#: a round may cost this much more than decoding each of its tokens by itself before it is odd
_SLACK = 1.25
#: drafts of one layer or so; a whole draft model has a cost of its own
_LIGHT_DRAFTS = ("EAGLE", "EAGLE3", "MTP", "NEXTN")
#: wall over GPU time, and ms between them, that are more than sampling and bookkeeping
_GAP_RATIO, _GAP_MS = 1.2, 1.0
_PHASES = ("target_verify", "eagle_draft", "eagle_draft_extend")


@rule("log-round-above-its-tokens", "lvyufeng/PocketLLM#59 (+619 ms for one token more)")
def dearer_than_token_by_token(setup: Setup) -> Iterator[Hit]:
    """A verify that costs more than decoding its tokens one after another.

    Whatever the routing, n tokens read at most n times the experts of one: beyond that another
    kernel runs for more than one token.
    """
    speed, running = measured_speed(setup)
    spec, tau, baseline = setup.speculation, setup.accept_length, setup.baseline_tokens_per_s
    if spec is None or speed is None or tau is None or baseline is None or running != 1:
        return
    if spec.algorithm not in _LIGHT_DRAFTS or spec.draft_tokens is None:
        return
    round_ms, plain_ms = tau * 1e3 / speed, 1e3 / baseline
    if round_ms > _SLACK * spec.draft_tokens * plain_ms:
        yield error(
            f"{round_ms:.1f} ms a round of {spec.draft_tokens} tokens",
            f"{round_ms / plain_ms:.1f} plain steps of {plain_ms:.1f} ms: more than decoding the "
            f"{spec.draft_tokens} tokens one by one, though they can read at most "
            f"{spec.draft_tokens} x the experts of one. Another kernel runs for more than one "
            "token (the MoE runner's path for prefill, attention without split-KV, or no graph)",
            "compare forwards of 1 and 2 tokens (`vllm bench forward`, a profile of TARGET_VERIFY) "
            "and try another MoE backend (--moe-runner-backend, moe_backend) before any other "
            "setting",
        )


@rule(
    "log-launch-gap", "sgl-project/sglang#29960 (cudaGraphLaunch of a large verify graph)", "sglang"
)
def host_does_not_keep_up(setup: Setup) -> Iterator[Hit]:
    """GPU time of a round by the server's own device timer, against its time on the wall."""
    speed, running = measured_speed(setup)
    log, tau = setup.log, setup.accept_length
    if log is None or speed is None or tau is None or running != 1 or setup.speculation is None:
        return
    calls = log.counted("spec_verify_calls_total")
    phases = {
        name: seconds
        for name in _PHASES
        if (seconds := log.counted("forward_execution_seconds_total", f'category="{name}"'))
        is not None
    }
    if not calls or "target_verify" not in phases:
        return
    gpu_ms, wall_ms = 1e3 * sum(phases.values()) / calls, tau * 1e3 / speed
    if wall_ms < _GAP_RATIO * gpu_ms or wall_ms - gpu_ms < _GAP_MS:
        return
    parts = ", ".join(f"{name} {1e3 * seconds / calls:.1f}" for name, seconds in phases.items())
    yield warning(
        f"{wall_ms - gpu_ms:.1f} ms of every round without GPU work",
        f"a round takes {wall_ms:.1f} ms, the GPU works {gpu_ms:.1f} ms of it ({parts}): the rest "
        'is the host, which launches, schedules and samples. "cuda graph: True" does not make a '
        "launch free: a graph of a whole model takes milliseconds to launch",
        "no kernel and no NCCL variable changes it: look at cudaGraphLaunch on the scheduler "
        "thread (/start_profile), CPU clock and governor, NUMA binding, and draft phases without "
        "a graph (the timer does not see those)",
    )
