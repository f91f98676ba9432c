"""What a widening makes, in figures: sizes, bytes, what a step reads, and how much of it is 0.

A product reads a 0 as fast as any other number, but switches fewer transistors over it, and a chip that
draws less power may run at a higher clock: so the share of zeros is said.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

import torch

import paceline
from paceline.bench.widen import Widening
from paceline.bench.widen_files import Part, Piece
from paceline.bench.widen_shape import COSTS, Shape

_TABLE = "model.embed_tokens.weight"  # of which a step reads a row a token


def facts(
    plan: Widening,
    target: Part,
    drafters: Sequence[Part],
    *,
    model: str,
    sha256: str,
    dtype: torch.dtype,
    seed: int,
) -> dict[str, object]:
    """Everything about a widening, as JSON's types.

    Args:
        plan: of the target.
        target: what is written of it.
        drafters: what is written of each.
        model: name of the model that was widened.
        sha256: of its files.
        dtype: of the new tensors.
        seed: of random numbers.
    """
    config = plan.new
    values = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    return {
        "paceline": paceline.__version__,
        "model": model,
        "sha256": sha256,
        "dtype": str(dtype).removeprefix("torch."),
        "seed": seed,
        "old": asdict(Shape.of(plan.old)),
        "new": asdict(plan.shape),
        "copies_of_the_stream": plan.copies,
        "silent_channels": plan.stream.num_silent,
        "homes_of_the_old_layers": [*plan.homes],
        "identity_layers": [*plan.identities],
        "target": _sums(target.pieces) | {"kv_bytes_per_token": values * dtype.itemsize},
        "drafters": {part.name: _sums(part.pieces) for part in drafters},
    }


def _sums(pieces: Sequence[Piece]) -> dict[str, object]:
    read = [piece for piece in pieces if piece.name != _TABLE]
    size = sum(piece.numel for piece in read)
    zeros = sum(piece.recipe.num_zeros(piece.old) for piece in read)
    return {
        "parameters": sum(piece.numel for piece in pieces if piece.dtype.is_floating_point),
        "bytes": sum(piece.spec.nbytes for piece in pieces),
        "read_bytes_per_step": sum(piece.spec.nbytes for piece in read),
        "zeros_share_of_read": round(zeros / size, 4),
    }


def table(found: Mapping[str, object], like: str | None) -> list[tuple[str, ...]]:
    """Rows for people: what, before, after, and, if the sizes follow a large model, its own.

    Args:
        found: from `facts`.
        like: of `COSTS`.
    """
    old, new, target, drafters = (found[key] for key in ("old", "new", "target", "drafters"))
    assert isinstance(old, dict), "facts"
    assert isinstance(new, dict), "facts"
    assert isinstance(target, dict), "facts"
    assert isinstance(drafters, dict), "facts"
    cost = None if like is None else COSTS[like]
    rows = [
        ("", "before", "after", *([] if like is None else [like])),
        *(
            (name.replace("_", " ").replace("num ", ""), f"{old[name]:,}", f"{new[name]:,}")
            for name in old
        ),
        ("parameters", "", f"{target['parameters'] / 1e9:.3f} G"),
        ("size of the files", "", _gigabytes(target["bytes"])),
        ("read by a step", "", _gigabytes(target["read_bytes_per_step"])),
        ("of it zeros", "", f"{target['zeros_share_of_read']:.1%}"),
        ("cache per token", "", f"{target['kv_bytes_per_token']:,} bytes"),
        *(
            (
                f"drafter {name}",
                "",
                f"{_gigabytes(sums['bytes'])}, {sums['zeros_share_of_read']:.1%} 0",
            )
            for name, sums in drafters.items()
        ),
    ]
    if cost is None:
        return rows
    dtype = getattr(torch, str(found["dtype"]))
    theirs = {
        "hidden size": f"{cost.hidden_size:,}",
        "layers": f"{cost.num_layers}",
        "read by a step": _gigabytes(cost.read * dtype.itemsize),
        "cache per token": f"{2 * cost.num_layers * cost.kv_width * dtype.itemsize:,} bytes",
    }
    return [rows[0], *((*row, theirs.get(row[0], "")) for row in rows[1:])]


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB"
