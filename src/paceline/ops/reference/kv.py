"""Reference operators on paged caches: the definition that faster versions are checked against.

Letters: B rows, T tokens, Hkv key/value heads, S slots, D head size, G pages per row, L layers.

The last slot of a cache belongs to the dummy page, whose content nobody sees. Indexing by -1 means
just that slot, so "-1 writes nothing" needs neither a branch nor a host sync.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def write(cache: Tensor, slots: Tensor, entries: Tensor) -> None:
    """Put one token's entry per slot into `cache`, in place.

    Args:
        cache: [Hkv, S, D]; its last slot is a dummy.
        slots: [T] int64, distinct; -1 writes nothing (that is, to the dummy).
        entries: [T, Hkv, D], any floating dtype.
    """
    cache[:, slots] = entries.transpose(0, 1).to(cache.dtype)


def move(caches: Sequence[Tensor], src: Tensor, dst: Tensor) -> None:
    """Copy entries between slots of all layers and heads as if all reads preceded all writes.

    So paths whose source and destination overlap are safe: [0, 2, 3] -> [0, 1, 2].

    Args:
        caches: each [L, Hkv, S, D]; the last slot is a dummy.
        src: [n] int64 slots; -1 moves nothing.
        dst: [n] int64 slots, distinct but for -1; -1 moves nothing.
    """
    dst = torch.where(src < 0, -1, dst)
    if dst.is_cpu:  # reading is free here, and most entries of a step's paths stay where they are
        real = ((dst >= 0) & (src != dst)).nonzero().squeeze(1)
        if real.shape[0] == 0:
            return
        src, dst = src[real], dst[real]
    for cache in caches:
        # The right-hand side is gathered into new memory before anything is written.
        cache[:, :, dst] = cache[:, :, src]


def slots_of(pages: Tensor, rows: Tensor, places: Tensor, page_size: int) -> Tensor:
    """Cache slots of the given places (0, 1, 2 ... within the row's own sequence).

    Args:
        pages: [B, G] int32 page ids.
        rows: int64 indices into `pages`, of any shape that broadcasts with `places`.
        places: int64; a place at or beyond G * page_size reads the row's last page.
        page_size: tokens per page.

    Returns:
        int64 slots: pages[row, place // page_size] * page_size + place % page_size.
    """
    at = (places // page_size).clamp_(max=pages.shape[1] - 1)
    return pages[rows, at].to(torch.int64) * page_size + places % page_size


def slots_or_none(
    pages: Tensor, rows: Tensor, places: Tensor, page_size: int, dummy_page: int
) -> Tensor:
    """`slots_of`, -1 where a place has no page: rows that lack pages would write over one another.

    Args:
        pages: [R, G] int32 page ids.
        rows: int64 indices into `pages`, of `places`' shape.
        places: int64; none at or beyond G * page_size.
        page_size: tokens per page.
        dummy_page: page id of places that have none.
    """
    page = pages[rows, torch.div(places, page_size, rounding_mode="floor")]
    slots = page.to(torch.int64) * page_size + places % page_size
    return torch.where(page == dummy_page, -1, slots)
