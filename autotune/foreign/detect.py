"""Tells by its content what a file is, and reads it."""

import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from autotune.errors import UserError
from autotune.foreign import bench_json, metrics_text, sglang_log, vllm_log
from autotune.foreign.run import ForeignRun, with_article
from autotune.nccl_log_clean import unwrap, wrapped
from autotune.nccl_log_open import DAMAGED, opened

#: lines that decide; start-up of both servers prints its marks well before
_SNIFFED = 4000
#: a benchmark result with details of every request stays below this
_MAX_JSON_BYTES = 512 * 2**20

#: an object or a list of them; a log line in brackets begins with its date
_JSON = re.compile(r"\s*(\{|\[\s*[\[{\]])")

KNOWN = (
    "an SGLang or vLLM server log, /metrics text of either, sglang.bench_serving JSONL, "
    "vllm bench serve JSON, or a best-config YAML of autotune"
)


def read_foreign(path: Path, line: int | None = None) -> ForeignRun:
    """The run that a file shows; ``line`` picks one of a benchmark's JSONL.

    Raises ``UserError`` for a file that is missing, empty, of unknown format or without a run.
    """
    text = _start(path)
    label = str(path)
    if not text.strip():
        raise UserError(f"{path} is empty; give {KNOWN}")
    if _JSON.match(text) and not _is_wrapped_log(text):
        return _bench(path, line)
    if line is not None:
        raise UserError(f"{path}#{line}: a line can be picked from JSONL only")
    if _is_metrics(text):
        run = metrics_text.read_metrics(_lines(path), label)
        if not run.samples and not run.num_verifies:
            raise UserError(f"{path}: /metrics text without a finished request: nothing to compare")
        return run
    text = "".join(islice(_lines(path), _SNIFFED))
    modules = (sglang_log, vllm_log)
    sglang, vllm = (_score(text, module.MARKS) for module in modules)
    if sglang == vllm:
        sglang, vllm = (_score(text, module.NAMES) for module in modules)
    if sglang == 0 and vllm == 0:
        if "NCCL INFO " in text:
            raise UserError(f"{path} is NCCL's own log: `autotune env check {path}` reads it")
        raise UserError(f"{path} is of no known format; give {KNOWN}")
    if sglang > vllm:
        run = sglang_log.read_sglang_log(_lines(path), label)
    else:
        run = vllm_log.read_vllm_log(_lines(path), label)
    if not (run.samples or run.args or run.effective or run.failure):
        raise UserError(
            f"{path}: looks like {with_article(run.format)} but holds no settings and no speed"
        )
    return run


def _bench(path: Path, line: int | None) -> ForeignRun:
    if path.stat().st_size > _MAX_JSON_BYTES:
        raise UserError(f"{path} is above {_MAX_JSON_BYTES >> 20} MiB; save it without details")
    with opened(path) as file:
        objects = bench_json.parse_objects(file.read().decode("utf-8", "replace"))
    if objects is None:
        raise UserError(f"{path} begins like JSON but is none (half-written?); give {KNOWN}")
    results = [values for values in objects if bench_json.is_bench(values)]
    if not results:
        keys = ", ".join(sorted(objects[0])[:6]) if objects else "none"
        raise UserError(f"{path} is JSON of no known kind (keys: {keys}); give {KNOWN}")
    if line is not None:
        if not 1 <= line <= len(results):
            raise UserError(f"{path}#{line}: the file holds {len(results)} results")
        results = [results[line - 1]]
    try:
        run = bench_json.read_bench(results, str(path) if line is None else f"{path}#{line}")
    except ValueError as error:
        raise UserError(str(error)) from None
    if not run.samples:
        raise UserError(f"{path}: the benchmark finished no request: nothing to compare")
    return run


def _start(path: Path) -> str:
    try:
        return "".join(islice(_lines(path, clean=False), _SNIFFED))
    except IsADirectoryError:
        raise UserError(f"{path} is a folder; give a file") from None
    except OSError as error:
        raise UserError(f"{path} can't be read: {error.strerror}") from None


def _lines(path: Path, clean: bool = True) -> Iterator[str]:
    """Lines of a file, decompressed; ``clean``: out of what a collector of logs put around them."""
    try:
        with opened(path) as file:
            for line in file:
                if clean and wrapped(line):
                    line = unwrap(line.rstrip(b"\r\n"))[0] + b"\n"
                yield line.decode("utf-8", "replace").replace("\r\n", "\n")
    except DAMAGED:
        # a cut file: what came before the cut counts
        return


def _is_wrapped_log(text: str) -> bool:
    """Whether the lines are JSON objects around a server's own lines."""
    lines = text.splitlines()[:20]
    inner = [unwrap(line.encode())[0].decode() for line in lines if line.startswith("{")]
    return bool(inner) and all(not line.startswith("{") for line in inner)


def _is_metrics(text: str) -> bool:
    return any(
        part.startswith(("vllm:", "sglang:"))
        or part.startswith(("# HELP vllm:", "# TYPE vllm:", "# HELP sglang:", "# TYPE sglang:"))
        for part in text.splitlines()
    )


def _score(text: str, marks: tuple[str, ...]) -> int:
    return sum(text.count(mark) for mark in marks)
