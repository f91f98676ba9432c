"""What a fused pass is: a network's layers over one pool, without the modules between them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from paceline.core.meanwhile import Meanwhile, nothing

if TYPE_CHECKING:
    from paceline.core.batch import ForwardBatch, ForwardOutput


class FusedPass(ABC):
    """A network's layers over one pool; made by `fuse`.

    Attributes:
        one_call: the layers are one native call, with PyTorch's operators around it alone.
    """

    one_call: ClassVar[bool]

    @abstractmethod
    def forward(
        self, batch: ForwardBatch, aux_layers: tuple[int, ...], meanwhile: Meanwhile = nothing
    ) -> ForwardOutput:
        """One pass; writes the batch's keys and values to the pool.

        See `CausalLM.forward`, and `core.meanwhile`.
        """
