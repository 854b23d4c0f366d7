"""The tiny model's text and tokenizer: the Python standard library, minus what is held out.

Held out are the modules and pydoc topics of ``autotune.prompts``, the tests of those modules, and
every paragraph that a held-out document shares with a training one (pydoc's topics repeat each
other), so that no prompt of a study was ever trained on.
"""

import ast
import json
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from autotune.prompts import HELD_OUT_MODULES, HELD_OUT_TOPICS

END_OF_TEXT = "<|endoftext|>"
#: tables of data and copies of other people's text rather than code
SKIPPED_PARTS = frozenset(
    {"encodings", "pydoc_data", "site-packages", "dist-packages", "__pycache__", "_pydecimal.py"}
)
MAX_FILE_BYTES = 400_000
#: shorter shared paragraphs (an "else:", a blank "See also") are everybody's
MIN_SHARED_CHARS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Training documents; ``text`` holds topics and docstrings, ``code`` whole modules."""

    code: tuple[str, ...]
    text: tuple[str, ...]
    num_dropped_paragraphs: int

    @property
    def num_chars(self) -> int:
        return sum(map(len, self.code)) + sum(map(len, self.text))


def read_corpus(stdlib_dirs: Iterable[Path], max_files: int | None = None) -> Corpus:
    """Read the standard libraries; a path that several of them have is taken from the first."""
    dirs = list(stdlib_dirs) or [Path(sysconfig.get_paths()["stdlib"])]
    files: dict[str, Path] = {}
    for root in dirs:
        for path in sorted(root.rglob("*.py")):
            files.setdefault(str(path.relative_to(root)), path)
    held_out = [_read(files[_file_name(m, files)]) for m in HELD_OUT_MODULES]
    topics = _topics(files["pydoc_data/topics.py"])
    held_out += [topics.pop(topic) for topic in HELD_OUT_TOPICS]
    seen = {p.strip() for d in held_out for p in _paragraphs(d) if len(p) >= MIN_SHARED_CHARS}
    names = [name for name in files if _may_train_on(name, files[name])][:max_files]
    sources = [source for name in names if (source := _read(files[name]))]
    texts = [*topics.values(), *("\n\n\n".join(_docstrings(source)) for source in sources)]
    dropped = [0]

    def clean(document: str) -> str:
        paragraphs = list(_paragraphs(document))
        kept = [p for p in paragraphs if p.strip() not in seen]
        dropped[0] += len(paragraphs) - len(kept)
        return "\n\n".join(kept)

    return Corpus(
        code=tuple(map(clean, sources)),
        text=tuple(cleaned for text in texts if (cleaned := clean(text))),
        num_dropped_paragraphs=dropped[0],
    )


def _file_name(module: str, files: dict[str, Path]) -> str:
    return f"{module}.py" if f"{module}.py" in files else f"{module}/__init__.py"


def _may_train_on(name: str, path: Path) -> bool:
    parts = Path(name).parts
    if SKIPPED_PARTS.intersection(parts) or path.stat().st_size > MAX_FILE_BYTES:
        return False
    held_out_stems = {Path(module).name for module in HELD_OUT_MODULES}
    module = name.removesuffix(".py").removesuffix("/__init__")
    stems = {part.removesuffix(".py").removeprefix("test_").strip("_") for part in parts}
    return module not in HELD_OUT_MODULES and not stems & held_out_stems


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        # test data in other encodings, on purpose
        return ""


def _topics(path: Path) -> dict[str, str]:
    """The ``topics`` dictionary of a pydoc_data/topics.py, read without importing it."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            topics: dict[str, str] = ast.literal_eval(node.value)
            return topics
    raise ValueError(f"{path} holds no dictionary of topics")


def _paragraphs(document: str) -> Iterator[str]:
    yield from document.split("\n\n")


def _docstrings(source: str) -> Iterator[str]:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text and len(text) >= MIN_SHARED_CHARS:
                yield text


def train_tokenizer(corpus: Corpus, vocab_size: int, folder: Path):
    """Train a byte-level BPE on the corpus and save it as an ordinary tokenizer folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*corpus.code, *corpus.text], trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        model_max_length=2048,
    ).save_pretrained(str(folder))
    # transformers 5 writes a class name that earlier ones do not know; both read this one
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    path.write_text(json.dumps(config, indent=2) + "\n")
    return tokenizer


def saved_tokenizer(folder: Path):
    """The tokenizer of an earlier run."""
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def encode(tokenizer, documents: Iterable[str], seed: int) -> NDArray[np.int32]:
    """All documents in a seeded order, each followed by the end-of-text token, as one array."""
    order = np.random.default_rng(seed)
    encodings = tokenizer.encode_batch(list(documents), add_special_tokens=False)
    ids = [np.array([*e.ids, 0], dtype=np.int32) for e in encodings]
    return np.concatenate([ids[i] for i in order.permutation(len(ids))])
