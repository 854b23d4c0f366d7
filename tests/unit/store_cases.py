"""A study with one claimable trial, for the tests of the store on each database."""

from pathlib import Path

from study_files import sim_study

from autotune.store.store import Store
from autotune.store.views import StudyView
from model.spec import Knobs, Workload

KNOBS = Knobs.of({"speculation.method": "eagle3", "speculation.steps": 3, "speculation.topk": 1})
WORKLOAD = Workload(
    prompts="builtin:code",
    prompts_sha256="0" * 64,
    chat_template=None,
    input_len=10,
    output_len=20,
    context=20,
    temperature=0.0,
    ignore_eos=True,
    seed=0,
    concurrency=1,
)


def new_study(store: Store, name: str = "s") -> StudyView:
    return store.add_study(
        name=name,
        text=str(sim_study()),
        label="s.yaml",
        base_dir=Path("/"),
        machine=None,
        workloads={1: WORKLOAD},
    )


def claim(store: Store, study: StudyView, worker: int, what: str = "search:x") -> int | None:
    return store.claim_trial(
        study_id=study.id,
        claim=what,
        role="search",
        origin="test",
        knobs=KNOBS,
        group_id="g",
        worker_id=worker,
    )
