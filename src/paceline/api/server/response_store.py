"""ResponseStore: answers of /v1/responses that may be asked for again, in memory only.

Bounded in number and in bytes; the one that was not used for longest goes first. An answer is found only
with the key that it was made with. Everything is kept as JSON text, so bytes are counted as they are.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MAX_BYTES = 64 * 2**20
_OVERHEAD = 1024  # of an entry beside its texts


@dataclass(frozen=True, slots=True)
class _Entry:
    response: bytes
    items: tuple[bytes, ...]  # of the whole conversation, this answer's output last
    num_inputs: int  # of the items before the output
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """One answer.

    Attributes:
        response: the response object.
        items: the conversation up to and with it.
        inputs: the conversation that it answers.
    """

    response: Mapping[str, Any]
    items: Sequence[Mapping[str, Any]]
    inputs: Sequence[Mapping[str, Any]]


class ResponseStore:
    """See the module's docstring. Event loop only.

    Args:
        max_responses: most answers kept; 0: none are.
        max_bytes: most bytes of all of them together; one that has more is not kept.
    """

    def __init__(self, max_responses: int, max_bytes: int = MAX_BYTES) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._entries: OrderedDict[tuple[str, str], _Entry] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def put(
        self,
        owner: str,
        response: Mapping[str, Any],
        inputs: Sequence[Mapping[str, Any]],
    ) -> None:
        """Keep an answer, if there is room for it at all.

        Args:
            owner: of the key that it was made with; "" for all.
            response: the response object, with its `id` and `output`.
            inputs: items of the whole conversation that it answers.
        """
        texts = tuple(_packed(item) for item in (*inputs, *response["output"]))
        packed = _packed(response)
        size = len(packed) + sum(len(text) for text in texts) + _OVERHEAD
        if size > self._max_bytes or not self._max_responses:
            return
        key = owner, str(response["id"])
        self.drop(*key)
        self._entries[key] = _Entry(packed, texts, len(inputs), size)
        self.num_bytes += size
        while len(self._entries) > self._max_responses or self.num_bytes > self._max_bytes:
            _, entry = self._entries.popitem(last=False)
            self.num_bytes -= entry.size

    def get(self, owner: str, response_id: str) -> Stored | None:
        """An answer; None: there is none, any more, or for this owner."""
        key = owner, response_id
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        items = [json.loads(text) for text in entry.items]
        return Stored(
            response=json.loads(entry.response), items=items, inputs=items[: entry.num_inputs]
        )

    def drop(self, owner: str, response_id: str) -> bool:
        """Forget an answer; False: there was none."""
        entry = self._entries.pop((owner, response_id), None)
        if entry is not None:
            self.num_bytes -= entry.size
        return entry is not None


def _packed(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(
        "utf-8", "surrogatepass"
    )
