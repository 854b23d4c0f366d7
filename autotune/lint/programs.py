"""Which word of a command line is a server's entry point."""

import re
from collections.abc import Sequence

from autotune.lint.containers import container_of

_PROGRAMS = {
    "sglang": re.compile(r"sglang\.launch_server$|(.*/)?launch_server(\.py)?$|(.*/)?sglang$"),
    "vllm": re.compile(r"(.*/)?vllm$|vllm\.entrypoints\."),
    "engine": re.compile(r"(.*/)?engine$"),
}
#: subcommands that start no server
_CLIENTS = frozenset({"bench", "chat", "complete", "collect-env", "run-batch"})
_SUBCOMMANDS = _CLIENTS | {"serve"}


def starts_server(engine: str, words: Sequence[str]) -> bool:
    """Whether a statement names the server's entry point, and no client of it."""
    index = program_index(engine, words)
    return index is not None and not _client_word(words, index)


def is_client(engine: str, words: Sequence[str]) -> bool:
    """Whether a statement runs a client or a benchmark of the server."""
    if any(re.match(rf"{engine}\.bench", word) for word in words):
        return True
    index = program_index(engine, words)
    return index is not None and _client_word(words, index)


def _client_word(words: Sequence[str], index: int) -> bool:
    return len(words) > index + 1 and words[index + 1] in _CLIENTS


def program_index(engine: str, words: Sequence[str]) -> int | None:
    """Index of the word after which the server's own words begin, None without one."""
    container = container_of(words)
    if container is not None:
        inside = program_index(engine, container.command)
        # an image whose entry point is the server takes its options alone
        return container.image_index if inside is None else container.image_index + 1 + inside
    pattern = _PROGRAMS[engine]
    for index, word in enumerate(words):
        if not pattern.match(word):
            continue
        before = words[index - 1] if index else ""
        # the value of another option (--name vllm), unless a subcommand says otherwise
        value = before.startswith("-") and "=" not in before and before != "-m"
        following = words[index + 1] if index + 1 < len(words) else ""
        if not value or following in _SUBCOMMANDS:
            return index
    return None
