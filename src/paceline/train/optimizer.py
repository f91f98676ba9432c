"""AdamW over float32 master weights of a network that computes in 16 bits.

The network itself stays in the dtype that serves. After a step its parameters are the masters, rounded;
so what is measured and exported is what was trained. Masters of wider parameters have their dtype.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class MasterAdamW:
    """AdamW (Loshchilov & Hutter, arXiv 1711.05101).

    Args:
        net: its parameters that need gradients are trained.
        weight_decay: of matrices; vectors (norms, biases) have none.
        clip: largest norm of all gradients together.
    """

    def __init__(self, net: nn.Module, *, weight_decay: float, clip: float) -> None:
        named = [(name, p) for name, p in net.named_parameters() if p.requires_grad]
        self._names = [name for name, _ in named]
        self._params: list[Tensor] = [p for _, p in named]
        self._masters = [
            p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True)
            for p in self._params
        ]
        self._clip = clip
        matrices = [m for m in self._masters if m.dim() >= 2]
        vectors = [m for m in self._masters if m.dim() < 2]
        self._adam = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=0.0,
            betas=(0.9, 0.95),
            eps=1e-8,
            fused=self._masters[0].is_cuda,
        )

    @torch.no_grad()
    def step(self, lr: float) -> Tensor:
        """Take the gradients that the network has and forget them.

        Args:
            lr: learning rate of this step.

        Returns:
            The gradients' norm before it was clipped, a scalar on the device. If it is not finite,
            the step is one of zero gradients.
        """
        grads = []
        for master, param in zip(self._masters, self._params, strict=True):
            assert param.grad is not None, "every trained parameter has a gradient"
            master.grad = param.grad.to(master.dtype)
            grads.append(master.grad)
            param.grad = None
        norm: Tensor = nn.utils.get_total_norm(grads)
        # No host sync: a norm that is not finite turns all gradients into zeros.
        factor = torch.where(norm.isfinite(), (self._clip / (norm + 1e-6)).clamp(max=1.0), 0.0)
        torch._foreach_mul_(grads, factor)
        for grad in grads:
            grad.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        for group in self._adam.param_groups:
            group["lr"] = lr
        self._adam.step()
        self._publish()
        return norm

    def state(self) -> dict[str, Tensor]:
        """Masters and moments by name, to be saved."""
        found: dict[str, Tensor] = {}
        for name, master in zip(self._names, self._masters, strict=True):
            moments = self._adam.state.get(master, {})
            found[f"master/{name}"] = master
            for kind, short in (("exp_avg", "first"), ("exp_avg_sq", "second")):
                found[f"{short}/{name}"] = moments.get(kind, torch.zeros_like(master))
        return found

    @torch.no_grad()
    def restore(self, tensors: dict[str, Tensor], steps: int) -> None:
        """Take what `state` returned; `steps` have been taken since the start."""
        for name, master in zip(self._names, self._masters, strict=True):
            master.copy_(tensors[f"master/{name}"])
            self._adam.state[master] = {
                "step": torch.tensor(
                    float(steps), device=master.device if master.is_cuda else None
                ),
                "exp_avg": tensors[f"first/{name}"].to(master),
                "exp_avg_sq": tensors[f"second/{name}"].to(master),
            }
        self._publish()

    @torch.no_grad()
    def _publish(self) -> None:
        """Round the masters into the network."""
        torch._foreach_copy_(self._params, self._masters)


def learning_rate(step: int, *, highest: float, warmup: int, steps: int | None) -> float:
    """Linear warm-up, then half a cosine down to zero.

    Args:
        step: from 0.
        highest: the peak.
        warmup: steps of warm-up.
        steps: in all; None: not known yet, so the peak is held.
    """
    if step < warmup:
        return highest * (step + 1) / warmup
    if steps is None or steps <= warmup:
        return highest
    done = min((step - warmup) / (steps - warmup), 1.0)
    return highest * 0.5 * (1 + math.cos(math.pi * done))
