"""NCCL's environment variables mean what NCCL reads from them, not what people meant."""

import pytest

from model.nccl.settings import DECIDE, NcclSettings, c_integer, parse_list
from model.nccl.versions import KNOWN_VERSIONS, release_for
from model.spec import Knobs

PROTOCOLS = ("LL", "LL128", "Simple")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("16", 16), ("16MiB", 16), ("0x10", 16), ("010", 8), (" 7", 7), ("-2", -2), ("+3", 3),
        ("many", 0), ("", 0), ("1e6", 1), ("0", 0), ("08", 0),
    ],
)  # fmt: skip
def test_numbers_are_read_as_c_strtoll_reads_them(text: str, value: int) -> None:
    assert c_integer(text) == value


@pytest.mark.parametrize(
    ("proto", "enabled"),
    [
        pytest.param(None, (1, DECIDE, 1), id="unset-leaves-LL128-to-the-topology"),
        pytest.param("LL", (1, 0, 0), id="one"),
        pytest.param("ll,simple", (1, 0, 1), id="any-case"),
        pytest.param("^LL", (0, 1, 1), id="excluding-LL-forces-LL128"),
        pytest.param("^Simple", (1, 1, 0), id="excluding-Simple-forces-LL128"),
        pytest.param("LL,LL128,Simple", (1, 1, 1), id="naming-all-forces-LL128"),
        pytest.param("LL;allreduce:^LL", (0, 1, 1), id="the-collective's-own-list-wins"),
        pytest.param("broadcast:LL", (1, DECIDE, 1), id="another-collective-changes-nothing"),
        pytest.param("", (1, DECIDE, 1), id="empty"),
    ],
)
def test_protocol_lists_switch_every_element(
    proto: str | None, enabled: tuple[int, int, int]
) -> None:
    assert NcclSettings(proto=proto).enabled_protocols() == enabled


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("NCCL_PROTO", "LL256", ("NCCL_PROTO=LL256", "'LL256' is unknown", "LL, LL128, Simple")),
        ("NCCL_ALGO", "ring;tree", ("NCCL_ALGO=ring;tree", "allreduce:tree")),
        ("NCCL_ALGO", "allgatherv:ring", ("'allgatherv' is no collective", "AllReduce")),
        ("NCCL_ALGO", "allreduce:rings", ("'rings' is unknown",)),
    ],
)
def test_lists_that_nccl_refuses_are_refused_by_name(
    name: str, value: str, words: tuple[str, ...]
) -> None:
    with pytest.raises(ValueError, match=f"{name}={value}") as caught:
        NcclSettings.from_env({name: value})
    assert all(word in str(caught.value) for word in words)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("env", "limits"),
    [
        ({}, (1, 64)),
        ({"NCCL_MIN_NCHANNELS": "16"}, (16, 64)),
        ({"NCCL_MAX_NCHANNELS": "0"}, (1, 1)),
        ({"NCCL_MAX_NCHANNELS": "many"}, (1, 1)),
        ({"NCCL_MIN_NCHANNELS": "200"}, (64, 64)),
        ({"NCCL_MIN_NCHANNELS": "8", "NCCL_MAX_NCHANNELS": "2"}, (8, 2)),
        ({"NCCL_MIN_NRINGS": "4"}, (4, 64)),
        ({"NCCL_MIN_NRINGS": "4", "NCCL_MIN_NCHANNELS": "6"}, (6, 64)),
        ({"NCCL_MIN_CTAS": "8"}, (8, 64)),
        ({"NCCL_MIN_CTAS": "8", "NCCL_MAX_CTAS": "4"}, (4, 4)),
        ({"NCCL_MIN_CTAS": "-1", "NCCL_MAX_CTAS": "0"}, (1, 64)),
    ],
)
def test_channel_limits_combine_old_and_new_names(
    env: dict[str, str], limits: tuple[int, int]
) -> None:
    assert NcclSettings.from_env(env).channel_limits() == limits


@pytest.mark.parametrize(
    ("env", "rank"),
    [
        ({}, None),
        ({"NCCL_P2P_LEVEL": "SYS"}, 9),
        ({"NCCL_P2P_LEVEL": "sys"}, None),
        ({"NCCL_P2P_LEVEL": "NET"}, None),
        ({"NCCL_P2P_LEVEL": "3"}, 8),
        ({"NCCL_P2P_LEVEL": "17"}, 9),
        ({"NCCL_P2P_DISABLE": "1", "NCCL_P2P_LEVEL": "SYS"}, 0),
        ({"NCCL_P2P_DISABLE": "2", "NCCL_P2P_LEVEL": "PIX"}, 4),
    ],
)
def test_p2p_level_takes_words_exactly_and_old_numbers(
    env: dict[str, str], rank: int | None
) -> None:
    assert NcclSettings.from_env(env).p2p_rank() == rank


def test_environment_goes_round() -> None:
    env = {
        "NCCL_ALGO": "Ring", "NCCL_PROTO": "^LL", "NCCL_MIN_NCHANNELS": "2",
        "NCCL_MAX_NCHANNELS": "8", "NCCL_NTHREADS": "256", "NCCL_BUFFSIZE": "1048576",
        "NCCL_P2P_LEVEL": "SYS", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1",
        "NCCL_MIN_CTAS": "2", "NCCL_MAX_CTAS": "4", "NCCL_LL128_NTHREADS": "320",
        "NCCL_THREAD_THRESHOLDS": "1 2 3 4 5 6", "NCCL_NVLS_ENABLE": "0",
    }  # fmt: skip
    settings = NcclSettings.from_env(env)
    assert settings.to_env() == env
    assert NcclSettings.from_env(settings.to_env()) == settings


def test_variables_of_unknown_effect_are_named() -> None:
    settings = NcclSettings.from_env({"NCCL_TUNER_PLUGIN": "x.so", "NCCL_GRAPH_FILE": "g.xml"})
    assert settings.unmodelled == ("NCCL_TUNER_PLUGIN", "NCCL_GRAPH_FILE")


def test_knobs_on_auto_leave_everything_to_nccl() -> None:
    assert NcclSettings.from_knobs(Knobs.of({"parallel.tp": 8})) == NcclSettings()


def test_knobs_become_the_same_settings_as_their_environment() -> None:
    knobs = Knobs.of(
        {
            "nccl.algo": "ring", "nccl.proto": "LL", "nccl.min_channels": 4,
            "nccl.max_channels": 8, "nccl.buffsize": 1 << 20, "nccl.nthreads": 256,
            "nccl.p2p_level": "SYS",
        }
    )  # fmt: skip
    settings = NcclSettings.from_knobs(knobs)
    assert NcclSettings.from_env(settings.to_env()) == settings
    assert settings.enabled_protocols() == (1, 0, 0)


def test_another_collective_is_read_from_the_same_list() -> None:
    text = "LL,Simple;allreduce:LL128"
    assert parse_list("NCCL_PROTO", text, PROTOCOLS, "Broadcast") == (1, 0, 1)
    assert parse_list("NCCL_PROTO", text, PROTOCOLS) == (0, 1, 0)


@pytest.mark.parametrize(
    ("version", "release"),
    [
        ("2.28.9", "2.28.9"), ("2.28.9+cuda13.0", "2.28.9"), ("2.28.8", "2.28.7"),
        ("2.29.5", "2.29.3"), ("2.27.5", "2.27.5"), ("2.30.9", "2.30.7"),
    ],
)  # fmt: skip
def test_a_patch_follows_the_known_one_before_it(version: str, release: str) -> None:
    assert release_for(version).name == release


@pytest.mark.parametrize("version", ["2.26.2", "2.31.1", "2.27.1", "3.0.0", "latest", "", "2.28"])
def test_unknown_versions_are_refused_with_the_known_ones(version: str) -> None:
    with pytest.raises(ValueError, match="is unknown to the selector") as caught:
        release_for(version)
    assert repr(version) in str(caught.value)
    assert all(known in str(caught.value) for known in KNOWN_VERSIONS)
