"""In 16 bit the check tells faults of a verify from rounding: real runs of the trained model."""

import dataclasses
from collections.abc import Callable, Iterator

import pytest
import torch
from contract_harness import ROOT, knobs, study_of, workload_of

from autotune.backends.engine_args import study_prompts
from autotune.backends.engine_baselines import Baselines, Prompts
from autotune.backends.output_check import Checked, Reference
from autotune.schemas import Study
from engine import target
from engine.build import build, resolve
from engine.collectives import LocalGroup
from engine.config import DraftSpec, LaunchConfig, SpeculationConfig, TargetSpec
from engine.results import Request
from engine.runner import Runner
from engine.target import Batch, TargetModel

MODELS = ROOT / "studies" / "models"
PROMPTS, TOKENS = 8, 32
CHAIN = SpeculationConfig(method="eagle3", steps=3, topk=1)
TREE = SpeculationConfig(method="eagle3", steps=3, topk=4, draft_tokens=16)

pytestmark = pytest.mark.slow


class Judge:
    """An engine of one rank in this process, and the check with its baseline."""

    def __init__(self) -> None:
        config = LaunchConfig(
            target=TargetSpec(path=str(MODELS / "tiny-moe")),
            draft=DraftSpec(path=str(MODELS / "tiny-moe-eagle3")),
            max_context=104,
            max_concurrency=PROMPTS,
            dtype="bfloat16",
            device="cpu",
        )
        shapes = resolve(config)
        executor, head = build(config, shapes, LocalGroup(), torch.device("cpu"))
        self.runner = Runner(executor, head, slots=PROMPTS, eos_ids=shapes.target.eos_ids)
        study = study_of("engine", {"device": "cpu"}, MODELS / "tiny-moe")
        study = Study.model_validate(
            study.model_dump(mode="json")
            | {"workload": {"prompts": "builtin:code", "input_len": 64, "output_len": TOKENS,
                            "num_prompts": PROMPTS, "concurrency": [PROMPTS]}}
        )  # fmt: skip
        self.prompts: Prompts = study_prompts(study, PROMPTS).token_ids
        self.workload = workload_of(study, PROMPTS)
        self.baselines = Baselines(exact=False)
        self.baselines.prepare(knobs(1, "gloo"), self.workload, self.prompts, self.plain)

    def plain(
        self, prompts: Prompts, batch_size: int, margins: bool, max_tokens: int | None = None
    ) -> Reference:
        found = self.runner.run(
            self.requests(prompts, max_tokens),
            SpeculationConfig(),
            concurrency=batch_size,
            margins=margins,
        ).requests
        return Reference(
            tuple(each.token_ids for each in found),
            tuple(each.margins for each in found) if margins else None,
            tuple(each.runners_up for each in found) if margins else None,
        )

    @staticmethod
    def requests(prompts: Prompts, max_tokens: int | None = None) -> list[Request]:
        most = min(TOKENS, max_tokens or TOKENS)
        return [Request(prompt_ids=p, max_new_tokens=most, ignore_eos=True) for p in prompts]

    def verdict(self, speculation: SpeculationConfig) -> Checked:
        """Of a run with whatever fault is in place; it is judged without."""
        run = self.runner.run(self.requests(self.prompts), speculation, concurrency=PROMPTS)
        with pytest.MonkeyPatch.context() as whole:
            whole.setattr(TargetModel, "forward", FORWARD)
            return self.baselines.check(
                knobs(1, "gloo", method="eagle3", steps=3, topk=1),
                self.workload,
                tuple(each.token_ids for each in run.requests),
                self.prompts,
                self.plain,
            )


FORWARD = TargetModel.forward


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield Judge()
    torch.set_num_threads(before)


def positions_one_too_far(batch: Batch) -> Batch:
    depth_BT = batch.position_BT - batch.prefix_B[:, None]
    return dataclasses.replace(batch, position_BT=batch.position_BT + (depth_BT >= 1).long())


def siblings_seen(batch: Batch) -> Batch:
    assert batch.mask_BTT is not None
    return dataclasses.replace(batch, mask_BTT=torch.ones_like(batch.mask_BTT))


def last_row_of_the_cache_missing(batch: Batch) -> Batch:
    return dataclasses.replace(batch, prefix_B=batch.prefix_B - 1)


def two_slots_swapped(batch: Batch) -> Batch:
    slot_B = batch.slot_B.clone()
    if len(slot_B) > 1:
        slot_B[:2] = batch.slot_B[:2].flip(0)
    return dataclasses.replace(batch, slot_B=slot_B)


@pytest.mark.parametrize("speculation", [CHAIN, TREE], ids=["chain", "tree"])
def test_a_faithful_verify_is_no_fault(judge: Judge, speculation: SpeculationConfig) -> None:
    checked = judge.verdict(speculation)
    assert checked.verdict in ("exact", "near_tie"), checked


@pytest.mark.parametrize(
    ("fault", "speculation"),
    [
        pytest.param(positions_one_too_far, CHAIN, id="positions"),
        pytest.param(siblings_seen, TREE, id="mask"),
        pytest.param(last_row_of_the_cache_missing, CHAIN, id="prefix"),
        pytest.param(two_slots_swapped, CHAIN, id="slots-of-two-prompts"),
    ],
)
def test_a_fault_of_the_verify_is_incorrect(
    judge: Judge,
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[Batch], Batch],
    speculation: SpeculationConfig,
) -> None:
    def forward(self: TargetModel, batch: Batch, timer: object, phase: str) -> target.Forward:
        return FORWARD(self, fault(batch) if phase == "verify" else batch, timer, phase)  # type: ignore[arg-type]

    monkeypatch.setattr(TargetModel, "forward", forward)
    checked = judge.verdict(speculation)
    assert checked.verdict == "incorrect", checked


def test_rows_of_accepted_nodes_left_where_they_are_is_incorrect(
    judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TargetModel, "compact", lambda *_: None)
    checked = judge.verdict(TREE)
    assert checked.verdict == "incorrect", checked
