"""The workload of each concurrency of a study, with the prompts' identity."""

import hashlib

from autotune.prompts import check_prompt_set
from autotune.schemas import Study
from model.spec import Workload


def study_workloads(study: Study) -> dict[int, Workload]:
    """Concurrency -> workload. Reads the prompts once where the target has a tokenizer.

    Raises ``UserError`` for prompts that can't be read.
    """
    spec = study.workload
    sha256 = _prompts_sha256(study)
    return {
        level: Workload(
            prompts=spec.prompts,
            prompts_sha256=sha256,
            chat_template=spec.chat_template,
            input_len=spec.input_len,
            output_len=spec.output_len,
            context=spec.input_len + spec.output_len // 2,
            temperature=float(spec.temperature),
            ignore_eos=spec.ignore_eos,
            seed=study.seed,
            concurrency=level,
        )
        for level in spec.concurrency
    }


def num_prompts(study: Study) -> int:
    """Requests that the largest level serves in one repeat."""
    return study.workload.num_prompts or max(study.workload.concurrency)


def _prompts_sha256(study: Study) -> str:
    """Identity of the prompts; what reads none has only their name."""
    if study.backend.kind == "engine":
        from autotune.backends.engine_args import study_prompts

        return study_prompts(study, num_prompts(study)).sha256
    check_prompt_set(study.workload.prompts)
    return hashlib.sha256(study.workload.prompts.encode()).hexdigest()
