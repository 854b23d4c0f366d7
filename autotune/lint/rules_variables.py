"""Names of NCCL's variables: misspelt ones, and those of another release."""

import json
import re
from collections.abc import Iterator
from difflib import get_close_matches
from functools import cache
from pathlib import Path

from autotune.lint.findings import Hit, rule, warning
from autotune.lint.flags import NameTable
from autotune.lint.setup import Setup
from autotune.lint.versions import parse_version

#: read by torch or by a plugin that NVIDIA ships, not by NCCL itself
_OTHERS = frozenset(
    {
        "NCCL_BLOCKING_WAIT", "NCCL_ASYNC_ERROR_HANDLING", "NCCL_DESYNC_DEBUG",
        "NCCL_TUNER_CONFIG_FILE", "NCCL_ROOT", "NCCL_HOME", "NCCL_INCLUDE_DIR", "NCCL_LIB_DIR",
        "NCCL_VERSION", "NCCL_USE_CUDA_GRAPH", "NCCL_ENABLE_TIMING", "NCCL_TRACE_BUFFER_SIZE",
    }
)  # fmt: skip
#: other words for a variable that people write
_WORDS = {"ALGORITHM": "ALGO", "PROTOCOL": "PROTO", "CHANNELS": "NCHANNELS", "THREADS": "NTHREADS",
          "BUFFER": "BUFF", "LOGLEVEL": "DEBUG", "LOG": "DEBUG"}  # fmt: skip
_SOURCES = "NVIDIA/nccl sources 2.18 to 2.30, every name read from the environment"


@cache
def nccl_names() -> NameTable:
    """Names that NCCL reads, by release."""
    path = Path(__file__).parent / "data" / "nccl_variables.json"
    values = json.loads(path.read_text(encoding="utf-8"))
    names = {name: (first, last) for name, (first, last) in values["names"].items()}
    return NameTable(tuple(values["versions"]), names)


@rule("env-misspelt", _SOURCES)
def misspelt_variable(setup: Setup) -> Iterator[Hit]:
    """A name close to a variable that exists: nobody ever reads it."""
    for name, value in setup.env.items():
        if not name.startswith("NCCL") or name in nccl_names().names or name in _OTHERS:
            continue
        near = _nearest(name)
        if near is not None:
            yield warning(
                f"{name}={value}",
                f"no NCCL release reads {name}: it is ignored without a word",
                f"did you mean {near}?",
            )


def _nearest(name: str) -> str | None:
    """The variable meant: same words in another order, another word for one, a letter off."""
    known = nccl_names().names
    words = name.upper().removeprefix("NCCL").strip("_").split("_")
    meant = [_WORDS.get(word, word) for word in words]
    for candidate in ("NCCL_" + "_".join(meant), "NCCL_" + "".join(meant)):
        if candidate in known:
            return candidate
    for candidate in known:
        if sorted(candidate.split("_")[1:]) == sorted(meant):
            return candidate
    digits = re.sub(r"\D", "", name)
    close = get_close_matches(name, known, n=3, cutoff=0.8)
    # LL and LL128, IPv4 and IPv6: a digit is no spelling mistake
    return next((other for other in close if re.sub(r"\D", "", other) == digits), None)


@rule("env-nccl-version", _SOURCES)
def variable_of_another_release(setup: Setup) -> Iterator[Hit]:
    """A variable that this NCCL does not read yet, or no longer."""
    if setup.nccl_version is None:
        return
    table, version = nccl_names(), parse_version(setup.nccl_version)
    window = table.window(version)
    if window is None:
        return
    for name, value in setup.env.items():
        if name not in table.names or table.knows(name, version):
            continue
        first, last = table.names[name]
        later = window[1] < first
        seen = f"first in {table.versions[first]}" if later else f"last in {table.versions[last]}"
        yield warning(
            f"{name}={value}",
            f"NCCL {setup.nccl_version} does not read it ({seen}): it is ignored without a word",
            f"a server with NCCL {table.versions[first]} or newer" if later else "drop it",
        )
