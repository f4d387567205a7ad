"""Choose the next tokens on the GPU; a launch reads nothing of the host.

A request's *slot* has its options, token index, output counts and min_tokens, so the next step can
be launched before this one's tokens are known. Twin on the CPU: paged_engine/sampler.py.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from kvrelay.kernels.fused_sampling import sample
from kvrelay.kernels.sampling_slots import MAX_BIASES, SlotTables, TokenMask, note_of, record_of
from kvrelay.kernels.uploads import Uploads
from kvrelay.paged_engine.guide import RowMasks, words_for
from kvrelay.paged_engine.request import Request
from kvrelay.paged_engine.sampler import SLICE_ROWS, Columns, scores_of
from kvrelay.wire.outputs import TokenLogprobs
from kvrelay.wire.sampling import SamplingParams

__all__ = ["GpuSampler", "SamplePlan", "Sampled", "TokenMask", "to_host"]

_Ints = npt.NDArray[np.int32]

_CUT, _ADJUSTED, _LOGPROBS = 1, 2, 4


@dataclass(frozen=True, slots=True)
class SamplePlan:
    """A launch's needs; equal `cut` and `adjusted` run the same kernels."""

    rows: int
    cut: bool = False  # top-k, top-p or min-p
    adjusted: bool = False  # bias, min_tokens or penalties
    logprobs: dict[int, int] = field(default_factory=dict)  # row -> likeliest
    logprob_rows: torch.Tensor | None = None  # int64, on the device


@dataclass(frozen=True, slots=True)
class _Admission:
    record: bytes
    newest: int
    notes: _Ints | None  # [2, tokens]: token ids, notes
    biases: _Ints  # [2, tokens]: ascending token ids, fp32 bits


class GpuSampler:
    def __init__(
        self,
        *,
        max_slots: int,
        vocab_size: int,
        eos_token_ids: Collection[int],
        device: torch.device,
        spare_slots: int = 0,
    ) -> None:
        """Allocate the tables; `spare_slots` come behind the others."""
        self._eos = tuple(token for token in eos_token_ids if token < vocab_size)
        self._vocab, self._device = vocab_size, device
        self._tables = SlotTables.empty(max_slots, vocab_size, device, spare_slots)
        self._features = [0] * (max_slots + spare_slots)
        self._staged: dict[int, _Admission] = {}
        self._uploads = Uploads(device)

    @property
    def sampled(self) -> torch.Tensor:
        """Return int64 newest tokens of all slots, also before the host knows them."""
        return self._tables.sampled

    def admit(self, slot: int, request: Request) -> None:
        """Give a slot to a request whose tokens are all known."""
        assert not request.num_pending, (
            f"request {request.request_id} has tokens that the host has not seen"
        )
        params, outputs = request.params, request.output_tokens
        biases = dict(params.logit_bias)
        assert len(biases) <= MAX_BIASES, (
            f"{len(biases)} tokens with a bias; the tables hold {MAX_BIASES}"
        )
        features = self._features[slot] = _features(params, outputs)
        self._staged[slot] = _Admission(
            self._record(params, outputs),
            request.token_ids[-1],
            self._notes(request, _is_penalized(params), sorted(biases))
            if features & _ADJUSTED
            else None,
            _pairs(
                np.array(sorted(biases), np.int32),
                np.array([biases[t] for t in sorted(biases)], np.float32),
            ),
        )

    def set(self, slot: int, params: SamplingParams, token_index: int, newest: int) -> None:
        self._features[slot] = _features(params, token_index)
        nothing = _pairs(np.zeros(0, np.int32), np.zeros(0, np.float32))
        self._staged[slot] = _Admission(self._record(params, token_index), newest, None, nothing)

    @staticmethod
    def is_unadjusted(params: SamplingParams, outputs: int) -> bool:
        """Return whether logits are taken as they are from token number `outputs` on."""
        return not _features(params, outputs) & _ADJUSTED

    def prepare(self, slots: Sequence[int], requests: Sequence[Request]) -> SamplePlan:
        """Upload what is staged; return what the rows need, row i being slots[i]."""
        self._upload()
        needs = 0
        logprobs: dict[int, int] = {}
        for row, slot in enumerate(slots):
            needs |= self._features[slot]
            if self._features[slot] & _LOGPROBS:
                logprobs[row] = requests[row].params.logprobs or 0
        rows = self._send(np.array(list(logprobs), np.int32)).long() if logprobs else None
        return SamplePlan(len(slots), bool(needs & _CUT), bool(needs & _ADJUSTED), logprobs, rows)

    def mask(self, masks: RowMasks, rows: int) -> TokenMask:
        mask_of_row = np.full(-(-rows // 4) * 4, -1, np.int32)  # what follows begins at 16 bytes
        mask_of_row[masks.rows] = np.arange(len(masks.rows))
        flat = self._send(np.concatenate((mask_of_row, masks.words.view(np.int32).reshape(-1))))
        return TokenMask(flat[len(mask_of_row) :].view(masks.words.shape), flat[:rows])

    def launch(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        plan: SamplePlan,
        mask: TokenMask | None = None,
    ) -> Sampled:
        """Queue a token per row; logits [rows or more, vocab], slots int32 [rows], -1: padding."""
        return self.read(logits, self.draw(logits, slots, plan, mask), plan)

    @torch.inference_mode()
    def draw(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        plan: SamplePlan,
        mask: TokenMask | None = None,
    ) -> torch.Tensor:
        """Return int64 tokens [rows] on the device; can be captured."""
        return sample(logits, slots, self._tables, cut=plan.cut, adjusted=plan.adjusted, mask=mask)

    @torch.inference_mode()
    def read(self, logits: torch.Tensor, tokens: torch.Tensor, plan: SamplePlan) -> Sampled:
        if plan.logprob_rows is None:
            return Sampled(tokens, plan, None)
        most = max(plan.logprobs.values())
        parts = [
            scores_of(logits.index_select(0, rows), tokens.index_select(0, rows), most)
            for rows in torch.split(plan.logprob_rows, SLICE_ROWS)
        ]
        return Sampled(tokens, plan, tuple(map(torch.cat, zip(*parts, strict=True))))

    def warm_up(self, dtype: torch.dtype) -> None:
        logits = torch.zeros(1, self._vocab, dtype=dtype, device=self._device)
        padding = torch.full((1,), -1, dtype=torch.int32, device=self._device)
        words = torch.zeros(1, words_for(self._vocab), dtype=torch.int32, device=self._device)
        row = torch.zeros(1, dtype=torch.int64, device=self._device)
        for mask in (None, TokenMask(words, padding)):
            for cut, adjusted in itertools.product((False, True), repeat=2):
                self.launch(logits, padding, SamplePlan(1, cut, adjusted, {0: 1}, row), mask)

    def _record(self, params: SamplingParams, token_index: int) -> bytes:
        return record_of(
            seed=params.seed,
            choice=params.choice,
            token_index=token_index,
            temperature=params.temperature,
            top_k=params.top_k if params.top_k < self._vocab else 0,
            top_p=params.top_p,
            min_p=params.min_p,
            repetition=params.repetition_penalty,
            presence=params.presence_penalty,
            frequency=params.frequency_penalty,
            min_tokens=params.min_tokens,
            biases=len(dict(params.logit_bias)),
        )

    def _notes(self, request: Request, penalized: bool, biased: list[int]) -> _Ints:
        params = request.params
        notes = np.zeros(self._vocab, np.int32)
        if penalized:
            tokens = np.asarray(request.token_ids)
            notes += note_of(
                count=np.bincount(tokens[request.prompt_tokens :], minlength=self._vocab)
            ).astype(np.int32)
            notes[tokens[: request.prompt_tokens]] |= note_of(in_prompt=1)
        if request.output_tokens < params.min_tokens:
            notes[[*self._eos, *params.stop_token_ids]] |= note_of(ends=1)
        notes[biased] |= note_of(has_bias=1)
        tokens = notes.nonzero()[0].astype(np.int32)
        return np.stack((tokens, notes[tokens]))

    @torch.inference_mode()
    def _upload(self) -> None:
        if not self._staged:
            return
        slots = np.array(list(self._staged), np.int32)
        staged, self._staged = list(self._staged.values()), {}
        with_notes = [
            (slot, a.notes) for slot, a in zip(slots, staged, strict=True) if a.notes is not None
        ]
        pieces = [
            np.stack((slots, np.array([a.newest for a in staged], np.int32))),
            np.frombuffer(b"".join(a.record for a in staged), np.int32).reshape(len(staged), -1),
            np.array([slot for slot, _ in with_notes], np.int32),
            _by_slot(with_notes),
            _by_slot([(slot, a.biases) for slot, a in zip(slots, staged, strict=True)]),
        ]
        flat = self._send(np.concatenate([piece.reshape(-1) for piece in pieces]))
        sections = torch.split(flat, [piece.size for piece in pieces])
        newest, records, noted, notes, biases = (
            section.view(piece.shape) for section, piece in zip(sections, pieces, strict=True)
        )
        tables, places = self._tables, newest[0].long()
        tables.sampled.index_copy_(0, places, newest[1].long())
        tables.parameters.index_copy_(0, places, records)
        if noted.numel():  # a slot's former request may have left some
            tables.notes.index_fill_(0, noted.long(), 0)
        if notes.numel():
            tables.notes.view(-1).index_copy_(0, notes[0].long() * self._vocab + notes[2], notes[3])
        if biases.numel():
            pairs = biases[2:].T.contiguous()
            tables.biases.view(-1, 2).index_copy_(
                0, biases[0].long() * MAX_BIASES + biases[1], pairs
            )

    def _send(self, array: _Ints) -> torch.Tensor:
        host = torch.from_numpy(array)
        return self._uploads.send(host.pin_memory() if self._device.type == "cuda" else host)


class Sampled:
    def __init__(
        self,
        tokens: torch.Tensor,
        plan: SamplePlan,
        logprobs: Columns | None,
    ) -> None:
        self.tokens = tokens
        self.logprobs = logprobs
        self._plan = plan
        self._on_host: list[torch.Tensor] | None = None
        self._copied: torch.cuda.Event | None = None

    def start_copy(self) -> None:
        self._on_host = [to_host(tensor) for tensor in (self.tokens, *(self.logprobs or ()))]
        if self.tokens.is_cuda:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    @property
    def is_done(self) -> bool:
        if self._copied is None:
            return self._on_host is not None
        return bool(self._copied.query())  # type: ignore[no-untyped-call]

    def wait(self, deadline_s: float | None = None) -> tuple[list[int], list[TokenLogprobs | None]]:
        """Return tokens and log-probabilities once they are on the host.

        Raises TimeoutError after `deadline_s`.
        """
        if self._on_host is None:
            self.start_copy()
        assert self._on_host is not None
        if self._copied is not None:
            if deadline_s is not None:
                _await(self._copied, deadline_s)
            self._copied.synchronize()
        plan = self._plan
        tokens: list[int] = self._on_host[0].tolist()[: plan.rows]
        logprobs: list[TokenLogprobs | None] = [None] * plan.rows
        if self.logprobs is not None:
            columns = (tensor.tolist() for tensor in self._on_host[1:])
            for (row, count), chosen, _, ids, values in zip(
                plan.logprobs.items(), *columns, strict=True
            ):
                logprobs[row] = TokenLogprobs(
                    tokens[row], chosen, tuple(ids[:count]), tuple(values[:count])
                )
        return tokens, logprobs


def _features(params: SamplingParams, outputs: int) -> int:
    cut = params.temperature > 0 and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)
    adjusted = _is_penalized(params) or bool(params.logit_bias) or outputs < params.min_tokens
    return cut * _CUT | adjusted * _ADJUSTED | (params.logprobs is not None) * _LOGPROBS


def _is_penalized(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1.0 or bool(
        params.presence_penalty or params.frequency_penalty
    )


def _await(event: torch.cuda.Event, deadline_s: float) -> None:
    until = time.monotonic() + deadline_s
    while not event.query():  # type: ignore[no-untyped-call]
        if time.monotonic() > until:
            raise TimeoutError(f"the GPU has not finished a step within {deadline_s:g} s")
        time.sleep(2e-5)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy on the host, valid once the device has done what is queued so far."""
    if not tensor.is_cuda:
        return tensor.clone()
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(
        tensor, non_blocking=True
    )


def _pairs(tokens: _Ints, values: npt.NDArray[np.float32]) -> _Ints:
    return np.stack((tokens, values.view(np.int32)))


def _by_slot(columns: Sequence[tuple[int, _Ints]]) -> _Ints:
    if not columns:
        return np.zeros((4, 0), np.int32)
    columns_of_slots = [
        np.stack((np.full(c.shape[1], slot, np.int32), np.arange(c.shape[1], dtype=np.int32), *c))
        for slot, c in columns
    ]
    return np.concatenate(columns_of_slots, axis=1)
