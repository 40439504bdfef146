"""A small model of the same vocabulary guesses what the large one will say.

It keeps keys and values of its own, in the blocks and slots that the scheduler gave the large one: where a request's
token is in one cache, it is in the other. It chases `token_ids` as the large one does, but only when it is asked, and
remembers of each full block for which tokens it has been filled, since blocks come and go without its being told.

It draws its guesses as the sampler draws tokens, with the same noise at the same place: the more alike the two models
see a place, the more often the same token comes of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F

from backend.engine.batch import make_batch
from backend.engine.config import ResolvedConfig
from backend.engine.errors import ConfigError
from backend.engine.paged_model import PagedModel
from backend.engine.plan import ScheduledRequest, count_accepted
from backend.engine.request import Request
from backend.engine.sampler import sample
from backend.engine.sampling_batch import make_sampling_batch
from backend.engine.speculation.base import Drafter, Wanted
from backend.model_files import open_model_files


@dataclass(frozen=True, slots=True)
class _Followed:
    """How far the draft model has come with a request."""

    num_known: int  # tokens whose keys and values it has
    drafts: tuple[int, ...]  # and those of these, behind them
    num_preemptions: int  # of the request, then: another one has other blocks


class ModelDrafter(Drafter):
    def __init__(self, config: ResolvedConfig) -> None:
        """Raises `ConfigError` if the draft model does not speak the model's tokens."""
        assert config.draft is not None, "no draft model is configured"
        check_vocabulary(config.model_dir, config.draft.model_dir)
        self._config = config.draft
        self._vocab_size = config.model.vocab_size
        self._model = PagedModel(config.draft)
        self._followed: WeakKeyDictionary[Request, _Followed] = WeakKeyDictionary()
        self._filled: list[bytes | None] = [None] * config.num_blocks  # by block, the hash of what it is full of

    @torch.inference_mode()
    def draft(self, wanted: Sequence[Wanted]) -> list[tuple[int, ...]]:
        drafts: dict[Request, tuple[int, ...]] = {}
        plan = self._catch_up([each.request for each in wanted])
        while plan:
            for scheduled, token_id in zip(plan, self._run(plan), strict=True):
                request = scheduled.request
                if scheduled.catches_up:
                    drafts[request] = (*scheduled.drafts, token_id)
                else:
                    self._followed[request] = _Followed(scheduled.end, (), request.num_preemptions)
            unfinished = [w.request for w in wanted if 0 < len(drafts.get(w.request, ())) < w.num_tokens]
            plan = [_next(request, drafts[request]) for request in unfinished]
        for request, guess in drafts.items():
            # The last guess was not computed.
            self._followed[request] = _Followed(len(request.token_ids), guess[:-1], request.num_preemptions)
        return [drafts.get(each.request, ()) for each in wanted]

    def _catch_up(self, requests: Sequence[Request]) -> list[ScheduledRequest]:
        """What these lack, as far as one pass may go: a long prompt takes several, and has no drafts until then."""
        budget = self._config.max_num_batched_tokens
        plan = []
        for request in requests:
            start = self._num_known(request)
            if num_tokens := min(len(request.token_ids) - start, budget):
                plan.append(ScheduledRequest(request, start, num_tokens))
                budget -= num_tokens
        return plan

    def _num_known(self, request: Request) -> int:
        """At least the last token is computed again: the next one comes from its hidden state."""
        followed = self._followed.get(request)
        if followed is None or followed.num_preemptions != request.num_preemptions:
            pairs = zip(request.block_table, request.block_hashes, strict=False)
            num_full = next((i for i, (block, h) in enumerate(pairs) if self._filled[block] != h), None)
            num_known = (len(request.block_hashes) if num_full is None else num_full) * self._config.block_size
        else:
            num_known = followed.num_known
            num_known += _num_equal(followed.drafts, request.token_ids[num_known:])
        return min(num_known, len(request.token_ids) - 1)

    def _run(self, plan: Sequence[ScheduledRequest]) -> list[int]:
        """One pass, and the token that each of the plan ends with; of no meaning for one that has not caught up."""
        batch = make_batch(plan, self._config.block_size, self._config.device)
        readable = batch.input_ids.clamp(max=self._config.model.vocab_size - 1)  # some vocabularies are padded
        hidden = self._model.forward(replace(batch, input_ids=readable))
        for scheduled in plan:
            self._note(scheduled)
        tokens = dict.fromkeys(range(len(plan)), 0)
        if batch.sampled:
            logits = self._model.logits(hidden[batch.sampled_rows])
            logits = F.pad(logits, (0, self._vocab_size - logits.shape[-1]), value=-torch.inf)
            wanted = make_sampling_batch(batch.next_tokens, self._vocab_size, self._config.device)
            sampled = sample(logits, replace(wanted, logprobs=None), ops=self._model.ops)
            tokens |= {i: each.token_id for i, each in zip(batch.sampled, sampled, strict=True)}
        return [*tokens.values()]

    def _note(self, scheduled: ScheduledRequest) -> None:
        """Which blocks are full now of what is certain, and which no longer hold what they held."""
        request, size = scheduled.request, self._config.block_size
        for i in range(scheduled.start // size, -(-scheduled.end // size)):
            is_full = (i + 1) * size <= scheduled.end and not scheduled.drafts and i < len(request.block_hashes)
            self._filled[request.block_table[i]] = request.block_hashes[i] if is_full else None


def check_vocabulary(model_dir: Path, draft_dir: Path) -> None:
    """Raises `ConfigError` unless both read and write the same tokens."""
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
        return {}  # without a tokenizer a model is used by token ids, and there is nothing to compare


def _next(request: Request, drafts: tuple[int, ...]) -> ScheduledRequest:
    """The last of these drafts, to be computed so that one more can follow."""
    return ScheduledRequest(request, len(request.token_ids) + len(drafts) - 1, 1, drafts)


def _num_equal(drafts: Sequence[int], token_ids: Sequence[int]) -> int:
    count = min(len(drafts), len(token_ids))
    return count_accepted(drafts[:count], token_ids)
