"""What one forward pass is told: mode, batch, attention callable, output.

Letters: B rows in the step, T tokens in the pass, H hidden size, Hq/Hkv query and key/value heads,
D head size, G pages per row, W = ceil(N / 64) mask words. Index tensors are int64: torch indexing
wants it, and slot x stride overflows int32 on real pools. Only the page table is int32.

Not here: who owns the tensors (`kv`), how attention is computed (`attention`), who makes batches
(`engine/buffers.py`).
"""

from __future__ import annotations

import enum
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class ForwardMode(enum.Enum):
    """Shape contract of a pass; a mode exists only if it changes what a kernel may rely on.

    EXTEND: rows have different, possibly long query lengths, causal: prefill, chunked prefill.
    BLOCK: a few queries per row, flat, with visibility bits over each row's tail: decode, verify,
    EAGLE draft steps, DFlash blocks. (SGLang's DECODE, TARGET_VERIFY and DRAFT_EXTEND in one.)
    """

    EXTEND = "extend"
    BLOCK = "block"


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """Inputs of one pass. All tensors live on the runner's device.

    A row's keys are its `prefix_lens[b]` cached tokens, which every query of the row may see, then
    its tail of `tail_lens[b]` keys whose last entries are this pass's own queries. Tail key j of
    row b lies at the slot of position `prefix_lens[b] + j`; its *position* (for rope and windows)
    is its own, which for a tree differs from its slot's place.

    Worked example, one row, prefix 5, tree root(0) -> a(1), b(2); a -> c(3):
        positions = [5, 6, 6, 7]; slots = places 5, 6, 7, 8 of the row;
        mask = [0b0001, 0b0011, 0b0101, 0b1011]: c sees root, a and itself.
    """

    mode: ForwardMode
    num_rows: int
    q_len: int  # longest query of a row (host value)
    rows: Tensor  # [B] int64 row ids
    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    slots: Tensor  # [T] int64; -1 writes nothing
    prefix_lens: Tensor  # [B] int64
    cu_q: Tensor  # [B+1] int64 query offsets
    tail_lens: Tensor  # [B] int64
    mask: Tensor | None  # [T, W] int64 visibility bits over the own row's tail; None: causal
    pages: Tensor  # [B, G] int32 page ids
    logits_at: Tensor | None = None  # [M] int64 flat positions that are picked; None: all
    features: Tensor | None = None  # [T, F] extra input of draft networks

    def check(self) -> None:
        """Assert the contract of shapes and values; reads the device. On in tests, off in service."""
        tokens, batch = self.token_ids.shape[0], self.prefix_lens.shape[0]
        for name, shape in (
            ("rows", (batch,)),
            ("positions", (tokens,)),
            ("slots", (tokens,)),
            ("cu_q", (batch + 1,)),
            ("tail_lens", (batch,)),
            ("pages", (batch, self.pages.shape[1])),
        ):
            assert tuple(getattr(self, name).shape) == shape, f"{name} must be {shape}"
        assert str(self.pages.dtype) == "torch.int32", "page ids are int32"
        assert self.mask is None or self.mask.shape[0] == tokens, "mask must be [T, W]"
        assert self.features is None or self.features.shape[0] == tokens, "features must be [T, F]"
        cu_q = self.cu_q.tolist()
        counts = [b - a for a, b in itertools.pairwise(cu_q)]
        tails, live = self.tail_lens.tolist(), cu_q[-1]
        assert cu_q[0] == 0, "the first row's queries come first"
        assert min(counts) >= 0, "query offsets may not fall"
        assert max(counts) <= self.q_len, "q_len is the longest query"
        assert not any(counts[self.num_rows :]), "padded rows have no queries"
        assert live <= tokens, "more queries than tokens"
        assert all(0 <= c <= t for c, t in zip(counts, tails, strict=True)), "queries are tail keys"
        assert min(self.prefix_lens.tolist()) >= 0, "a prefix has a length"
        assert min(self.token_ids.tolist()) >= 0, "a token is none"
        assert min(self.positions.tolist()) >= 0, "a position is none"
        slots = self.slots.tolist()
        written = [slot for slot in slots if slot != -1]
        assert min(written, default=0) >= 0, "a slot is -1 or one of the pool"
        assert len(set(written)) == len(written), "two tokens share a slot"
        assert all(slot == -1 for slot in slots[live:]), "a dead token writes"
        if self.logits_at is not None:
            assert all(0 <= at < live for at in self.logits_at.tolist()), "nothing to pick from"
        self._check_mask(counts, tails)

    def _check_mask(self, counts: list[int], tails: list[int]) -> None:
        """A query sees itself, and nothing outside its own row's tail."""
        if self.mask is None:
            return
        assert self.mode is ForwardMode.BLOCK, "prefill is causal"
        bits = [sum(w % (1 << 64) << (64 * j) for j, w in enumerate(m)) for m in self.mask.tolist()]
        at = 0
        for count, tail in zip(counts, tails, strict=True):
            for place in range(tail - count, tail):
                assert bits[at] >> place & 1, "a query does not see itself"
                assert bits[at] < 1 << tail, "a query sees past its row's tail"
                at += 1
        assert not any(bits[at:]), "a dead token sees something"


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardOutput:
    """Result of a pass: always this type. There are no logits in it; `sample` makes them in chunks."""

    hidden: Tensor  # [T, H] after the final norm
    aux: Tensor | None = None  # [T, n_aux * H] tapped residual streams, in the spec's order


@dataclass(frozen=True, slots=True, kw_only=True)
class AttnSite:
    """Where attention happens: owned by the layer, honoured by every `Attend`.

    `window` counts positions, not slots: a query sees keys with position > own - window. `tail`
    "causal" ANDs the batch's mask with lower-triangular.
    """

    index: int  # layer index within its own KV pool
    scale: float
    window: int | None = None
    tail: Literal["mask", "causal"] = "mask"


class Attend(Protocol):
    """Attention as an argument: serving passes a paged one, training a dense one, a test ten lines."""

    def heads(self, site: AttnSite, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write k, v to the cache, attend, return [T, Hq, D].

        Args:
            site: which layer asks, with its scale and window.
            q: [T, Hq, D], rope applied.
            k: [T, Hkv, D], rope applied.
            v: [T, Hkv, D].
        """
        ...
