"""Pages of a list, and what may stand in the query of /v1/responses; names and meanings are OpenAI's.

Unlike there, a list without `order` begins with its earliest item, and one without `limit` is whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import WithJsonSchema

from paceline.api.server.errors import bad, shown

_MOST = 100
_ORDERS = ("asc", "desc")
# As texts, since what is no number gets the error that all wrong values get.
Limit = Annotated[str, WithJsonSchema({"type": "integer", "minimum": 1, "maximum": _MOST})]
Order = Annotated[str, WithJsonSchema({"type": "string", "enum": list(_ORDERS)})]


def refuse(query: Mapping[str, str], *names: str) -> None:
    """Refuse parameters that ask for what there is not.

    Args:
        query: of the request.
        names: of the parameters; each may also be written as a list's, `name[]`.

    Raises:
        ApiError: 400; one of them is there.
    """
    for name in names:
        if name in query or f"{name}[]" in query:
            msg = (
                f"{name}: a response is told as a whole, with all that is kept of it; leave it out"
            )
            raise bad(msg, name)


def check(limit: str | None, order: str | None) -> None:
    """Refuse what no list has.

    Args:
        limit: how many items at most; None: all.
        order: by time; None: "asc".

    Raises:
        ApiError: 400; the limit is no number from 1 to 100, or the order is neither "asc" nor "desc".
    """
    if order is not None and order not in _ORDERS:
        msg = f"order is {shown(order, 40)!r}; asc and desc are possible; send one, or leave it out"
        raise bad(msg, "order")
    if limit is None:
        return
    if not (limit.isascii() and limit.isdigit() and len(limit) <= 3 and 1 <= int(limit) <= _MOST):
        msg = f"limit is {shown(limit, 40)!r}; 1 to {_MOST} is possible; send that, or leave it out for all"
        raise bad(msg, "limit")


def page(
    items: Sequence[Mapping[str, Any]],
    *,
    limit: str | None,
    order: str | None,
    after: str | None,
    before: str | None,
) -> dict[str, Any]:
    """A part of a list, as OpenAI's object "list".

    Args:
        items: all, earliest first; each has an `id`.
        limit: how many at most; None: all.
        order: "asc" or "desc", by time; None: asc.
        after: id of the item that the page follows, in that order.
        before: id of the item that ends the page, which is not on it.

    Raises:
        ApiError: 400; a value that none of them can have.
    """
    check(limit, order)
    most = len(items) if limit is None else int(limit)
    listed = list(items) if order != "desc" else list(reversed(items))
    ids = [item["id"] for item in listed]
    begin = 0 if after is None else _index(ids, after, "after") + 1
    end = len(listed) if before is None else _index(ids, before, "before")
    between = listed[begin:end]
    data = between[:most]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": len(data) < len(between),
    }


def _index(ids: Sequence[str], wanted: str, name: str) -> int:
    if wanted in ids:
        return ids.index(wanted)
    msg = f"{name} is {shown(wanted, 80)!r}, which is no item of this list; send the id of one"
    raise bad(msg, name)
