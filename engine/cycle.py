"""What happens to a set of running sequences in one prefill or one cycle, on rank 0.

A plain cycle is one forward; a speculative one drafts, verifies, accepts and extends. The host
reads the device once a cycle, when it learns what was accepted. Sampling is lossless for any draft
that does not depend on the draw: the target's token is drawn at every node, and a drafted child is
accepted exactly when it equals the draw (recursive rejection with point-mass proposals comes to the
same). Legend as in ``engine.executor``; F = three captured hidden states, H the head's hidden size.
"""

from collections.abc import Callable

import torch
from torch.nn.functional import pad

from engine.config import SpeculationConfig
from engine.draft import DraftModel
from engine.errors import EngineError
from engine.executor import Executor, Heads, Keep, Order, Want
from engine.sequence import Sequence, Tally
from engine.timing import CycleTimer, NoTimer
from engine.tree import Tree, draft

#: prompt tokens in one forward
PREFILL_CHUNK = 512
#: lengths that a chunk is padded to on a GPU
PREFILL_LENGTHS = (16, 64, 256, PREFILL_CHUNK)


class Seeds:
    """What each slot's next draft starts from: the last extend's output, at a fixed place."""

    def __init__(self, model: DraftModel, slots: int) -> None:
        fc = model.weights.fc_HF
        self.hidden_SH = torch.zeros(slots, model.shape.hidden, dtype=fc.dtype, device=fc.device)
        self.logits_SR = torch.zeros(slots, model.shape.draft_vocab, device=fc.device)
        #: best draft id; the logits may be older than this when only chains are drafted
        self.best_S = torch.zeros(slots, dtype=torch.int64, device=fc.device)

    def settle(
        self, model: DraftModel, slot_B: torch.Tensor, seed_BH: torch.Tensor, *, with_logits: bool
    ) -> None:
        """Keep an extend's last rows; chains need no logits."""
        self.hidden_SH[slot_B] = seed_BH
        if with_logits:
            logits_BR = model.logits(seed_BH)
            self.logits_SR[slot_B] = logits_BR
            self.best_S[slot_B] = logits_BR.argmax(-1)
        else:
            self.best_S[slot_B] = model.best(seed_BH)


class Cycle:
    """Prefills and cycles of one run."""

    def __init__(
        self,
        executor: Executor,
        draft_model: DraftModel | None,
        seeds: Seeds | None,
        speculation: SpeculationConfig,
        timer: CycleTimer,
        *,
        margins: bool,
    ) -> None:
        self.executor, self.draft_model, self.seeds = executor, draft_model, seeds
        self.speculation, self.timer, self.margins = speculation, timer, margins
        self.ops, self.device = executor.model.ops, executor.device
        self.tally = Tally(speculation)
        self._keep: Keep | None = None
        self._number = 0
        #: for synthetic acceptance
        self._random = torch.Generator().manual_seed(0)

    def run(self, sequences: list[Sequence]) -> int:
        """One cycle; returns the number of tokens delivered."""
        if self.speculation.method == "off":
            delivered = self._plain(sequences)
        else:
            delivered = self._speculative(sequences)
        self._number += 1
        return delivered

    def prefill(self, sequence: Sequence, beat: Callable[[], None]) -> None:
        """Run the prompt in chunks; the first token comes from its last row."""
        prompt_T = torch.tensor(sequence.request.prompt_ids)
        slot_B = torch.tensor([sequence.slot])
        for start in range(0, len(prompt_T), PREFILL_CHUNK):
            stop = min(start + PREFILL_CHUNK, len(prompt_T))
            padding = self._padded(stop - start, start) - (stop - start)
            order = Order(
                token_BT=pad(prompt_T[start:stop], (0, padding))[None],
                slot_B=slot_B,
                prefix_B=torch.tensor([start]),
                want=self._want([sequence]) if stop == len(prompt_T) else "none",
                only_token=stop - start - 1,
                keep=self._take_keep(),
            )
            forward, heads = self.executor.forward(order, NoTimer())
            following_T = prompt_T[start + 1 : stop + 1]
            if heads is not None:
                token = int(self._targets(heads, [sequence], 1, "prefill")[0])
                self._note_margins(heads, [sequence])
                sequence.prefix = len(prompt_T)
                sequence.emit([token])
                following_T = torch.cat((following_T, torch.tensor([token])))
            if self.speculation.method != "off":
                assert forward.captured_NF is not None
                self._extend(
                    pad(following_T, (0, padding))[None].to(self.device),
                    forward.captured_NF[None],
                    slot_B.to(self.device),
                    torch.tensor([start], device=self.device),
                    torch.tensor([stop - start - 1], device=self.device),
                )
            beat()

    def _padded(self, num_tokens: int, start: int) -> int:
        """Length a chunk is run at: on a GPU one of a few, since kernels are compiled by length.

        What padding leaves in the caches lies past the prompt, where the next tokens overwrite it.
        """
        if self.device.type == "cpu":
            return num_tokens
        room = self.executor.model.cache_XSCGD.shape[2] - start
        fitting = (n for n in PREFILL_LENGTHS if num_tokens <= n <= room)
        return next(fitting, num_tokens)

    def _plain(self, sequences: list[Sequence]) -> int:
        order = Order(
            token_BT=torch.tensor([[s.last] for s in sequences]),
            slot_B=torch.tensor([s.slot for s in sequences]),
            prefix_B=torch.tensor([s.prefix for s in sequences]),
            want=self._want(sequences),
        )
        self.timer.mark("host_gap")
        _, heads = self.executor.forward(order, self.timer)
        assert heads is not None
        tokens = self._targets(heads, sequences, 1, "decode").tolist()
        self.timer.mark("sample")
        self._note_margins(heads, sequences)
        delivered = 0
        for sequence, token in zip(sequences, tokens, strict=True):
            sequence.prefix += 1
            delivered += sequence.emit([token])
        return delivered

    def _speculative(self, sequences: list[Sequence]) -> int:
        model, seeds, device = self.draft_model, self.seeds, self.device
        assert model is not None
        assert seeds is not None
        slot_B = torch.tensor([s.slot for s in sequences])
        prefix_B = torch.tensor([s.prefix for s in sequences])
        root_B = torch.tensor([s.last for s in sequences])
        slots, prefixes = slot_B.to(device), prefix_B.to(device)
        self.timer.mark("host_gap")
        tree = draft(
            model,
            self.speculation,
            root_B.to(device),
            seeds.hidden_SH[slots],
            seeds.logits_SR[slots],
            slots,
            prefixes,
        )
        self.timer.mark("draft")
        order = Order(
            token_BT=tree.token_BT,
            slot_B=slot_B,
            prefix_B=prefix_B,
            parent_BT=tree.parent_BT if self.speculation.topk > 1 else None,
            want=self._want(sequences),
            keep=self._take_keep(),
            phase="verify",
        )
        forward, heads = self.executor.forward(order, self.timer)
        assert heads is not None
        assert forward.captured_NF is not None
        num_tokens = tree.token_BT.shape[1]
        target_BT = self._targets(heads, sequences, num_tokens, "verify").view(-1, num_tokens)
        path_BA, count_B, next_B = self._accept(tree, target_BT)
        counts: list[int] = count_B.tolist()
        path_BA = path_BA[:, : self._longest(counts)].clamp(min=0)
        paths, next_tokens = path_BA.tolist(), next_B.tolist()
        tokens, ranks = tree.token_BT.tolist(), tree.rank_BT.tolist()
        self.timer.mark("sample")
        delivered = 0
        for b, sequence in enumerate(sequences):
            accepted = paths[b][1 : counts[b] + 1]
            self.tally.add([ranks[b][node] for node in accepted])
            sequence.tokens_per_verify.append(counts[b] + 1)
            sequence.prefix += counts[b] + 1
            emitted = [tokens[b][node] for node in accepted] + [next_tokens[b]]
            delivered += sequence.emit(emitted)
        if any(paths[b][i] != i for b, n in enumerate(counts) for i in range(n + 1)):
            self._keep = Keep(slot_B, prefix_B, path_BA.cpu(), count_B.cpu() + 1)
        live = [b for b, s in enumerate(sequences) if s.finish_reason is None]
        self.timer.mark("host_gap")
        if live:
            captured_BTF = forward.captured_NF.view(len(sequences), num_tokens, -1)
            self._extend_accepted(
                live, tree.token_BT, captured_BTF, path_BA, count_B, next_B, slots, prefixes
            )
        self.timer.mark("extend")
        return delivered

    def _accept(
        self, tree: Tree, target_BT: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rates = self.speculation.synthetic_acceptance
        if rates is None:
            accepted = self.ops.verify_greedy(tree.token_BT, tree.parent_BT, target_BT)
            return accepted[0], accepted[1], accepted[2]
        uniform_1B = torch.rand(1, len(target_BT), generator=self._random).to(self.device)
        _, depth_BT = self.ops.tree_mask(tree.parent_BT)
        forced_BT = self.ops.force(
            tree.token_BT,
            tree.parent_BT,
            depth_BT,
            uniform_1B,
            torch.zeros(1, dtype=torch.int64, device=self.device),
            torch.tensor(rates, device=self.device),
        )
        path_BA, count_B, _ = self.ops.verify_greedy(tree.token_BT, tree.parent_BT, forced_BT)
        last_B1 = path_BA.gather(1, count_B[:, None]).clamp(min=0)
        return path_BA, count_B, target_BT.gather(1, last_B1)[:, 0]

    def _longest(self, counts: list[int]) -> int:
        """Length of the paths that are extended: fixed on a GPU, so that it can be captured."""
        return max(counts) + 1 if self.device.type == "cpu" else self.speculation.steps + 1

    def _extend_accepted(
        self,
        live: list[int],
        token_BT: torch.Tensor,
        captured_BTF: torch.Tensor,
        path_BA: torch.Tensor,
        count_B: torch.Tensor,
        next_B: torch.Tensor,
        slot_B: torch.Tensor,
        prefix_B: torch.Tensor,
    ) -> None:
        """Settle the accepted tokens in the head's cache, with the target's hidden states."""
        if len(live) < len(path_BA):
            at = torch.tensor(live, device=self.device)
            token_BT, captured_BTF, path_BA = token_BT[at], captured_BTF[at], path_BA[at]
            count_B, next_B, slot_B, prefix_B = count_B[at], next_B[at], slot_B[at], prefix_B[at]
        # the pair at a node is (token after it, its hidden state); rows past the path are junk
        # that the next extend overwrites
        following_BA = torch.cat((token_BT.gather(1, path_BA)[:, 1:], next_B[:, None]), dim=1)
        following_BA = following_BA.scatter(1, count_B[:, None], next_B[:, None])
        index = path_BA[:, :, None].expand(-1, -1, captured_BTF.shape[-1])
        self._extend(following_BA, captured_BTF.gather(1, index), slot_B, prefix_B, count_B)

    def _extend(
        self,
        following_BA: torch.Tensor,
        captured_BAF: torch.Tensor,
        slot_B: torch.Tensor,
        prefix_B: torch.Tensor,
        last_B: torch.Tensor,
    ) -> None:
        """Run the head over settled pairs and keep row ``last_b`` as the slot's next seed."""
        model, seeds = self.draft_model, self.seeds
        assert model is not None
        assert seeds is not None
        num_sequences, num_tokens = following_BA.shape
        position_BA = prefix_B[:, None] + torch.arange(num_tokens, device=self.device)
        hidden_NH = model.fuse(captured_BAF.reshape(num_sequences * num_tokens, -1))
        seed_BH = model.forward(
            following_BA, hidden_NH, position_BA, slot_B, prefix_B, only_B=last_B
        )
        seeds.settle(model, slot_B, seed_BH, with_logits=True)

    def _want(self, sequences: list[Sequence]) -> Want:
        if any(s.request.temperature > 0 for s in sequences):
            return "full"
        return "lead" if self.margins else "best"

    def _targets(
        self, heads: Heads, sequences: list[Sequence], num_tokens: int, stage: str
    ) -> torch.Tensor:
        """The target's token at each row: its best, or a draw at the request's temperature."""
        if bool(heads.nan_R.any()):
            rank = int(heads.nan_R.long().argmax())
            indices = ", ".join(str(s.index) for s in sequences)
            raise EngineError(
                "crash",
                "generate",
                f"NaN logits at cycle {self._number} ({stage}, requests {indices}), first on "
                f"rank {rank}: the weights or the prompt overflow this dtype",
            )
        if heads.token_M is not None:
            return heads.token_M
        assert heads.logits_MV is not None
        temperature_M = [s.request.temperature for s in sequences for _ in range(num_tokens)]
        uniform_M = [u for s in sequences for u in s.uniforms(num_tokens)]
        drawn: torch.Tensor = self.ops.sample(
            heads.logits_MV,
            torch.tensor(temperature_M, device=self.device),
            torch.tensor(uniform_M, device=self.device, dtype=torch.float64),
        )
        return drawn

    def _note_margins(self, heads: Heads, sequences: list[Sequence]) -> None:
        if not self.margins:
            return
        if heads.lead_M is not None and heads.second_M is not None:
            leads, seconds = heads.lead_M.tolist(), heads.second_M.tolist()
        else:
            assert heads.logits_MV is not None
            two = heads.logits_MV.topk(2, dim=-1)
            leads = (two.values[:, 0] - two.values[:, 1]).tolist()
            seconds = two.indices[:, 1].tolist()
        for sequence, lead, second in zip(sequences, leads, seconds, strict=True):
            sequence.margins.append(lead)
            sequence.runners_up.append(second)

    def _take_keep(self) -> Keep | None:
        keep, self._keep = self._keep, None
        return keep
