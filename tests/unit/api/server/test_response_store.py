"""The store of responses: bounded in number and bytes, and every key has its own."""

from __future__ import annotations

from typing import Any

from paceline.api.server.response_store import ResponseStore


def response(name: str, text: str = "x") -> dict[str, Any]:
    return {"id": name, "output": [{"type": "message", "text": text}]}


INPUTS = [{"role": "user", "content": "hi 🙂"}]


def test_what_was_put_comes_back() -> None:
    """With the conversation up to it, as it was then."""
    store = ResponseStore(4)
    made = response("a")
    store.put("", made, INPUTS)
    made["output"].append("later")
    stored = store.get("", "a")
    assert stored is not None
    assert stored.response == response("a")
    assert stored.inputs == INPUTS
    assert stored.items == [*INPUTS, {"type": "message", "text": "x"}]


def test_owners_do_not_see_one_another() -> None:
    """Not even with the same id."""
    store = ResponseStore(4)
    store.put("one", response("a", "secret"), INPUTS)
    assert store.get("two", "a") is None
    assert not store.drop("two", "a")
    store.put("two", response("a", "other"), INPUTS)
    stored = store.get("one", "a")
    assert stored is not None
    assert stored.response == response("a", "secret")


def test_the_one_not_used_for_longest_goes_first() -> None:
    """At most so many, and a look counts as use."""
    store = ResponseStore(2)
    for name in "ab":
        store.put("", response(name), INPUTS)
    store.get("", "a")
    store.put("", response("c"), INPUTS)
    assert [name for name in "abc" if store.get("", name)] == ["a", "c"]
    assert len(store) == 2


def test_bytes_are_bounded() -> None:
    """However long the answers are; one that is too long for the store is not kept."""
    store = ResponseStore(1000, max_bytes=50_000)
    for i in range(100):
        store.put("", response(str(i), "ß" * 1000), INPUTS)
        assert store.num_bytes <= 50_000
    assert 5 < len(store) < 25
    before = len(store)
    store.put("", response("big", "x" * 60_000), INPUTS)
    assert len(store) == before
    assert store.get("", "big") is None


def test_counts_go_back_to_nothing() -> None:
    """What is dropped or put again does not stay in the sum."""
    store = ResponseStore(4)
    store.put("", response("a", "x" * 500), INPUTS)
    store.put("", response("a"), INPUTS)
    assert len(store) == 1
    assert store.drop("", "a")
    assert not store.drop("", "a")
    assert (len(store), store.num_bytes) == (0, 0)


def test_a_store_for_none_keeps_none() -> None:
    """`max_stored_responses: 0` switches it off."""
    store = ResponseStore(0)
    store.put("", response("a"), INPUTS)
    assert store.get("", "a") is None


def test_half_characters_survive() -> None:
    """A body may hold escapes that are no character."""
    store = ResponseStore(1)
    store.put("", response("a", "\ud83d"), INPUTS)
    stored = store.get("", "a")
    assert stored is not None
    assert stored.response["output"][0]["text"] == "\ud83d"
