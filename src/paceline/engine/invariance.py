"""The batch-invariant mode: a row's bits do not depend on who shares its passes, so no drafter changes them.

On a CPU it is on wherever attention can: products there promise the same for every dtype that it serves.
On a GPU it costs time, and is on if asked for: attention and products of the target, its head among them,
then go through own kernels with one tile for all passes (`ops/triton/attention_invariant.py` and
`product_invariant.py`), prompts too, since a row's cache holds keys of all. Norms, rotation, activation and
picks treat every row alone anyhow. Drafter networks go their usual way: no output depends on a tree.

Letters: T tokens, H hidden size, V vocabulary, N/K output/input features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from paceline import ops
from paceline.attention import choose
from paceline.core.errors import ConfigError
from paceline.engine.fused_ops import Product
from paceline.models.base import CausalLM

if TYPE_CHECKING:
    import torch

    from paceline.attention.base import AttentionBackend
    from paceline.kv.layout import KVLayout

_ON = "batch-invariant: yes, outputs equal plain decoding bit by bit"
_INSTEAD = (
    "it is possible for plain weights in bfloat16 or float16 on a GPU, in float32 too on a CPU; change the "
    "dtype or the device, or leave batch_invariant out"
)


class InvariantProduct(Product):
    """A plain matrix in 16 bits on a GPU, multiplied with one tile for all numbers of rows."""

    __slots__ = ()

    def __call__(self, x: Tensor) -> Tensor:
        """[T, K] to [T, N]."""
        from paceline.ops.triton.product_invariant import linear

        return linear(x, _plain(self.weight), self.bias)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, norm_weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """See `Product`."""
        from paceline.ops.triton.product_invariant import linear_add_rms_norm

        weight = _plain(self.weight)
        return linear_add_rms_norm(x, weight, residual, norm_weight, eps, self.bias)

    def swiglu(self, x: Tensor) -> Tensor:
        """See `Product`."""
        return ops.silu_mul(self(x))


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """How the target computes."""

    backend: AttentionBackend
    product: type[Product]
    head: Callable[[Tensor], Tensor]  # [M, H] after the final norm to [M, V]
    invariant: bool
    notes: tuple[str, ...]


def arithmetic(
    asked: bool | None,
    net: CausalLM,
    layout: KVLayout,
    device: torch.device,
    dtype: torch.dtype,
    page_size: int,
) -> Arithmetic:
    """Choose how the target computes, with notes that say why and whether it is batch-invariant.

    Args:
        asked: whether it has to be; None or False: where it costs nothing.
        net: the target.
        layout: what a token's cache entry holds.
        device: where the target and its pool are.
        dtype: of activations and pool.
        page_size: tokens per page.

    Raises:
        ConfigError: it was asked for and is not possible; or no attention backend serves such a pool.
    """
    try:
        backend, notes = choose(layout, device, dtype, page_size, invariant=bool(asked))
    except ConfigError as error:
        if not asked:
            raise
        msg = f"batch_invariant was asked for, and {error}: {_INSTEAD}"
        raise ConfigError(msg) from None
    if asked and device.type == "cuda":
        reason = refusal(net)
        if reason is not None:
            msg = f"batch_invariant was asked for, but {reason}; {_INSTEAD}"
            raise ConfigError(msg)
        return Arithmetic(
            backend=backend,
            product=InvariantProduct,
            head=partial(_head, _head_weight(net)),
            invariant=True,
            notes=(*notes, _ON),
        )
    name = type(backend).__name__
    off = (
        f"batch-invariant: no ({name}); in 16 bits a near-tie may fall differently with a drafter than "
        "without"
    )
    if device.type == "cuda":
        off += ", unless batch_invariant is on (--batch-invariant), which takes longer"
    return Arithmetic(
        backend=backend,
        product=Product,
        head=net.head,
        invariant=backend.invariant,
        notes=(*notes, _ON if backend.invariant else off),
    )


def refusal(net: CausalLM) -> str | None:
    """Why the products of a network on a GPU cannot be batch-invariant, as a clause; None: they can."""
    parts = net.decoder()
    if isinstance(parts, str):
        return f"its products go through own kernels in a common pass only, and {parts}"
    if type(net).head is not CausalLM.head:
        return f"{type(net).__name__} has a head of its own"
    linears = [
        linear
        for layer in parts.layers
        for linear in (layer.attention.qkv, layer.attention.out, layer.mlp.gate_up, layer.mlp.down)
    ]
    head = net.embed if net.lm_head is None else net.lm_head
    weights = [*(linear.weight for linear in linears), head.weight]
    if not all(isinstance(weight, Tensor) and weight.dtype == net.dtype for weight in weights):
        return "weights are packed"
    return None


def _head_weight(net: CausalLM) -> Tensor:
    """[V, H]."""
    return _plain((net.embed if net.lm_head is None else net.lm_head).weight)


def _head(weight: Tensor, hidden: Tensor) -> Tensor:
    from paceline.ops.triton.product_invariant import linear_f32

    return linear_f32(hidden, weight)


def _plain(weight: object) -> Tensor:
    assert isinstance(weight, Tensor), "packed weights were refused"
    return weight
