"""What commands print into a pipe: no padding, no escape codes, lines that can be read."""

import re

import pytest

from autotune.cli.main import main
from autotune.screen import TABLE_WIDTH, console

LOGS = "tests/data/nccl_logs"
COMMANDS = {
    "doctor": ("doctor", "--from", "tests/data/doctor/cpu-only"),
    "lint": ("lint", "--engine", "sglang", "--version", "0.5.9", "--args", "--tp 8",
             "--env", "NCCL_PROTO=LL128 NCCL_ALGORITHM=Ring"),
    "env-check": ("env", "check", f"{LOGS}/shm_seed.rank0.log", "--expect", "NCCL_PROTO=LL"),
    "break-even": ("model", "break-even", "--target", "kimi-k2.5", "--machine",
                   "8x-rtx-pro-6000-switches", "--baseline-tokens-per-s", "82.5", "--verify-ms",
                   "29"),
    "selector": ("model", "selector", "--log", f"{LOGS}/shm_seed.rank0.log"),
    "show": ("model", "show", "--machine", "8x-l40s"),
    "predict": ("predict", "speculation.steps=2", "--target", "kimi-k2.5", "--machine",
                "8x-rtx-pro-6000-switches"),
    "explain": ("explain", "studies/launch/kimi-k2.5-29ms.yaml", "--machine",
                "8x-rtx-pro-6000-switches"),
    "diff": ("diff", "tests/data/foreign/sglang-eagle3-graph.log",
             "tests/data/foreign/sglang-eagle3-eager.log"),
}  # fmt: skip


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_a_pipe_gets_plain_lines(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(list(words))
    captured = capsys.readouterr()
    assert captured.out
    for line in (captured.out + captured.err).splitlines():
        assert line == line.rstrip(), repr(line)
        assert "\x1b" not in line
        # a sentence may be one long line (env check), a padded table may not
        assert len(re.sub(r"\S{40,}", "", line)) <= TABLE_WIDTH or "  " not in line.strip()


@pytest.mark.parametrize(
    ("pieces", "shown"),
    [
        pytest.param(("a  \n",), "a\n", id="one-write"),
        pytest.param(("a ", " \n", "b"), "a\nb", id="blanks-over-writes"),
        pytest.param(("a ", "b  ", "c \n"), "a b  c\n", id="blanks-inside-stay"),
        pytest.param((" \n", "  x\n"), "\n  x\n", id="indents-stay"),
    ],
)
def test_only_blanks_at_line_ends_are_dropped(
    pieces: tuple[str, ...], shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    stream = console().file
    for piece in pieces:
        stream.write(piece)
    assert capsys.readouterr().out == shown


def test_columns_sets_the_width_of_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "72")
    assert console().width == 72
