"""How captured decode steps are sampled: the parameters of each row, in buffers that the captured operations read.

A step needs one of three kinds of sampling: the most likely tokens; random tokens, also with filters; or all that
requests may ask for. Each kind is captured apart from the model, so a step replays two graphs, and a row's grammar may
compute its mask while the model runs.

Parameters that differ from step to step are inputs of the step (step_inputs.py), and so are those of requests, which
are copied only if a row has another request. Penalties and biases need more: a number for every token of the
vocabulary, its mark. A row's marks are written when a request with penalties or biases gets the row. From then on,
each step counts its own input token on the device. So a step can be launched before its input token is known. The host
notes how many tokens of which request a row's marks count. Where this is not what the step expects, it writes them
again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from backend.engine.masks import MaskCollector
from backend.engine.outputs import TokenLogprob
from backend.engine.plan import RunnerOutput, ScheduledRequest
from backend.engine.request import Request
from backend.engine.resolved_config import ResolvedConfig
from backend.engine.sampling_batch import GREEDY_BELOW_TEMPERATURE, NextToken, mix_seeds, uniform_at
from backend.engine.sampling_params import MAX_LOGPROBS, SamplingParams
from backend.engine.step_inputs import (
    CHOSEN,
    FLAGS,
    FREQUENCY,
    INPUT_IDS,
    MASK_ROWS,
    MIN_P,
    NUM_ROWS,
    PRESENCE,
    REPETITION,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    UNIFORM,
    StepInputs,
)
from backend.ops.base import Ops
from backend.ops.sampling import COUNTS_INPUT, MARKED, MAX_BIASES, MAX_SEEN, SCORED, SEEN_BITS, StepRows

GREEDY, RANDOM, CHANGED = range(3)  # kinds of sampling: each does what the ones before it do, and more
KINDS = (GREEDY, RANDOM, CHANGED)


@dataclass(frozen=True, slots=True)
class StepResults:
    """A step's results besides its tokens, by row."""

    scores: Tensor  # [S, 2 + 2 * n] float64, on the host: log-probability and rank, n alternatives, and their own
    num_alternatives: Mapping[int, int]  # of the rows that report log-probabilities
    errors: Mapping[int, str]  # grammars that cannot continue
    late: frozenset[int]  # rows whose mask was not ready

    def outputs(self, token_ids: Sequence[int], rows: Sequence[int]) -> list[RunnerOutput]:
        """The results of these rows, which have sampled these tokens. The step must have ended."""
        return [
            RunnerOutput(
                (token_id,), self._logprobs(row, token_id), error=self.errors.get(row), is_late=row in self.late
            )
            for token_id, row in zip(token_ids, rows, strict=True)
        ]

    def _logprobs(self, row: int, token_id: int) -> tuple[TokenLogprob, ...]:
        if row not in self.num_alternatives:
            return ()
        own, rank, *others = self.scores[row].tolist()
        count, size = self.num_alternatives[row], len(others) // 2
        top = tuple(zip(map(int, others[:count]), others[size:][:count], strict=True))
        return (TokenLogprob(token_id, own, top, int(rank)),)


class GraphSampling:
    """Samples the steps of up to `max_size` sequences. Not thread-safe."""

    def __init__(
        self, config: ResolvedConfig, ops: Ops, masks: MaskCollector, inputs: StepInputs, logits: Tensor
    ) -> None:
        """logits: [max_size, vocab_size] float32, where the steps write them."""
        self._ops, self._collector, self._inputs, self._logits = ops, masks, inputs, logits
        max_size, self._vocab_size = logits.shape
        device, is_cuda = config.device, config.device.type == "cuda"
        self._num_top = min(MAX_LOGPROBS, self._vocab_size)
        self._marks = _Marks(max_size, self._vocab_size, device)
        self._masks = torch.zeros((max_size, masks.num_words), dtype=torch.int32, device=device)
        self._host_masks = torch.zeros(self._masks.shape, dtype=torch.int32, pin_memory=is_cuda)
        self._scores = torch.zeros((max_size, 2 + 2 * self._num_top), dtype=torch.float64, device=device)
        # Two, as the tokens: the results of one step are read after the next one was launched.
        self._host_scores = [torch.zeros(self._scores.shape, dtype=torch.float64, pin_memory=is_cuda) for _ in range(2)]
        self._requests = _RowParameters([])  # of the last step
        self._is_uploaded = False  # its parameters are on the device

    @staticmethod
    def fits(plan: Sequence[ScheduledRequest]) -> bool:
        """Whether every token of a plan can be sampled here: a request may have too many biases, or too many tokens."""
        requests = [scheduled.request for scheduled in plan if not scheduled.request.is_plain]
        return all(_num_biases(r.sampling) <= MAX_BIASES and r.max_total_tokens < MAX_SEEN for r in requests)

    def write_padding(self, size: int) -> None:
        """Writes the inputs of a step that is computed without requests: every row is greedy and counts nothing."""
        self._inputs.write(UNIFORM, np.zeros(size), np.float64)
        self._inputs.write(FLAGS, np.zeros(size, np.int64))
        self._inputs.write(MASK_ROWS, np.full(size, -1))
        _RowParameters([]).write(self._inputs, size, self._vocab_size)
        self._is_uploaded = False  # those of requests have been overwritten

    def write(self, ordered: Sequence[ScheduledRequest], size: int) -> tuple[int, int]:
        """Writes the inputs of a step whose parts are in the order of their rows, padded to `size` rows.

        Returns the kind of sampling, and the end of the inputs that must be uploaded. `StepInputs.begin` was called.
        """
        requests = [scheduled.request for scheduled in ordered]
        if requests != self._requests.requests:  # requests are equal if they are identical
            self._requests, self._is_uploaded = _RowParameters(requests), False
        parameters, kind = self._requests, GREEDY
        if parameters.random:
            kind = RANDOM
            noise = np.zeros(len(ordered))
            noise[parameters.random] = uniform_at(parameters.seeds, [ordered[row].end for row in parameters.random])
            self._inputs.write(UNIFORM, noise, np.float64)
        if parameters.changed and self._write_changes(ordered, size):
            kind = CHANGED
        if kind == GREEDY:
            return kind, UNIFORM
        if self._is_uploaded:
            return kind, TEMPERATURE
        parameters.write(self._inputs, size, self._vocab_size)
        self._is_uploaded = True
        return kind, NUM_ROWS

    def collect_masks(self) -> tuple[dict[int, str], frozenset[int]]:
        """Uploads the masks of the step that was written last, between the model and the sampling.

        Returns errors and late masks by row. The result of a step with masks must be read before the next one is
        written, since the host has memory for those of one step.
        """
        rows = self._requests.constrained
        if not rows:
            return {}, frozenset()
        errors, late = self._collector.fill([self._requests.requests[row] for row in rows], self._host_masks)
        self._masks[: len(rows)].copy_(self._host_masks[: len(rows)], non_blocking=True)
        return {rows[index]: error for index, error in errors.items()}, frozenset(rows[index] for index in late)

    def compute(self, kind: int, size: int, seq_lens: Sequence[int] = ()) -> None:
        """Samples the tokens of a step from its logits. This is captured: reads and writes buffers only."""
        chosen, logits = self._inputs.row(CHOSEN, size), self._logits[:size]
        if kind == GREEDY:
            chosen.copy_(self._ops.argmax(logits))
            return
        rows = self._rows(size)
        chosen.copy_(self._ops.sample_rows(logits, rows, has_changes=kind == CHANGED))
        if kind == CHANGED:
            found = self._ops.score_rows(logits, rows, chosen, self._num_top)
            scores = self._scores[:size]
            scores[:, 0], scores[:, 1] = found.own, found.ranks
            scores[:, 2 : 2 + self._num_top], scores[:, 2 + self._num_top :] = found.top_ids, found.top

    def results(self, errors: Mapping[int, str], late: frozenset[int]) -> StepResults | None:
        """Begins to copy the results of the step that was launched last. None if there are only tokens."""
        wanted = self._requests.num_alternatives
        if not wanted and not self._requests.constrained:
            return None
        self._host_scores.reverse()
        if wanted:
            size = max(wanted) + 1
            self._host_scores[0][:size].copy_(self._scores[:size], non_blocking=True)
        return StepResults(self._host_scores[0], wanted, errors, late)

    def _rows(self, size: int) -> StepRows:
        row, float32 = self._inputs.row, torch.float32
        return StepRows(
            input_ids=row(INPUT_IDS, size),
            flags=row(FLAGS, size),
            temperature=row(TEMPERATURE, size, float32),
            uniform=row(UNIFORM, size, torch.float64),
            top_k=row(TOP_K, size),
            top_p=row(TOP_P, size, float32),
            min_p=row(MIN_P, size, float32),
            presence=row(PRESENCE, size, float32),
            frequency=row(FREQUENCY, size, float32),
            repetition=row(REPETITION, size, float32),
            marks=self._marks.marks[:size],
            biases=self._marks.biases[:size],
            mask_rows=row(MASK_ROWS, size),
            masks=self._masks[:size],
        )

    def _write_changes(self, ordered: Sequence[ScheduledRequest], size: int) -> bool:
        """Writes flags and masks' rows, and those marks that have to be written again. Whether anything is changed."""
        parameters = self._requests
        flags, mask_rows = np.zeros(size, np.int64), np.full(size, -1)  # rows of padding count nothing
        flags[[*parameters.num_alternatives]] = SCORED
        mask_rows[parameters.constrained] = range(len(parameters.constrained))
        for row in parameters.marked:
            flags[row] |= self._marks.prepare(row, ordered[row])
        self._marks.upload()
        self._inputs.write(FLAGS, flags)
        self._inputs.write(MASK_ROWS, mask_rows)
        return bool(flags.any() or parameters.constrained)


class _RowParameters:
    """The requests of a step by row, and what does not change about them from step to step."""

    def __init__(self, requests: list[Request]) -> None:
        self.requests = requests
        samplings = [request.sampling for request in requests]
        self.random = [row for row, s in enumerate(samplings) if s.temperature >= GREEDY_BELOW_TEMPERATURE]
        self.seeds = mix_seeds([requests[row].seed for row in self.random])
        self.marked = [row for row, s in enumerate(samplings) if s.has_penalties or _num_biases(s)]
        self.constrained = [row for row, request in enumerate(requests) if request.grammar]
        self.num_alternatives = {row: s.logprobs for row, s in enumerate(samplings) if s.logprobs is not None}
        self.changed = bool(self.marked or self.constrained or self.num_alternatives)

    def write(self, inputs: StepInputs, size: int, vocab_size: int) -> None:
        """Writes the parameters. Rows of padding are greedy."""
        samplings = [request.sampling for request in self.requests]
        temperature = np.zeros(size, np.float32)
        temperature[self.random] = [samplings[row].temperature for row in self.random]
        inputs.write(TEMPERATURE, temperature, np.float32)
        inputs.write(TOP_K, [min(s.top_k or vocab_size, vocab_size) for s in samplings])
        inputs.write(TOP_P, [s.top_p for s in samplings], np.float32)
        inputs.write(MIN_P, [s.min_p for s in samplings], np.float32)
        inputs.write(PRESENCE, [s.presence_penalty for s in samplings], np.float32)
        inputs.write(FREQUENCY, [s.frequency_penalty for s in samplings], np.float32)
        inputs.write(REPETITION, [s.repetition_penalty for s in samplings], np.float32)


class _Marks:
    """Marks and biases of each row on the device, and what the host knows about them."""

    def __init__(self, max_size: int, vocab_size: int, device: torch.device) -> None:
        self.marks = torch.zeros((max_size, vocab_size), dtype=torch.int32, device=device)
        self.biases = torch.zeros((max_size, MAX_BIASES + 1), dtype=torch.float32, device=device)
        self._requests: list[Request | None] = [None] * max_size  # whose marks they are
        self._num_counted = [0] * max_size  # how many of its tokens they count
        self._written: list[Mapping[int, float]] = [{}] * max_size  # its biases
        self._stale: dict[int, tuple[Request, Mapping[int, float]]] = {}  # what `upload` writes, by row

    def prepare(self, row: int, scheduled: ScheduledRequest) -> int:
        """Returns the row's flags for this part of a step, after which all tokens up to its own are counted."""
        request, start = scheduled.request, scheduled.start
        # A token that is not known yet lies between the known ones and the one to sample.
        unknown = (0,) * (scheduled.end - len(request.token_ids))
        biases = NextToken(request, unknown).biases()
        has_penalties = request.sampling.has_penalties
        if not has_penalties and not biases:
            return 0
        is_counted = not has_penalties or self._num_counted[row] in (start, scheduled.end)
        written = self._written[row]
        if self._requests[row] is not request or not is_counted or (written is not biases and written != biases):
            self._stale[row] = request, biases
            self._requests[row], self._written[row] = request, biases
            self._num_counted[row] = len(request.token_ids)
        if not has_penalties or self._num_counted[row] == scheduled.end:
            return MARKED
        self._num_counted[row] = scheduled.end
        return MARKED | COUNTS_INPUT

    def upload(self) -> None:
        """Writes what `prepare` has found to be stale."""
        if not self._stale:
            return
        device, vocab_size = self.marks.device, self.marks.shape[1]
        places, marks, bias_places, values = [], [], [], []
        for row, (request, biases) in self._stale.items():
            if request.sampling.has_penalties:
                counts = request.penalty_counts
                places.append(row * vocab_size + np.array(counts.token_ids, np.int64))
                marks.append(np.array(counts.counts, np.int32) + 1)
            indexes = np.arange(1, len(biases) + 1)
            places.append(row * vocab_size + np.fromiter(biases, np.int64, len(biases)))
            marks.append((indexes << SEEN_BITS).astype(np.int32))
            bias_places.append(row * self.biases.shape[1] + indexes)
            values.append(np.fromiter(biases.values(), np.float32, len(biases)))
        self.marks.index_fill_(0, _uploaded([np.array([*self._stale])], device), 0)
        self.marks.view(-1).index_add_(0, _uploaded(places, device), _uploaded(marks, device))
        self.biases.view(-1).index_copy_(0, _uploaded(bias_places, device), _uploaded(values, device))
        self._stale = {}


def _num_biases(sampling: SamplingParams) -> int:
    """How many biases a token of such a request has at most."""
    stops = len(sampling.stop_token_ids) if sampling.min_tokens else 0
    return len(sampling.logit_bias) + len(sampling.bad_words) + stops


def _uploaded(parts: Sequence[NDArray[np.generic]], device: torch.device) -> Tensor:
    """The parts one after the other on the device, without waiting for it."""
    whole = torch.from_numpy(np.concatenate(parts))
    return whole.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else whole
