"""CUDA graphs: does the verify batch fit what is captured, and does the backend allow it?

A verify of B requests is B x (k + 1) tokens. SGLang's capture sizes count requests, vLLM's tokens.
"""

from collections.abc import Iterator

from autotune.lint.findings import Hit, error, info, rule, warning
from autotune.lint.graphs import (
    DECODE_LIMITS,
    DECODE_SIZES,
    SINGLE_TOKEN_BACKENDS,
    cudagraph_mode,
    graphs_off,
    largest_vllm,
    vllm_backend,
)
from autotune.lint.setup import Setup


@rule("graph-off", "sgl-project/sglang PR 4247 (276 against 379 tok/s); speculation.md 1.5")
def graphs_turned_off(setup: Setup) -> Iterator[Hit]:
    """No graphs at all: hundreds of launches per forward are paid by the host."""
    command = setup.command
    if command.text("device", "--device") == "cpu":
        # nothing can be captured there
        return
    subjects = graphs_off(setup)
    verify = command.option("cuda_graph.verify")
    if verify is not None and not command.has("cuda_graph.verify"):
        subjects.append(verify.text)
    spec = setup.speculation is not None
    forwards = "verify and draft" if spec else "decode"
    moot = _graph_options(setup)
    useless = f"; {', '.join(moot)} then {'says' if len(moot) == 1 else 'say'} nothing"
    for subject in subjects:
        yield warning(
            subject,
            f"every {forwards} forward is launched kernel by kernel: "
            "the step is bound by the host (measured: the same step of 61 layers takes 18 or 29 ms "
            f"from run to run, 8 ms in a graph){', and speculation adds launches' if spec else ''}"
            f"{useless if moot else ''}",
            "leave CUDA graphs on",
        )


def _graph_options(setup: Setup) -> list[str]:
    """Options that choose sizes or modes of graphs, as written."""
    config = setup.command.config("--compilation-config")
    mode = cudagraph_mode(setup) or "NONE"
    found = [
        option.text
        for option in setup.command.options
        if option.name
        in (*DECODE_LIMITS, *DECODE_SIZES, "--cudagraph-capture-sizes",
            "--max-cudagraph-capture-size")
    ]  # fmt: skip
    if mode not in ("NONE", "0"):
        found.append(f"cudagraph_mode {mode}")
    return found + [
        key for key in ("cudagraph_capture_sizes", "max_cudagraph_capture_size") if key in config
    ]


@rule(
    "graph-piecewise",
    "local-inference-lab/rtx6kpro kimi-k26 notes, vllm-project/vllm#40608",
    "vllm",
)
def attention_outside_the_graph(setup: Setup) -> Iterator[Hit]:
    """PIECEWISE leaves the attention of every layer eager: slow verify that grows with context."""
    mode = cudagraph_mode(setup)
    if mode in ("PIECEWISE", "1") and setup.speculation is not None:
        yield warning(
            "cudagraph_mode PIECEWISE",
            f"a verify of {setup.verify_tokens} tokens runs the attention of every layer outside "
            "the graph: step time grows with context (85 ms at 30k tokens, 20 ms in a full graph, "
            "8 RTX PRO 6000)",
            "cudagraph_mode FULL_AND_PIECEWISE (the default), with a backend that supports it",
        )


@rule("graph-verify-not-covered", "SafeAILab/EAGLE#298", "sglang")
def batch_above_sglang_graphs(setup: Setup) -> Iterator[Hit]:
    """Batches of more requests than the largest captured one run eager."""
    command = setup.command
    limit = command.number(*DECODE_LIMITS)
    sizes = command.numbers(*DECODE_SIZES)
    largest = max(sizes) if sizes else limit
    wanted = setup.concurrency
    if largest is None:
        return
    option = command.option(*DECODE_SIZES) if sizes else command.option(*DECODE_LIMITS)
    assert option is not None
    width = setup.verify_tokens
    if wanted is not None and wanted > largest:
        tokens = f" ({wanted * width} verify tokens)" if setup.speculation else ""
        yield warning(
            option.text,
            f"graphs are captured up to {largest} requests and {wanted} may run together{tokens}: "
            f"batches above {largest} leave the CUDA graph and run eager",
            f"raise it to {wanted}, or --max-running-requests {largest}",
        )
    exact = command.has("--disable-cuda-graph-padding")
    if exact and sizes and wanted is not None:
        missing = sorted(set(range(1, wanted + 1)) - set(sizes))
        if missing:
            yield warning(
                option.text,
                f"without padding only these exact batch sizes use a graph; {len(missing)} sizes "
                f"up to {wanted} run eager ({missing[0]}, ...)",
                "drop --disable-cuda-graph-padding",
            )


@rule("graph-tokens-not-requests", "vllm-project/vllm#27325, #50488", "vllm")
def batch_above_vllm_graphs(setup: Setup) -> Iterator[Hit]:
    """vLLM's sizes are tokens: a verify batch needs max_num_seqs x (1 + k)."""
    spec = setup.speculation
    if spec is None or spec.draft_tokens is None:
        return
    width = spec.draft_tokens
    command, config = setup.command, setup.command.config("--compilation-config")
    sizes = [size for size in config.get("cudagraph_capture_sizes", ()) if isinstance(size, int)]
    sizes += command.numbers("--cudagraph-capture-sizes", "--cuda-graph-sizes")
    largest = largest_vllm(setup)
    wanted = setup.concurrency
    if isinstance(largest, int):
        usable = largest // width
        if wanted is not None and wanted * width > largest:
            yield warning(
                f"capture size {largest}",
                f"capture sizes are tokens, not requests: {wanted} requests x {width} verify "
                f"tokens = {wanted * width} > {largest}, so batches above {usable} run eager",
                f"at least {wanted * width} = max_num_seqs x (1 + num_speculative_tokens)",
            )
        elif wanted is None and usable < 8:
            yield info(
                f"capture size {largest}",
                f"tokens, not requests: with {width} verify tokens it covers {usable} requests",
                "",
            )
        rest = sorted(size for size in sizes if size % width)
        if rest:
            yield info(
                f"capture sizes {', '.join(map(str, rest))}",
                f"no multiples of 1 + k = {width}: vLLM rounds them up and drops what exceeds the "
                "largest",
                f"use multiples of {width}",
            )
    elif setup.before("0.33") is not False and wanted is not None:
        # the default of 0.16 counts tokens as if they were requests
        default = min(2 * wanted, 512)
        if wanted * width > default:
            known = setup.before("0.17") is True
            yield (warning if known else info)(
                "default capture sizes",
                f"up to min(2 x max_num_seqs, 512) = {default} tokens in 0.16 and versions before "
                f"the fix: a verify of {wanted} requests is {wanted} x {width} = {wanted * width} "
                "tokens and runs eager",
                f"--max-cudagraph-capture-size {wanted * width}",
            )


@rule("graph-batch-above-limit", "servers.md B.2: the default stops at 512 tokens", "vllm")
def batch_above_default(setup: Setup) -> Iterator[Hit]:
    """Even the corrected default has an end."""
    spec, wanted = setup.speculation, setup.concurrency
    command, config = setup.command, setup.command.config("--compilation-config")
    named = command.option("--max-cudagraph-capture-size", "--cudagraph-capture-sizes")
    if spec is None or spec.draft_tokens is None or wanted is None or named is not None:
        return
    if "cudagraph_capture_sizes" in config or "max_cudagraph_capture_size" in config:
        return
    limit = 1024 if setup.cc is not None and 100 <= setup.cc < 120 else 512
    if setup.before("0.33") is False and wanted * spec.draft_tokens > limit:
        yield warning(
            "default capture sizes",
            f"they end at {limit} tokens; {wanted} requests x {spec.draft_tokens} = "
            f"{wanted * spec.draft_tokens} verify tokens run eager",
            f"--max-cudagraph-capture-size {wanted * spec.draft_tokens}",
        )


@rule("graph-backend-support", "vllm-project/vllm#42885, #40608; servers.md B.2", "vllm")
def backend_declines_verify(setup: Setup) -> Iterator[Hit]:
    """A full graph needs an attention backend that takes uniform batches of 1 + k tokens."""
    backend = vllm_backend(setup)
    by_default = ""
    # the backends for latent attention before it in vLLM's list are built for sm_90 and sm_100
    if backend is None and setup.mla and setup.cc is not None and not 90 <= setup.cc < 120:
        backend, by_default = "TRITON_MLA", f" (the default for latent attention on sm_{setup.cc})"
    verify = f"the verify of {setup.verify_tokens} tokens"
    what = verify if setup.speculation is not None else "decoding"
    if backend == "TRITON_MLA" and setup.before("0.33") is not False:
        known = setup.before("0.17") is True
        yield (error if known else warning)(
            f"attention backend {backend}{by_default}",
            f"up to 0.16 it declares no full-graph support (from 0.33 on it does), so {what} drops "
            "to PIECEWISE: attention of all layers eager (8 RTX PRO 6000: a verify of 85 ms at "
            "30k context against 20 ms; 8 A100 without speculation: 378 against 431 tok/s)",
            "vLLM 0.33 or newer, or another attention backend; before any NCCL variable",
        )
    elif backend in SINGLE_TOKEN_BACKENDS and setup.speculation is not None:
        yield warning(
            f"attention backend {backend}",
            f"its full graphs take one token per request (unless trtllm-gen serves it); {verify} "
            "drops to PIECEWISE",
            'look for "setting cudagraph_mode=PIECEWISE" in the log; try another backend',
        )


@rule("graph-many-tokens", "SafeAILab/EAGLE#298; speculation.md 1.5")
def verify_is_compute_bound(setup: Setup) -> Iterator[Hit]:
    """Verify tokens of a full batch beyond the GPU's balance point: each one costs compute."""
    spec, wanted = setup.speculation, setup.concurrency
    if spec is None or spec.draft_tokens is None or setup.load is None or wanted is None:
        return
    tokens = wanted * spec.draft_tokens
    gpu = None if setup.machine is None else setup.machine.gpu
    # flops per byte at which reading 2-byte weights takes as long as 2 flops per token and weight
    balance = 256.0 if gpu is None else gpu.bf16_tflops * 1e3 / gpu.dram_gb_per_s
    if tokens > balance and spec.draft_tokens >= 8:
        yield warning(
            f"{spec.draft_tokens} draft tokens x {wanted} requests",
            f"{tokens} tokens a forward are above about {balance:.0f}, where dense layers turn "
            "from memory to compute bound: the verify then costs nearly as much per draft as "
            "decoding",
            f"fewer draft tokens at this load (at most {max(int(balance // wanted), 2)})",
        )
