"""Which forwards the server of a setup captures in CUDA graphs: its default, then what limits it.

A verify of B requests is B x (k + 1) tokens. SGLang's capture sizes count requests, vLLM's tokens.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from autotune.lint.setup import Setup

DECODE_LIMITS = ("--cuda-graph-max-bs", "--cuda-graph-max-bs-decode")
DECODE_SIZES = ("--cuda-graph-bs", "--cuda-graph-bs-decode")
_SWITCHES_OFF = ("--disable-cuda-graph", "--enforce-eager", "--disable-decode-cuda-graph")
#: SGLang's attention backends that switch graphs off
NO_GRAPH_BACKENDS = ("torch_native", "flex_attention")
#: vLLM's attention backends whose full graphs take one token a request
SINGLE_TOKEN_BACKENDS = ("CUTLASS_MLA", "FLASHINFER")

#: "partial": some kernels of every layer stay outside; or it depends on a version nobody named
How = Literal["full", "partial", "eager"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Graphs:
    """How each forward of a cycle runs, and the settings behind what is not captured."""

    decode: How
    draft: How
    verify: How
    extend: How
    reasons: tuple[str, ...] = ()

    @classmethod
    def all(cls, how: How, *reasons: str) -> "Graphs":
        """Every forward the same."""
        return cls(decode=how, draft=how, verify=how, extend=how, reasons=reasons)

    def text(self, speculative: bool) -> str:
        """ "verify and extend without CUDA graphs (--disable-cuda-graph)"; "" if all are full."""
        names = ("draft", "verify", "extend") if speculative else ("decode",)
        parts = []
        for how, words in (("eager", "without CUDA graphs"), ("partial", "partly in CUDA graphs")):
            found = [name for name in names if getattr(self, name) == how]
            if found:
                listed = ", ".join(found[:-1]) + " and " + found[-1] if found[:-1] else found[0]
                parts.append(f"{listed} {words}")
        why = f" ({'; '.join(self.reasons)})" if self.reasons and parts else ""
        return "; ".join(parts) + why


def graphs_of(setup: "Setup") -> Graphs:
    """What this setup captures. A GPU is assumed unless the machine or the command says CPU."""
    machine = setup.machine
    if machine is not None and machine.gpu is None:
        return Graphs.all("eager")
    if setup.command.text("device", "--device") == "cpu":
        return Graphs.all("eager", "device cpu")
    by_engine: Mapping[str, Callable[[Setup], Graphs]] = {
        "engine": _engine,
        "sglang": _sglang,
        "vllm": _vllm,
    }
    found = by_engine[setup.engine](setup)
    return _as_logged(setup, found)


def graphs_off(setup: "Setup") -> list[str]:
    """Settings that turn graphs of decoding off as a whole, as written."""
    command = setup.command
    off = [
        option.text
        for option in command.options
        if (option.name in _SWITCHES_OFF and command.has(option.name))
        or (option.name == "--cuda-graph-backend-decode" and option.values == ("disabled",))
    ]
    decode = command.config("--cuda-graph-config").get("decode")
    if isinstance(decode, Mapping) and decode.get("backend") == "disabled":
        off.append("--cuda-graph-config decode.backend disabled")
    mode = cudagraph_mode(setup)
    if mode in ("NONE", "0"):
        off.append(f"cudagraph_mode {mode}")
    return off


def cudagraph_mode(setup: "Setup") -> str:
    """vLLM's ``cudagraph_mode`` as given, in capitals; "" where it is left to the server."""
    return str(setup.command.config("--compilation-config").get("cudagraph_mode", "")).upper()


def vllm_backend(setup: "Setup") -> str | None:
    """vLLM's attention backend where it is named."""
    command = setup.command
    named = (
        command.text("--attention-backend")
        or command.config("--attention-config").get("backend")
        or setup.env.get("VLLM_ATTENTION_BACKEND")
    )
    return None if named is None else str(named).upper()


def largest_sglang(setup: "Setup") -> int | None:
    """Requests of the largest captured batch, where the command says it."""
    sizes = setup.command.numbers(*DECODE_SIZES)
    return max(sizes) if sizes else setup.command.number(*DECODE_LIMITS)


def largest_vllm(setup: "Setup") -> int | None:
    """Tokens of the largest captured batch, where the command says it."""
    command, config = setup.command, setup.command.config("--compilation-config")
    sizes = [size for size in config.get("cudagraph_capture_sizes") or () if isinstance(size, int)]
    sizes += command.numbers("--cudagraph-capture-sizes", "--cuda-graph-sizes")
    if sizes:
        return max(sizes)
    limit = command.number("--max-cudagraph-capture-size")
    given = config.get("max_cudagraph_capture_size") if limit is None else limit
    return given if isinstance(given, int) else None


def default_vllm(setup: "Setup", requests: int) -> int:
    """Tokens of the largest captured batch by default; ``requests``: max_num_seqs or the load."""
    width = setup.verify_tokens
    if setup.before("0.33") is False:
        most = 1024 if setup.cc is not None and 100 <= setup.cc < 120 else 512
        return min(2 * requests * width, most)
    # the default of 0.16 counts tokens as if they were requests
    return min(2 * requests, 512)


def _engine(setup: "Setup") -> Graphs:
    """Our engine captures what its configuration says, and nothing by default."""

    def how(name: str) -> How:
        text = (setup.command.text(f"cuda_graph.{name}") or "false").lower()
        return "full" if text in ("true", "1", "yes", "on") else "eager"

    found = Graphs(
        decode=how("decode"), draft=how("draft"), verify=how("verify"), extend=how("extend")
    )
    parts = ("draft", "verify", "extend") if setup.speculation is not None else ("decode",)
    names = [f"cuda_graph.{name}" for name in parts if getattr(found, name) == "eager"]
    given = [name for name in names if setup.command.option(name) is not None]
    reasons = [f"{name} false" for name in given]
    if len(given) < len(names):
        unset = ", ".join(name for name in names if name not in given)
        reasons.append(f"{unset} not set: off by default")
    return replace(found, reasons=tuple(reasons))


def _sglang(setup: "Setup") -> Graphs:
    command, off = setup.command, graphs_off(setup)
    backend = command.text("--attention-backend") or command.text("--decode-attention-backend")
    if backend in NO_GRAPH_BACKENDS:
        off.append(f"attention backend {backend}")
    if off:
        return Graphs.all("eager", *off)
    largest, load = largest_sglang(setup), setup.concurrency or 1
    if largest is not None and load > largest:
        return Graphs.all("eager", f"{load} requests, captured up to {largest}")
    if command.text("--cuda-graph-backend-decode") == "breakable":
        return Graphs.all("partial", "--cuda-graph-backend-decode breakable")
    switch = "SGLANG_DISABLE_DRAFT_EXTEND_CUDA_GRAPH"
    if setup.env.get(switch, "").lower() in ("1", "true"):
        return replace(Graphs.all("full", switch), extend="eager")
    return Graphs.all("full")


def _vllm(setup: "Setup") -> Graphs:
    off = graphs_off(setup)
    if off:
        return Graphs.all("eager", *off)
    load, width = setup.concurrency or 1, setup.verify_tokens
    largest = largest_vllm(setup)
    if largest is None:
        largest = default_vllm(setup, setup.server_limit or max(load, 128))
    if load * width > largest:
        reason = f"{load * width} tokens a forward, captured up to {largest}"
        # a plain step of the same load is narrower
        plain: How = "full" if load <= largest else "eager"
        return replace(Graphs.all("eager", reason), decode=plain)
    mode = cudagraph_mode(setup)
    if mode in ("PIECEWISE", "1"):
        return Graphs.all("partial", f"cudagraph_mode {mode}")
    backend = vllm_backend(setup)
    if backend == "TRITON_MLA" and setup.before("0.33") is not False:
        return Graphs.all("partial", f"attention backend {backend} before 0.33")
    if backend in SINGLE_TOKEN_BACKENDS and setup.speculation is not None:
        return replace(Graphs.all("full", f"attention backend {backend}"), verify="partial")
    return Graphs.all("full")


def _as_logged(setup: "Setup", found: Graphs) -> Graphs:
    """What the decode lines of a log say of the target's forward beats what options promise."""
    log = setup.log
    said = [] if log is None else [d.cuda_graph for d in log.steady() if d.cuda_graph is not None]
    if not said or 2 * sum(said) >= len(said):
        return found
    plain = setup.speculation is None
    if (found.decode if plain else found.verify) == "eager":
        return found
    reasons = (*found.reasons, '"cuda graph: False" in the log')
    if plain:
        return replace(found, decode="eager", reasons=reasons)
    return replace(found, verify="eager", reasons=reasons)
