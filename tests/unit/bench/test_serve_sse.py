from __future__ import annotations

import itertools

import pytest

from paceline.bench.serve_sse import EventDecoder, ServerEvent

STREAM = (
    b"\xef\xbb\xbf: a comment\r\n\r\n"
    b'data: {"a": 1}\n\n'
    b"event: response.created\r\ndata: two\r\ndata:lines\r\n\r\n"
    b"id: 7\rdata: \xe2\x82\xac \xf0\x9f\x98\x80\r\r"
    b"retry: 5\n\n"
    b"event: lost\n\n"
    b"data\n\n"
    b"data:  two spaces\n\n"
    b"data: [DONE]\n\n"
)
EVENTS = [
    ServerEvent("", '{"a": 1}'),
    ServerEvent("response.created", "two\nlines"),
    ServerEvent("", "€ 😀"),
    ServerEvent("", ""),
    ServerEvent("", " two spaces"),
    ServerEvent("", "[DONE]"),
]


def read(*packets: bytes) -> list[ServerEvent]:
    decoder = EventDecoder()
    found = [event for packet in packets for event in decoder.feed(packet)]
    return found + decoder.finish()


def test_line_ends_comments_and_fields_are_those_of_the_standard() -> None:
    """LF, CRLF and CR; comments, ids and unknown fields say nothing; data lines are joined."""
    assert read(STREAM) == EVENTS


def test_packets_may_be_cut_anywhere() -> None:
    """At every byte, at every pair of bytes, and byte by byte: the events are the same."""
    for i in range(len(STREAM) + 1):
        assert read(STREAM[:i], STREAM[i:]) == EVENTS, i
    for i, j in itertools.combinations(range(0, len(STREAM), 5), 2):
        assert read(STREAM[:i], STREAM[i:j], b"", STREAM[j:]) == EVENTS, (i, j)
    assert read(*(STREAM[i : i + 1] for i in range(len(STREAM)))) == EVENTS


@pytest.mark.parametrize("rest", [b"data: x", b"data: x\n", b"data: x\r\n"])
def test_a_stream_may_end_without_a_blank_line(rest: bytes) -> None:
    """Some servers leave it out; what they said counts."""
    assert read(b"data: a\n\n", rest) == [ServerEvent("", "a"), ServerEvent("", "x")]


def test_an_event_is_given_as_soon_as_it_is_whole() -> None:
    """Its time is measured: it must not wait for the next packet."""
    decoder = EventDecoder()
    assert decoder.feed(b"data: a\r\n\r") == [ServerEvent("", "a")]
    assert decoder.feed(b"\ndata: b\r\r") == [ServerEvent("", "b")]


def test_bytes_that_are_no_text_do_not_end_the_stream() -> None:
    """A server's mistake in one character costs that character."""
    assert read(b"data: \xff!\n\n") == [ServerEvent("", "\ufffd!")]
