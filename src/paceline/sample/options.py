"""SamplingTable: every row's sampling options, on the device and mirrored on the host.

The device columns are what kernels read: the options are data of a step, not its shape. The host's
mirror answers one question before a step is launched, "which options are in play?", so that a plain
greedy step costs an argmax and nothing else.

Letters: R row capacity (row R is a spare for padding), B rows of a step, A path length, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from paceline.core.errors import RequestError
from paceline.core.request import SamplingParams
from paceline.core.sampling_rules import MAX_DEVICE_STOP_IDS
from paceline.ops.staged import StagedTable, sent
from paceline.sample.noise import noise_key
from paceline.sample.slots import OptionSlots, ids_tensor

# What a row's options ask for; a step ORs its rows' words. Plain ints: this is the host's hot path.
NOISE: Final = 1  # temperature above 0
MASK: Final = 2  # allowed or banned tokens
MIN_TOKENS: Final = 4
BIAS: Final = 8
PENALTY: Final = 16
MIN_P: Final = 32
TOP_K: Final = 64
TOP_P: Final = 128
FAR_STOPS: Final = 256  # with MIN_TOKENS: more stop ids than the device's columns hold
FILTERS: Final = MIN_P | TOP_K | TOP_P
EDITS: Final = (
    MASK | MIN_TOKENS | FAR_STOPS | BIAS | PENALTY
)  # these change logits before the temperature
PROCESSING: Final = NOISE | EDITS  # without any of these the target's token is a plain argmax

_COLDEST: Final = 1e-5  # dividing by less overflows float32; from here on sampling is greedy anyway


@dataclass(frozen=True, slots=True, kw_only=True)
class RowOptions:
    """The host's copy of one row: what `rowwise` reads instead of device columns."""

    flags: int = 0
    key: int = 0  # noise key
    temperature: float = 0.0
    log_min_p: float = -math.inf
    top_k: int = 0  # V when off
    top_p: float = 1.0
    slot: int = 0
    prompt_len: int = 0
    min_tokens: int = 0
    limit: int = 0
    stop_ids: frozenset[int] = frozenset()  # those that the device checks
    num_logprobs: int = -1  # -1: none asked; 0: the emitted token's; k: and the top k's


class SamplingTable:
    """Per-row sampling state. Written by the row table's owner only.

    Args:
        num_rows: R.
        vocab_size: V.
        device: where the columns live.
        num_option_slots: P, rows that may have penalties, biases or token masks at the same time.

    Attributes:
        temperature, top_p, log_min_p, repetition, presence, frequency: [R+1] float64.
        top_k, key, min_tokens, prompt_lens, limits, slot, num_top: [R+1] int64. `limits` is the most
            known tokens of a row (prompt and output, `next_token` included).
        stop_ids: [R+1, 16] int64, -1 padded.
        live: [R+1] bool; False for free rows, for row R, and once a row has ended.
        host_stop_ids: row -> the stop ids beyond the first 16. The device does not see them: the
            engine must look for them in what was emitted. (min_tokens bans them all the same.)
    """

    def __init__(
        self, num_rows: int, vocab_size: int, device: torch.device | str, num_option_slots: int
    ) -> None:
        self.num_rows, self.vocab_size = num_rows, vocab_size
        self.device = torch.device(device)
        self._floats = StagedTable(torch.zeros(num_rows + 1, 6, dtype=torch.float64), self.device)
        self._ints = StagedTable(torch.zeros(num_rows + 1, 7, dtype=torch.int64), self.device)
        self._stops = StagedTable(
            torch.full((num_rows + 1, MAX_DEVICE_STOP_IDS), -1, dtype=torch.int64), self.device
        )
        floats, ints, self.stop_ids = self._floats.tensor, self._ints.tensor, self._stops.tensor
        self.temperature, self.top_p, self.log_min_p = floats[:, 0], floats[:, 1], floats[:, 2]
        self.repetition, self.presence, self.frequency = floats[:, 3], floats[:, 4], floats[:, 5]
        self.top_k, self.key, self.min_tokens = ints[:, 0], ints[:, 1], ints[:, 2]
        self.prompt_lens, self.limits, self.slot = ints[:, 3], ints[:, 4], ints[:, 5]
        self.num_top = ints[:, 6]
        self._alive: dict[int, bool] = {}  # what the host has to say about `live`, not yet sent
        self.live = torch.zeros(num_rows + 1, dtype=torch.bool, device=self.device)
        self.host_stop_ids: dict[int, frozenset[int]] = {}
        self.slots = OptionSlots(num_option_slots, vocab_size, self.device)
        self.token_ids = torch.arange(vocab_size, dtype=torch.int32, device=self.device)  # [V]
        self._neutral = RowOptions(top_k=vocab_size, slot=num_option_slots)
        self._host = [self._neutral] * (num_rows + 1)
        self._bans: dict[int, list[Tensor]] = {}
        self._far_stops: Tensor | None = None
        for row in range(num_rows + 1):
            self._write(row, self._neutral, SamplingParams(temperature=0.0), ())
        self.apply()

    # -- admission ----------------------------------------------------------------------------

    def check(self, params: SamplingParams) -> None:
        """Refuse options that this table can never serve.

        Raises:
            RequestError: a token id outside the vocabulary, nothing left to emit, or no slots.
        """
        self.slots.check(params)
        if self.needs_slot(params) and self.slots.num_slots == 0:
            msg = (
                "penalties, logit_bias and token masks need an option slot and this engine has "
                "none; give it option slots or drop these options"
            )
            raise RequestError(msg)

    @staticmethod
    def needs_slot(params: SamplingParams) -> bool:
        """Whether these options need vocabulary-sized state."""
        return bool(_flags(params, has_stops=False) & (MASK | BIAS | PENALTY))

    def has_slot(self, params: SamplingParams) -> bool:
        """Whether a row with these options could be assigned now; False: admission waits."""
        return self.slots.num_free > 0 or not self.needs_slot(params)

    def assign(
        self,
        row: int,
        params: SamplingParams,
        *,
        seed: int,
        sample_index: int,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        stop_ids: Iterable[int],
        limit: int,
    ) -> None:
        """Give `row` to a request; it becomes live.

        Args:
            row: 0 ... R-1, free.
            params: the request's options.
            seed: resolved seed.
            sample_index: which of the request's n samples.
            prompt_ids: the prompt.
            output_ids: everything emitted so far, `next_token` included: counts are rebuilt from it
                when a preempted request resumes.
            stop_ids: resolved stop ids, end-of-text included.
            limit: most known tokens: min(len(prompt_ids) + max_tokens, context window).
        """
        self.release(row)
        # Files may name end-of-text ids that no token has, and no 64-bit column holds.
        stops = [i for i in dict.fromkeys(stop_ids) if 0 <= i < 1 << 63]
        near, far = stops[:MAX_DEVICE_STOP_IDS], stops[MAX_DEVICE_STOP_IDS:]
        flags = _flags(params, has_stops=bool(stops))
        if flags & MIN_TOKENS and far:
            flags |= FAR_STOPS
        slot = self.slots.num_slots
        if self.needs_slot(params):
            assert self.slots.num_free > 0, "has_slot was not asked before assign"
            slot = self.slots.take(params, prompt_ids, output_ids)
        options = RowOptions(
            flags=flags,
            key=noise_key(seed, sample_index),
            temperature=max(params.temperature, _COLDEST) if params.temperature > 0 else 0.0,
            log_min_p=math.log(params.min_p) if params.min_p > 0 else -math.inf,
            top_k=min(params.top_k, self.vocab_size) if params.top_k > 0 else self.vocab_size,
            top_p=float(params.top_p),
            slot=slot,
            prompt_len=len(prompt_ids),
            min_tokens=params.min_tokens,
            limit=limit,
            stop_ids=frozenset(near),
            num_logprobs=-1 if params.logprobs is None else params.logprobs,
        )
        self._write(row, options, params, near)
        if far:
            self.host_stop_ids[row] = frozenset(far)
        if flags & MIN_TOKENS:
            parts = (near, far) if far else (near,)
            self._bans[row] = [ids_tensor(p, self.vocab_size, self.device) for p in parts]
        if flags & FAR_STOPS:
            self._write_far_stops(row, self._bans[row][1])
        self._set_live(row, alive=True)

    def release(self, row: int) -> None:
        """The row is free again: not live, no slot, neutral options."""
        held = self._host[row].slot
        if held < self.slots.num_slots:
            self.slots.give_back(held)
        if self._host[row].flags & FAR_STOPS:
            self._write_far_stops(row, self._bans[row][1][:0])
        if self._host[row] is not self._neutral:
            self._write(row, self._neutral, SamplingParams(temperature=0.0), ())
        self.host_stop_ids.pop(row, None)
        self._bans.pop(row, None)
        self._set_live(row, alive=False)

    def apply(self) -> None:
        """Bring rows that were assigned or released to the device, before a step reads them."""
        for table in (self._floats, self._ints, self._stops):
            table.apply()
        if self._alive:
            rows = torch.tensor(list(self._alive))
            alive = torch.tensor(list(self._alive.values()))
            self.live[sent(rows, self.device)] = sent(alive, self.device)
            self._alive.clear()

    # -- inside a step ------------------------------------------------------------------------

    def commit(self, rows: Tensor, tokens: Tensor, host_rows: Sequence[int]) -> None:
        """Emitted tokens enter the counts; free when no row of the step has penalties.

        Args:
            rows: [B] int64.
            tokens: [B, A] int64 emitted tokens, -1 padded.
            host_rows: the distinct rows, as the host knows them.
        """
        if self.in_play(host_rows) & PENALTY:
            self.slots.add(self.slot[rows], tokens)

    def in_play(self, host_rows: Iterable[int]) -> int:
        """OR of the rows' option words."""
        flags = 0
        for row in host_rows:
            flags |= self._host[row].flags
        return flags

    def host(self, row: int) -> RowOptions:
        """The host's copy of a row's options."""
        return self._host[row]

    @contextmanager
    def in_play_as(self, options: int, num_logprobs: int) -> Iterator[list[int]]:
        """Host rows of a step that is recorded for these options before anybody's rows have them.

        Within the context the spare row has them, on the host alone.

        Args:
            options: word of the options.
            num_logprobs: as `num_logprobs` returns it.
        """
        neutral = self._host[self.num_rows]
        self._host[self.num_rows] = replace(neutral, flags=options, num_logprobs=num_logprobs)
        try:
            yield [self.num_rows]
        finally:
            self._host[self.num_rows] = neutral

    def num_logprobs(self, host_rows: Iterable[int]) -> int:
        """Most top log-probabilities that a row of the step asks for; -1: none asks for any."""
        return max((self._host[row].num_logprobs for row in host_rows), default=-1)

    def bans(self, row: int) -> list[Tensor]:
        """A row's stop ids within the vocabulary: the device's 16, then those beyond; [K] int64.

        Empty where min_tokens is not in play.
        """
        return self._bans.get(row, [])

    def far_stops(self, rows: Tensor) -> Tensor:
        """Stop ids beyond the device's columns, as bits, lowest first: [m] int64 -> [m, V / 32] int32.

        For steps with `FAR_STOPS` in play. They are rare, so memory for them is only taken when the
        first row has any; from then on it stays where it is, as captured graphs read it.
        """
        assert self._far_stops is not None, "a row with FAR_STOPS was assigned"
        return self._far_stops[rows]

    def ends(self, rows: Tensor, tokens: Tensor, known: Tensor) -> Tensor:
        """Whether emitting `tokens` ends their rows: a stop id, or the limit.

        Args:
            rows: [M] int64.
            tokens: [M] int64 the token emitted.
            known: [M] int64 tokens known with it, prompt included.

        Returns:
            [M] bool.
        """
        stop = (self.stop_ids[rows] == tokens.unsqueeze(1)).any(dim=1)
        return stop | (known >= self.limits[rows])

    # -- private ------------------------------------------------------------------------------

    def _write(
        self, row: int, options: RowOptions, params: SamplingParams, stop_ids: Sequence[int]
    ) -> None:
        self._host[row] = options
        self._floats.host[row] = torch.tensor(
            [
                options.temperature,
                options.top_p,
                options.log_min_p,
                params.repetition_penalty,
                params.presence_penalty,
                params.frequency_penalty,
            ],
            dtype=torch.float64,
        )
        self._ints.host[row] = torch.tensor(
            [
                options.top_k,
                options.key,
                options.min_tokens,
                options.prompt_len,
                options.limit,
                options.slot,
                options.num_logprobs,
            ],
            dtype=torch.int64,
        )
        self._stops.host[row] = torch.tensor(
            [*stop_ids, *[-1] * (MAX_DEVICE_STOP_IDS - len(stop_ids))], dtype=torch.int64
        )
        for table in (self._floats, self._ints, self._stops):
            table.touch(row)

    def _write_far_stops(self, row: int, token_ids: Tensor) -> None:
        if self._far_stops is None:
            shape = (self.num_rows + 1, -(-self.vocab_size // 32))
            self._far_stops = torch.zeros(shape, dtype=torch.int32, device=self.device)
        bits = torch.zeros(self._far_stops.shape[1] * 32, dtype=torch.int64, device=self.device)
        bits[token_ids] = 1
        places = torch.arange(32, dtype=torch.int64, device=self.device)
        # The sum of 32 bits is below 2**32; as int32 it keeps them all.
        self._far_stops[row] = (bits.view(-1, 32) << places).sum(1).to(torch.int32)

    def _set_live(self, row: int, *, alive: bool) -> None:
        """The device clears this column itself, so it has no mirror: what is new is kept apart."""
        if self.device.type == "cpu":
            self.live[row] = alive
        else:
            self._alive[row] = alive


def _flags(params: SamplingParams, *, has_stops: bool) -> int:
    flags = 0
    if params.temperature > 0:
        flags |= NOISE
        # At temperature 0 these three keep the best token, which is all that matters.
        flags |= MIN_P if params.min_p > 0 else 0
        flags |= TOP_K if params.top_k > 0 else 0
        flags |= TOP_P if params.top_p < 1 else 0
    if params.allowed_token_ids is not None or params.banned_token_ids:
        flags |= MASK
    if params.min_tokens > 0 and has_stops:
        flags |= MIN_TOKENS
    if params.logit_bias:
        flags |= BIAS
    if params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty:
        flags |= PENALTY
    return flags
