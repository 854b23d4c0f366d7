"""The effective-settings table: what NCCL logged outranks what the workers' environment says."""

from pathlib import Path

import pytest

from autotune.backends.effective import nccl_summary
from autotune.nccl_log import parse_nccl_logs
from autotune.records import Provenance, RankEnvironment
from autotune.reporting.settings import judged_settings
from model.spec import Knobs

KNOBS = Knobs.of({"parallel.tp": 2, "collectives.backend": "nccl", "nccl.proto": "LL"})
LOGS = Path(__file__).parents[1] / "data" / "nccl_logs"


def provenance(case: str | None, **environment: str) -> Provenance:
    """Two workers with this environment and what a recorded log of that case says."""
    nccl = {} if case is None else nccl_summary(parse_nccl_logs(LOGS.glob(f"{case}.rank*.log")))
    stored = Provenance(
        config={},
        config_hash="0",
        nccl=nccl,
        ranks=tuple(RankEnvironment(rank=r, pid=r, environment=environment) for r in range(2)),
    )
    return Provenance.model_validate_json(stored.model_dump_json())


@pytest.mark.parametrize(
    ("case", "verdict", "words"),
    [
        pytest.param("shm_ring_LL_c16", "effective", "NCCL's log: RING/LL at ", id="log-agrees"),
        pytest.param("shm_ring_LL128", "not effective", "which NCCL_PROTO=LL forbids", id="denied"),
        pytest.param(None, "effective", "read in all 2 workers", id="no-log"),
    ],
)
def test_a_protocol_is_judged_by_what_ran(case: str | None, verdict: str, words: str) -> None:
    stored = provenance(case, NCCL_PROTO="LL")
    (found,) = judged_settings([(KNOBS, {})], stored)
    assert (found.name, found.verdict) == ("NCCL_PROTO", verdict)
    assert words in found.reason


def test_environment_that_lacks_the_value_outranks_a_log_that_happens_to_agree() -> None:
    (found,) = judged_settings([(KNOBS, {})], provenance("shm_ring_LL_c16"))
    assert (found.verdict, found.found) == ("not effective", "None")


def test_a_setting_that_cannot_matter_is_inert_unless_the_log_denies_it() -> None:
    inert = {"nccl.proto": "one rank moves nothing"}
    (agreed,) = judged_settings([(KNOBS, inert)], provenance("shm_ring_LL_c16", NCCL_PROTO="LL"))
    (denied,) = judged_settings([(KNOBS, inert)], provenance("shm_default", NCCL_PROTO="LL"))
    assert (agreed.verdict, agreed.reason) == ("inert", "one rank moves nothing")
    # the default takes Simple for large messages only
    assert denied.verdict == "not effective"
    assert "SIMPLE ran at " in denied.reason
