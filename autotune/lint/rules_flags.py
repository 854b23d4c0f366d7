"""Options and variables that the server does not take as written."""

from collections import Counter
from collections.abc import Iterator
from difflib import get_close_matches

from autotune.lint.findings import Hit, error, info, rule, warning
from autotune.lint.flags import SGLANG_DEPRECATED, Resolved, name_table
from autotune.lint.setup import Setup

_WHEELS = "option tables of the wheels: sglang 0.4.6.post5 to 0.5.23, vllm 0.16 and 0.33"
_NAMES = {"sglang": "SGLang", "vllm": "vLLM"}
#: keys that a recorded server refused: key -> its version
_KEYS_GONE = {"speculative_token_tree": "0.32"}
_REPEATABLE = frozenset({"--lora-paths", "--middleware", "--allowed-origins", "-e"})


def _shown(setup: Setup) -> str:
    return "(any version)" if setup.version is None else ".".join(map(str, setup.version))


def _odd(setup: Setup, *statuses: str) -> Iterator[Resolved]:
    return (item for item in setup.command.odd if item.status in statuses)


@rule("flag-removed", _WHEELS, "sglang", "vllm")
def removed_option(setup: Setup) -> Iterator[Hit]:
    """argparse stops at an option that is gone; as a prefix of several it is "ambiguous"."""
    for item in _odd(setup, "removed"):
        more = ""
        if len(item.others) > 1:
            more = f"; argparse calls it ambiguous ({', '.join(item.others)})"
        fix = f"write {' or '.join(item.others)}" if item.others else "drop it"
        yield error(
            item.name,
            f"{_NAMES[setup.engine]} {_shown(setup)} has no {item.name} (last seen in "
            f"{item.version}){more}: the server exits with code 2",
            fix,
        )


@rule("flag-not-yet", _WHEELS, "sglang", "vllm")
def later_option(setup: Setup) -> Iterator[Hit]:
    """An option of a newer release."""
    for item in _odd(setup, "not_yet"):
        yield error(
            item.name,
            f"{_NAMES[setup.engine]} {_shown(setup)} does not know {item.name} yet (first seen in "
            f"{item.version}): the server exits with code 2",
            f"upgrade to {item.version} or newer, or drop it",
        )


@rule("flag-ambiguous", _WHEELS, "sglang", "vllm")
def ambiguous_option(setup: Setup) -> Iterator[Hit]:
    """A prefix of several options."""
    for item in _odd(setup, "ambiguous"):
        yield error(
            item.name,
            f"{item.name} could be {', '.join(item.others)}: argparse exits with code 2",
            "write the option in full",
        )


@rule("flag-unknown", _WHEELS, "sglang", "vllm")
def unknown_option(setup: Setup) -> Iterator[Hit]:
    """An option of no release that was read; one of a user's own script may be the script's."""
    if setup.pasted.program is not None:
        return
    for item in _odd(setup, "unknown"):
        near = f"did you mean {item.others[0]}?" if item.others else "drop it"
        if " " in item.name:
            words = ", ".join(f'"{word}"' for word in item.name.split())
            near = f"one word each: {words} (this is a single word with a blank in it)"
        yield error(
            item.name,
            f"{_NAMES[setup.engine]} {_shown(setup)} has no option {item.name}: the server exits "
            "with code 2",
            near,
        )


@rule("flag-deprecated", _WHEELS, "sglang", "vllm")
def deprecated_option(setup: Setup) -> Iterator[Hit]:
    """Still taken, but on the way out."""
    for option in setup.command.options:
        if option.name in SGLANG_DEPRECATED:
            since, successor = SGLANG_DEPRECATED[option.name]
            if setup.before(since) is False:
                yield info(option.text, f"deprecated since {since}", f"write {successor}")


@rule("spec-key-unknown", "server-recordings/serve-bad-spec-key.log (vLLM 0.32 refuses it)", "vllm")
def unknown_spec_key(setup: Setup) -> Iterator[Hit]:
    """speculative_config refuses a key it does not know (pydantic, extra=forbid)."""
    table = name_table("vllm", "speculative_config")
    oldest = setup.version is not None and table.window(setup.version) is None
    for key in setup.command.config("--speculative-config"):
        refused = key in _KEYS_GONE and setup.before(_KEYS_GONE[key]) is False
        if not refused and (oldest or table.knows(key, setup.version)):
            # without a version: a key that the newest one has lost is worth a word
            gone = setup.version is None and table.names[key][1] < len(table.versions) - 1
            if not gone:
                continue
        tree = " Tree speculation is an SGLang-only axis." if "tree" in key else ""
        near = get_close_matches(key, table.names, n=1, cutoff=0.75)
        seen = ""
        if key in table.names:
            first, last = table.names[key]
            seen = f" (seen in {table.versions[first]} to {table.versions[last]})"
        yield (error if setup.version is not None else warning)(
            f"speculative_config.{key}",
            f"vLLM {_shown(setup)} refuses this key{seen}: the server stops at start.{tree}",
            f"did you mean {near[0]}?" if near and near[0] != key else "drop the key",
        )


@rule("json-invalid", "vllm 0.33.0 source: options parsed by json.loads")
def invalid_json(setup: Setup) -> Iterator[Hit]:
    """A configuration object that is no JSON."""
    for name, problem in setup.command.bad_json.items():
        option = setup.command.option(name)
        typed = option is not None and any(mark in option.text for mark in "“”‘’«»")
        quotes = (
            "; it holds typographic quotes, as word processors and chats make them" if typed else ""
        )
        yield error(
            name,
            f"its value is no JSON object: {problem}{quotes}",
            "quote it with plain marks: '{\"key\": value}'",
        )


@rule("flag-dash", "argparse: an option begins with a hyphen-minus (U+002D)", "sglang", "vllm")
def typographic_dash(setup: Setup) -> Iterator[Hit]:
    """ "–tp" or "—tp": to the server a word, no option."""
    words = [
        word
        for option in setup.command.options
        for word in option.values
        if word[:1] in ("–", "—", "−", "‐", "‑")
    ]
    for word in words + [word for word in setup.command.positionals if word[:1] in ("–", "—", "−")]:
        yield error(
            word,
            "it begins with a typographic dash (a chat or word processor made it of two hyphens): "
            "the server takes it for a plain word",
            f"write --{word.lstrip('–—−‐‑-')}",
        )


@rule("flag-repeated", "argparse: the last occurrence counts")
def repeated_option(setup: Setup) -> Iterator[Hit]:
    """One option with two values: the earlier one is lost without a word."""
    counts = Counter(option.name for option in setup.command.options)
    for name, count in counts.items():
        mine = [option for option in setup.command.options if option.name == name]
        if count > 1 and name not in _REPEATABLE and len({option.values for option in mine}) > 1:
            if name in setup.command.configs:
                continue
            yield warning(
                name,
                f"given {count} times ({', '.join(' '.join(o.values) for o in mine)}): only the "
                f"last, {' '.join(mine[-1].values)}, counts",
                "keep one",
            )
