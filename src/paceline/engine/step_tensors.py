"""StepTensors: what a step leaves behind, and how it comes to the host."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from paceline.core.tree import DraftTree, Selection
    from paceline.engine.prompt_scores import PromptScores


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTensors:
    """What a step leaves on the device for the host to read. K top logprobs.

    EXTEND: one emitted token for each picking chunk, A = 1, B = picking chunks. `whole` is set where the
    whole numbers lie side by side, so that one copy brings them to the host. `tree` and `chosen` are what
    was verified; a host that did not make the tree may ask for them.
    """

    emitted: Tensor  # [B, A] int64, -1 padded; NOT_FINITE after the last token of a failed row
    path: Tensor | None  # [B, A] int64 accepted nodes as selected indices; None for EXTEND
    sources: Tensor | None  # [B, A] which drafter proposed them; None: nothing verified
    drafted: Tensor | None  # [B] int64 draft nodes that were verified; None: nothing verified
    logprobs: Tensor | None  # [B, A]
    top_ids: Tensor | None  # [B, A, K]
    top_logprobs: Tensor | None  # [B, A, K]
    whole: Tensor | None = None  # [B, 3 * A + 1] int64: emitted, path, sources, drafted
    tree: DraftTree | None = None  # of B rows or more; None for EXTEND
    chosen: Selection | None = None
    prompts: PromptScores | None = None  # EXTEND, where a request asks

    def joined(self) -> StepTensors:
        """The same with `whole` set: one tensor that the others are views of."""
        assert self.path is not None, "a block step walks"
        assert self.sources is not None, "a block step walks"
        assert self.drafted is not None, "a block step verifies"
        sources = self.sources.to(torch.int64)
        parts = (self.emitted, self.path, sources, self.drafted.unsqueeze(1))
        return self._with_whole(torch.cat(parts, dim=1))

    def _with_whole(self, whole: Tensor) -> StepTensors:
        width = whole.shape[1] // 3
        return replace(
            self,
            emitted=whole[:, :width],
            path=whole[:, width : 2 * width],
            sources=whole[:, 2 * width : 3 * width],
            drafted=whole[:, -1],
            whole=whole,
        )

    def first(self, count: int) -> StepTensors:
        """The results of the first `count` rows; `joined` before."""

        def cut(x: Tensor | None) -> Tensor | None:
            return None if x is None else x[:count]

        assert self.whole is not None, "joined first"
        kept = replace(
            self,
            logprobs=cut(self.logprobs),
            top_ids=cut(self.top_ids),
            top_logprobs=cut(self.top_logprobs),
        )
        return kept._with_whole(self.whole[:count])  # noqa: SLF001 (a step's of this class)

    def to_host(self, *, with_trees: bool = False) -> StepTensors:
        """Start the copy from a GPU to the host; it is done once the stream gets there.

        The caller waits for an event recorded after this, never for the device. Trees stay on the GPU
        unless they are asked for: they are larger than all else.
        """
        tree, chosen = (self.tree, self.chosen) if with_trees else (None, None)
        copied = replace(
            self,
            logprobs=_optional_copy(self.logprobs),
            top_ids=_optional_copy(self.top_ids),
            top_logprobs=_optional_copy(self.top_logprobs),
            tree=None if tree is None else _copied_fields(tree),
            chosen=None if chosen is None else _copied_fields(chosen),
            prompts=None if self.prompts is None else _copied_fields(self.prompts),
        )
        if self.whole is not None:
            return copied._with_whole(_host_copy(self.whole))  # noqa: SLF001 (of this class)
        return replace(
            copied,
            emitted=_host_copy(self.emitted),
            path=_optional_copy(self.path),
            sources=_optional_copy(self.sources),
            drafted=_optional_copy(self.drafted),
        )


T = TypeVar("T", "DraftTree", "Selection", "PromptScores")


def _copied_fields(tensors: T) -> T:
    """The same dataclass of tensors, on its way to the host."""
    return replace(
        tensors, **{f.name: _host_copy(getattr(tensors, f.name)) for f in fields(tensors)}
    )


def _optional_copy(x: Tensor | None) -> Tensor | None:
    return None if x is None else _host_copy(x)


def _host_copy(x: Tensor) -> Tensor:
    pinned = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    return pinned.copy_(x, non_blocking=True)
