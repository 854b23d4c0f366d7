"""Facts in a server's log or a benchmark's output: arguments in force, acceptance, graphs, power.

Line forms of sglang 0.5.9 to 0.5.23 and vllm 0.16 to 0.33 (recordings in the tests), nvidia-smi's
table and csv, and the summaries of both servers' benchmark tools.
"""

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.errors import UserError
from autotune.foreign.sglang_decode import read_decode_line
from autotune.lint.log_signatures import MAY_MATCH, SIGNATURES

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_SPEC = re.compile(
    r"SpecDecoding metrics: .*?Mean acceptance length: ([\d.]+)"
    r"(?:.*?Per-position acceptance rate: ([\d., ]+))?"
)
_VLLM_VERSION = re.compile(r"(?:LLM engine \(v|[█▄▀] +version )(\d+\.\d+\.\d+\S*?)[)\s]")
_SGLANG_VERSION = re.compile(r"sglang[ =_-]+v?(\d+\.\d+\.\d+(?:\.post\d+)?)", re.IGNORECASE)
_VLLM_ARGS = re.compile(r"non-default args: (\{.*\})")
#: a printed object without a literal form: Name(...) or <Name.X: 1>
_OBJECT = re.compile(r"\b[A-Za-z_]\w*\([^()]*\)|<[A-Z]\w*[^<>]*>")
_SGLANG_ARGS = re.compile(r"server_args=ServerArgs\((.*)\)")
_PIECEWISE = re.compile(
    r"CUDAGraphMode\.\w+ is not supported with spec-decode for attention backend (\w+)|"
    r"setting cudagraph_mode=(PIECEWISE|NONE)"
)
_BACKENDS = re.compile(r"Using \[([^\]]*)\] all-reduce backends")
_PERCENT = re.compile(r"(\d{1,3}(?:\.\d+)?) ?%")
_WATTS = re.compile(r"(\d{1,4}(?:\.\d+)?) ?W\b")
_BENCH = {
    "output_throughput": re.compile(r"Output token throughput \(tok/s\): +([\d.]+)"),
    "mean_tpot_ms": re.compile(r"Mean TPOT \(ms\): +([\d.]+)"),
    "mean_itl_ms": re.compile(r"Mean ITL \(ms\): +([\d.]+)"),
    "mean_ttft_ms": re.compile(r"Mean TTFT \(ms\): +([\d.]+)"),
    "concurrency": re.compile(r"(?<!Max request )Concurrency: +([\d.]+)"),
    "accept_length": re.compile(r"(?:Accept length|Acceptance length): +([\d.]+)"),
}
_COUNTER = re.compile(
    r"sglang:(forward_execution_seconds_total|spec_verify_calls_total)\{([^}]*)\} +([\d.e+-]+)$"
)
_MAX_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Decode:
    """One report of decoding: SGLang's decode line, or vLLM's metrics of an interval."""

    running: int | None
    accept_length: float | None
    #: cumulative acceptance per position, vLLM only
    positions: tuple[float, ...] = ()
    cuda_graph: bool | None = None
    tokens_per_s: float | None = None
    evidence: str


@dataclass(frozen=True, slots=True)
class Power:
    """One GPU at one moment; ``limit_w`` None where not printed."""

    utilisation: float
    draw_w: float
    limit_w: float | None
    evidence: str


@dataclass
class LogFacts:
    """What the files say; filled once by ``read_log``."""

    files: tuple[str, ...] = ()
    engine: str | None = None
    version: str | None = None
    #: arguments in force, names with underscores
    arguments: Mapping[str, Any] = field(default_factory=dict)
    decodes: list[Decode] = field(default_factory=list)
    #: (what, evidence) of lines that downgrade CUDA graphs
    downgrades: list[tuple[str, str]] = field(default_factory=list)
    #: which graphs were captured ("target", "draft", "draft_extend")
    captured: dict[str, str] = field(default_factory=dict)
    #: list printed by vLLM, in dispatch order, and where
    allreduce: tuple[tuple[str, ...], str] | None = None
    custom_refused: str | None = None
    power: list[Power] = field(default_factory=list)
    #: signature id -> (line, evidence)
    signatures: dict[str, tuple[str, str]] = field(default_factory=dict)
    bench: dict[str, float] = field(default_factory=dict)
    #: (counter, labels) of SGLang's /metrics -> its first and last value
    counters: dict[tuple[str, str], tuple[float, float]] = field(default_factory=dict)
    has_nccl: bool = False
    num_lines: int = 0

    @property
    def tells_nothing(self) -> bool:
        """Whether no line was one that is known."""
        known = (
            self.engine, self.version, self.arguments, self.decodes, self.downgrades, self.captured,
            self.allreduce, self.custom_refused, self.power, self.signatures, self.bench,
            self.counters, self.has_nccl,
        )  # fmt: skip
        return not any(known)

    def steady(self) -> list[Decode]:
        """Reports of decoding without the first, which holds warm-up and an unfilled interval."""
        return self.decodes[1:] if len(self.decodes) > 1 else self.decodes

    def counted(self, name: str, label: str = "") -> float | None:
        """How far a counter ran: between two scrapes, else since the server started.

        The most over the ranks that report it; ``label`` must be among its labels.
        """
        found = [
            last - first if last > first else last
            for (counter, labels), (first, last) in self.counters.items()
            if counter == name and label in labels
        ]
        return max(found, default=None)

    @property
    def accept_length(self) -> float | None:
        """Median accept length (bonus included) of the steady part; None where never printed."""
        found = sorted(d.accept_length for d in self.steady() if d.accept_length is not None)
        return found[len(found) // 2] if found else self.bench.get("accept_length")


def read_log(paths: Iterable[Path]) -> LogFacts:
    """Facts of the files together. Raises ``UserError`` for one that cannot be read."""
    facts = LogFacts(files=tuple(str(path) for path in paths))
    for path in facts.files:
        try:
            size = Path(path).stat().st_size
            with Path(path).open(encoding="utf-8", errors="replace") as file:
                # the interesting lines of a huge log are at its start and its end
                skip_from, skip_to = _MAX_BYTES // 2, size - _MAX_BYTES // 2
                for number, line in enumerate(_lines(file, skip_from, skip_to), 1):
                    _take(facts, line, f"{path}:{number}")
                    facts.num_lines += 1
        except OSError as problem:
            raise UserError(f"cannot read the log {path}: {problem.strerror}") from None
    return facts


def _lines(file: Any, skip_from: int, skip_to: int) -> Iterator[str]:
    position = 0
    for line in file:
        position += len(line)
        if position < skip_from or position > skip_to:
            yield line
        else:
            # numbers stay those of the file
            yield ""


def _take(facts: LogFacts, line: str, where: str) -> None:
    if not line.strip():
        return
    if "\x1b" in line:
        line = _ANSI.sub("", line)
    if "NCCL INFO" in line or "NCCL WARN" in line:
        facts.has_nccl = True
    if MAY_MATCH.search(line) is not None:
        for signature in SIGNATURES:
            if signature.id not in facts.signatures and signature.matches(line):
                facts.signatures[signature.id] = (line.strip()[:200], where)
    _take_start(facts, line, where)
    _take_decoding(facts, line, where)
    if "W" in line and "%" in line and "NCCL" not in line:
        _take_power(facts, line, where)
    if line.startswith("sglang:"):
        _take_counter(facts, line)
    if ":  " in line:
        for name, pattern in _BENCH.items():
            match = pattern.search(line)
            if match is not None:
                facts.bench[name] = float(match[1])


def _take_start(facts: LogFacts, line: str, where: str) -> None:
    if facts.version is None and ("sglang" in line or "version" in line or "engine (v" in line):
        for engine, pattern in (("vllm", _VLLM_VERSION), ("sglang", _SGLANG_VERSION)):
            match = pattern.search(line)
            if match is not None:
                facts.engine, facts.version = engine, match[1]
                break
    if "non-default args:" in line or "server_args=ServerArgs(" in line:
        facts.arguments = _arguments(line)
        facts.engine = "vllm" if "non-default" in line else "sglang"
    if "setting cudagraph_mode=" in line or "is not supported with spec-decode" in line:
        match = _PIECEWISE.search(line)
        if match is not None:
            facts.downgrades.append((match[1] or match[2], where))
    lowered = line.lower() if "aptur" in line else ""
    if "captur" in lowered and "cuda graph" in lowered:
        kind = "draft_extend" if "extend" in lowered else "target"
        if kind == "target" and ("draft " in lowered or "drafter" in lowered or "eagle" in lowered):
            kind = "draft"
        facts.captured.setdefault(kind, where)
    match = _BACKENDS.search(line) if "all-reduce backends" in line else None
    if match is not None and "tp:" in line:
        names = tuple(name.strip(" '\"") for name in match[1].split(",") if name.strip())
        facts.allreduce = names, where
    if "ustom" in line and "disabled because" in line and "PCIe-only" in line:
        facts.custom_refused = where


def _take_decoding(facts: LogFacts, line: str, where: str) -> None:
    found = read_decode_line(line)
    if found is not None:
        facts.decodes.append(
            Decode(
                running=found.running,
                accept_length=found.accept_length,
                cuda_graph=found.cuda_graph,
                tokens_per_s=found.tokens_per_s,
                evidence=where,
            )
        )
        return
    match = _SPEC.search(line) if "SpecDecoding" in line else None
    if match is not None:
        positions = tuple(float(word) for word in re.findall(r"\d+\.\d+", match[2] or ""))
        # vLLM's throughputs are means over an interval with its idle time: no step time in them
        facts.decodes.append(
            Decode(running=None, accept_length=float(match[1]), positions=positions, evidence=where)
        )


def _take_power(facts: LogFacts, line: str, where: str) -> None:
    """A line with utilisation and power: nvidia-smi's table or csv, or a sentence with both."""
    percents = [float(text) for text in _PERCENT.findall(line)]
    watts = [float(text) for text in _WATTS.findall(line)]
    if not percents or not watts or len(watts) > 2:
        return
    # in the table the fan comes first and the utilisation last; csv may add memory utilisation
    utilisation = percents[-1] if line.lstrip().startswith("|") else max(percents)
    limit = watts[1] if len(watts) == 2 else None
    if utilisation <= 100:
        facts.power.append(Power(utilisation, watts[0], limit, where))


def _take_counter(facts: LogFacts, line: str) -> None:
    """A sample of the Prometheus text that /metrics gives."""
    match = _COUNTER.match(line)
    if match is not None:
        key, value = (match[1], match[2]), float(match[3])
        facts.counters[key] = (facts.counters.get(key, (value, value))[0], value)


def _arguments(line: str) -> dict[str, Any]:
    """Arguments in force; empty where the line is cut."""
    match = _VLLM_ARGS.search(line)
    if match is not None:
        text = _OBJECT.sub("None", match[1])
        # objects hold objects: from the inside out
        while (plain := _OBJECT.sub("None", text)) != text:
            text = plain
        try:
            values = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            return {}
        return values if isinstance(values, dict) else {}
    match = _SGLANG_ARGS.search(line)
    found: dict[str, Any] = {}
    if match is not None:
        for key, text in re.findall(
            r"(\w+)=('[^']*'|\"[^\"]*\"|\[[^\]]*\]|-?[\d.]+|True|False|None)", match[1]
        ):
            try:
                found[key] = ast.literal_eval(text)
            except (ValueError, SyntaxError):
                continue
    return found
