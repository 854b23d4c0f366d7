"""vLLM's server log: resolved configuration, graphs, all-reduce, throughput, acceptance.

Formats: servers reference B.2-B.4, the recordings of 0.26.0 and 0.32.0, public logs of the V0
engine. The throughput of a log line covers an interval of wall time (10 s by default) with its
prefills and idle time.
"""

import ast
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from autotune.foreign.literals import balanced, keyword_values
from autotune.foreign.run import ForeignRun, Sample
from autotune.foreign.servers import vllm_knobs

MARKS = (
    "non-default args:",
    "Initializing a V1 LLM engine",
    "Avg generation throughput",
    "SpecDecoding metrics",
    "EngineCore",
    "[api_server.py",
)
#: decides only where no mark is there: containers and folders bear it too
NAMES = ("vLLM", "vllm")

_VERSION = re.compile(
    r"(?:\bLLM engine \(v|vLLM (?:API server )?version |█  version )([0-9][^\s)]*)"
)
_RATE = re.compile(
    r"Avg prompt throughput: ([\d.]+) tokens/s, Avg generation throughput: ([\d.]+) tokens/s, "
    r"Running: (\d+) reqs, (?:Waiting|Swapped): (\d+)"
)
_SPEC = re.compile(
    r"Mean acceptance length: ([\d.]+).*?Accepted: (\d+) tokens, Drafted: (\d+) tokens"
    r"(?:, Per-position acceptance rate: ([\d., ]+?), Avg)?"
)
#: of the V0 engine, since the start: drafts a step, drafts, tokens emitted
_SPEC_V0 = re.compile(
    r"Speculative metrics: .*Number of speculative tokens: (\d+), .*Number of draft tokens: (\d+), "
    r"Number of emitted tokens: (\d+)"
)
_MODE = re.compile(r"cudagraph_mode['\"]?\s*[=:]\s*(?:<?CUDAGraphMode\.)?([A-Za-z_]+)")
_ALLREDUCE = re.compile(r"Using (\[[^\]]*\]) all-reduce backends .*? for group 'tp:")
_ATTENTION = re.compile(r"Using (\S+) attention backend")
_MOE = re.compile(r"Using (.+?) MoE backend out of")
#: a variable with its value, unless the line advises to set it
_ENVIRONMENT = re.compile(
    r"(?<!set )(?<!Use )(?<!use )(?<!setting )(?<!with )"
    r"\b((?:NCCL|CUDA|TORCH|VLLM)_[A-Z0-9_]+)=['\"]?([^\s'\",;]+)"
)
_CAPTURED = re.compile(r"\bFULL=(\d+)|Capturing CUDA graphs \([^)]*\bFULL\)")
_NCCL = re.compile(r"using nccl==([\d.]+)|NCCL version ([\d.]+)")
_DIED = re.compile(
    r"(EngineDeadError.*|EngineCore encountered a fatal error.*|"
    r"(?:\w+\.)*(?:OutOfMemoryError|AssertionError|ValidationError|RuntimeError|ValueError)\b.*)"
)
_IRRELEVANT = frozenset(
    {"host", "port", "api_key", "served_model_name", "model_tag", "uvicorn_log_level"}
)


def read_vllm_log(lines: Iterable[str], path: str) -> ForeignRun:
    """Everything of interest in a log, whole or cut off anywhere."""
    reader = _Reader()
    count = 0
    for line in lines:
        count += 1
        reader.feed(line)
    return reader.result(path, count)


class _Reader:
    def __init__(self) -> None:
        self.given: dict[str, Any] = {}
        self.config: dict[str, Any] = {}
        self.effective: dict[str, str] = {}
        self.environment: dict[str, str] = {}
        self.samples: list[Sample] = []
        self.version: str | None = None
        self.nccl: str | None = None
        self.failure: str | None = None
        self.graph_mode: str | None = None
        self._accepted: list[float] = []
        self._verifies = 0.0
        self._idle = 0
        #: full CUDA graphs were captured
        self._full: bool | None = None
        self._stopping = False

    def feed(self, line: str) -> None:
        if self.version is None and (match := _VERSION.search(line)):
            self.version = match[1]
        if "non-default args:" in line and not self.given:
            self.given = _dictionary(line[line.index("non-default args:") + 17 :])
        elif "LLM engine (v" in line and " with config: " in line and not self.config:
            self.config = keyword_values(line.split(" with config: ", 1)[1])
            self._mode(line)
        # what is no number is a damaged line
        elif match := _RATE.search(line):
            with suppress(ValueError):
                self._rate(match)
        elif match := _SPEC.search(line):
            with suppress(ValueError):
                self._spec(match)
        elif match := _SPEC_V0.search(line):
            with suppress(ValueError):
                self._spec_v0(match)
        else:
            self._other(line)

    def _rate(self, match: re.Match[str]) -> None:
        speed, running = float(match[2]), int(match[3])
        if speed <= 0:
            self._idle += 1
            return
        self.samples.append(Sample(running=running or None, tokens_per_s=speed))

    def _spec(self, match: re.Match[str]) -> None:
        length, drafted = float(match[1]), float(match[3])
        rates = [float(part) for part in (match[4] or "").split(",") if part.strip()]
        if rates:
            verifies = drafted / len(rates)
            self._verifies += verifies
            self._accepted += [0.0] * (len(rates) - len(self._accepted))
            for depth, rate in enumerate(rates):
                self._accepted[depth] += rate * verifies
        if self.samples and self.samples[-1].accept_length is None:
            last = self.samples.pop()
            self.samples.append(
                Sample(running=last.running, tokens_per_s=last.tokens_per_s, accept_length=length)
            )

    def _spec_v0(self, match: re.Match[str]) -> None:
        steps, drafted, emitted = (float(match[i]) for i in (1, 2, 3))
        if steps > 0 and drafted > 0 and self.samples:
            verifies = drafted / steps
            last = self.samples.pop()
            self.samples.append(replace(last, accept_length=emitted / verifies))

    def _mode(self, line: str) -> None:
        if match := _MODE.search(line):
            self.graph_mode = match[1].upper()

    def _other(self, line: str) -> None:
        if "cudagraph_mode" in line:
            self._mode(line)
            if "not supported" in line:
                self.effective["CUDA graph mode lowered"] = line.rsplit("] ", 1)[-1].strip()
        if match := _ALLREDUCE.search(line):
            self.effective["all-reduce backends"] = match[1]
        elif match := _ATTENTION.search(line):
            self.effective.setdefault("attention backend", match[1])
        elif match := _MOE.search(line):
            self.effective.setdefault("MoE backend", match[1])
        elif "Asynchronous scheduling is" in line:
            self.effective["async scheduling"] = "enabled" if "is enabled" in line else "disabled"
        elif "Custom allreduce is disabled" in line:
            reason = line.split("Custom allreduce is disabled because", 1)[-1]
            self.effective["custom all-reduce"] = "disabled: " + reason.split(". ")[0].strip()
        elif "Model Runner V2" in line:
            self.effective["model runner"] = "V1" if "using the V1" in line else "V2"
        if match := _CAPTURED.search(line):
            self._full = match[1] != "0"
        self._stopping = self._stopping or "[shutdown]" in line
        if match := _NCCL.search(line):
            self.nccl = match[1] or match[2]
        for name, value in _ENVIRONMENT.findall(line):
            self.environment.setdefault(name, value.rstrip("."))
        # what breaks while a server is told to stop is no failure of the run
        started = line.startswith(("pydantic", "ValueError", "RuntimeError"))
        if self.failure is None and not self._stopping and ("ERROR" in line or started):
            match = _DIED.search(line)
            self.failure = None if match is None else match[1].strip()[:300]

    def result(self, path: str, count: int) -> ForeignRun:
        args = self._arguments()
        lengths = [s.accept_length for s in self.samples if s.accept_length is not None]
        accept = None
        if self._verifies > 0:
            accept = 1.0 + sum(self._accepted) / self._verifies
        elif lengths:
            accept = sum(lengths) / len(lengths)
        notes = []
        if self.samples:
            notes.append("the log's throughput is over wall time: prefill and idle time are in it")
        packages = {} if self.version is None else {"vllm": self.version}
        if self.nccl is not None:
            packages["nccl"] = self.nccl
        return ForeignRun(
            path=path,
            format="vLLM server log",
            version=self.version,
            model=_text(args.get("model")),
            draft=_draft(args),
            args={k: v for k, v in args.items() if k not in _IRRELEVANT | {"full_graphs"}},
            knobs=vllm_knobs(args),
            effective=self.effective,
            environment=self.environment,
            packages=packages,
            samples=tuple(self.samples),
            definition="server interval with gaps" if self.samples else None,
            accepted_by_depth=tuple(self._accepted),
            num_verifies=self._verifies or None,
            accept_length=accept,
            failure=self.failure,
            notes=tuple(notes),
            num_lines=count,
        )

    def _arguments(self) -> dict[str, Any]:
        """Resolved configuration under what the user gave; speculation as a mapping or None."""
        args = {**self.config, **self.given}
        spec = args.get("speculative_config")
        if isinstance(spec, str) and "(" in spec:
            args["speculative_config"] = keyword_values(balanced(spec, spec.index("("))[0])
        elif spec is None and not self.config and self.given:
            # only what differs from the defaults is listed: no speculation was asked for
            args["speculative_config"] = None
        if self.given and "tensor_parallel_size" not in args:
            args["tensor_parallel_size"] = 1
        if self.graph_mode is not None:
            args["cudagraph_mode"] = self.graph_mode
            args["full_graphs"] = "FULL" in self.graph_mode
        elif self._full is not None:
            args["full_graphs"] = self._full
        return args


def _dictionary(text: str) -> dict[str, Any]:
    start = text.find("{")
    if start < 0:
        return {}
    body, complete = balanced(text, start)
    if not complete:
        return {}
    try:
        value = ast.literal_eval("{" + body + "}")
    except (ValueError, SyntaxError):
        return {}
    return value if isinstance(value, dict) else {}


def _draft(args: Mapping[str, Any]) -> str | None:
    spec = args.get("speculative_config")
    return _text(spec.get("model")) if isinstance(spec, Mapping) else None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
