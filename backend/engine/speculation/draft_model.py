"""Drafts by a small model with the same vocabulary as the large one.

The draft model has a KV cache of its own with the same blocks and slots as the large one's: a token's keys and values
are in the same slot of both caches, so one block_table serves both. The draft model catches up with a request's
`token_ids` only when drafts are requested. It is not notified when blocks are freed and reused, so for each full block
it remembers the hash of the tokens that the block was filled for.

It samples its drafts as the sampler does, with the same noise for the same position: the more similar the two models'
probabilities are, the more often they sample the same token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F

from backend.engine.batch import make_batch
from backend.engine.errors import ConfigError
from backend.engine.paged_model import PagedModel
from backend.engine.plan import ScheduledRequest, count_accepted
from backend.engine.request import Request
from backend.engine.resolved_config import ResolvedConfig
from backend.engine.sampler import sample
from backend.engine.sampling_batch import make_sampling_batch
from backend.engine.speculation.base import Drafter, DraftRequest
from backend.model_files import open_model_files


@dataclass(frozen=True, slots=True)
class _Progress:
    """How much of a request the draft model has computed."""

    num_known: int  # known tokens whose keys and values it has
    drafts: tuple[int, ...]  # drafts after them whose keys and values it has, too
    num_preemptions: int  # of the request at that time: after another preemption it has other blocks


class ModelDrafter(Drafter):
    """Drafts by a second, smaller model."""

    def __init__(self, config: ResolvedConfig) -> None:
        """Raises `ConfigError` if the draft model's vocabulary differs from the model's."""
        assert config.draft is not None, "no draft model is configured"
        check_vocabulary(config.model_dir, config.draft.model_dir)
        self._config = config.draft
        self._vocab_size = config.model.vocab_size
        self._model = PagedModel(config.draft)
        self._progress: WeakKeyDictionary[Request, _Progress] = WeakKeyDictionary()
        self._filled: list[bytes | None] = [None] * config.num_blocks  # by block: the hash of its content, if full

    @torch.inference_mode()
    def draft(self, wanted: Sequence[DraftRequest]) -> list[tuple[int, ...]]:
        """Catches up with the requests, then runs one pass per draft token over all of them together."""
        drafts: dict[Request, tuple[int, ...]] = {}
        plan = self._catch_up([each.request for each in wanted])
        while plan:
            for scheduled, token_id in zip(plan, self._run(plan), strict=True):
                request = scheduled.request
                if scheduled.catches_up:
                    drafts[request] = (*scheduled.drafts, token_id)
                else:
                    self._progress[request] = _Progress(scheduled.end, (), request.num_preemptions)
            unfinished = [w.request for w in wanted if 0 < len(drafts.get(w.request, ())) < w.num_tokens]
            plan = [_next(request, drafts[request]) for request in unfinished]
        for request, drafted in drafts.items():
            # The last draft was sampled but not computed.
            self._progress[request] = _Progress(len(request.token_ids), drafted[:-1], request.num_preemptions)
        return [drafts.get(each.request, ()) for each in wanted]

    def set_num_threads(self, num_threads: int) -> None:
        self._model.set_num_threads(num_threads)

    def _catch_up(self, requests: Sequence[Request]) -> list[ScheduledRequest]:
        """A plan for the tokens that the draft model lacks, within one step's budget.

        A long prompt takes several such passes, and gets no drafts before it is complete.
        """
        budget = self._config.max_num_batched_tokens
        plan = []
        for request in requests:
            if request.images:  # which the draft model cannot read
                continue
            start = self._num_known(request)
            if num_tokens := min(len(request.token_ids) - start, budget):
                plan.append(ScheduledRequest(request, start, num_tokens))
                budget -= num_tokens
        return plan

    def _num_known(self, request: Request) -> int:
        """How many of the request's tokens are in the draft model's cache.

        At least the last token is computed again: its hidden state gives the next one.
        """
        progress = self._progress.get(request)
        if progress is None or progress.num_preemptions != request.num_preemptions:
            pairs = zip(request.block_table, request.block_hashes, strict=False)
            num_full = next((i for i, (block, h) in enumerate(pairs) if self._filled[block] != h), None)
            num_known = (len(request.block_hashes) if num_full is None else num_full) * self._config.block_size
        else:
            num_known = progress.num_known
            num_known += _num_equal(progress.drafts, request.token_ids[num_known:])
        return min(num_known, len(request.token_ids) - 1)

    def _run(self, plan: Sequence[ScheduledRequest]) -> list[int]:
        """One forward pass. Returns a sampled token per part; meaningless for a part that has not caught up."""
        batch = make_batch(plan, self._config.block_size, self._config.device)
        # Vocabularies may be padded to different sizes: ids beyond the draft model's are clamped.
        readable = batch.input_ids.clamp(max=self._config.model.vocab_size - 1)
        hidden = self._model.forward(replace(batch, input_ids=readable, adapters=None))  # adapters fit the model only
        for scheduled in plan:
            self._note_filled_blocks(scheduled)
        tokens = dict.fromkeys(range(len(plan)), 0)
        if batch.sampled:
            logits = self._model.logits(hidden[batch.sampled_rows])
            logits = F.pad(logits, (0, self._vocab_size - logits.shape[-1]), value=-torch.inf)
            sampling = make_sampling_batch(batch.next_tokens, self._vocab_size, self._config.device)
            sampled = sample(logits, replace(sampling, logprobs=None), ops=self._model.ops)
            tokens |= {i: each.token_id for i, each in zip(batch.sampled, sampled, strict=True)}
        return [*tokens.values()]

    def _note_filled_blocks(self, scheduled: ScheduledRequest) -> None:
        """Records which blocks this part has filled with known tokens, and which ones it has overwritten partly."""
        request, size = scheduled.request, self._config.block_size
        for i in range(scheduled.start // size, -(-scheduled.end // size)):
            is_full = (i + 1) * size <= scheduled.end and not scheduled.drafts and i < len(request.block_hashes)
            self._filled[request.block_table[i]] = request.block_hashes[i] if is_full else None


def check_vocabulary(model_dir: Path, draft_dir: Path) -> None:
    """Raises `ConfigError` unless both models have the same vocabulary."""
    ours, theirs = _vocabulary(model_dir), _vocabulary(draft_dir)
    if ours == theirs:
        return
    token = next(token for token in sorted({*ours, *theirs}) if ours.get(token) != theirs.get(token))
    raise ConfigError(
        f"the draft model in {draft_dir} has another vocabulary than {model_dir}: "
        f"{token!r} is {theirs.get(token)} there and {ours.get(token)} here",
        param="draft_model_dir",
    )


def _vocabulary(model_dir: Path) -> dict[str, int]:
    try:
        return open_model_files(model_dir).tokenizer().get_vocab(with_added_tokens=True)
    except ConfigError:
        return {}  # a model without a tokenizer is used by token ids, and there is nothing to compare


def _next(request: Request, drafts: tuple[int, ...]) -> ScheduledRequest:
    """Computes the last of these drafts, so that one more can be sampled."""
    return ScheduledRequest(request, len(request.token_ids) + len(drafts) - 1, 1, drafts)


def _num_equal(drafts: Sequence[int], token_ids: Sequence[int]) -> int:
    count = min(len(drafts), len(token_ids))
    return count_accepted(drafts[:count], token_ids)
