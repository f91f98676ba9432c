"""JsonCallParser: what the families share whose calls are JSON objects with the name inside."""

from __future__ import annotations

from collections.abc import Callable

from paceline.api.server.tool_parsers.base import CallParser
from paceline.api.server.tool_parsers.json_call import JsonCall, Outcome


class JsonCallParser(CallParser):
    """Reads objects with `_begin` and `_read`; subclasses know what stands around them."""

    _call: JsonCall | None = None
    _seen = ""  # of the object being read, while it may turn out to be none

    def _begin(self, accepts: Callable[[str], bool] = lambda _: True) -> None:
        """An object is expected next."""
        self._call, self._seen = JsonCall(accepts), ""

    def _read(self) -> Outcome:
        """Take what belongs to the object.

        Returns:
            OPEN: more text is needed, or none will come and the call stands as far as it goes; DONE:
            the text goes on after the object; BROKEN: after as much of it as is a call, or, if
            `_call` has not started, where the object began: none of it was taken.
        """
        call = self._call
        assert call is not None, "_begin() comes first"
        outcome = Outcome.OPEN
        end = 0
        was_started = call.started
        for char in self._text:
            outcome = call.push(char)
            if outcome is Outcome.BROKEN:
                break
            end += 1
            if outcome is Outcome.DONE:
                break
        taken = self._take(end)
        if self._ended and outcome is Outcome.OPEN:
            call.finish()
            outcome = Outcome.OPEN if call.started else Outcome.BROKEN
        if call.started:
            if not was_started:
                assert call.name is not None, "a call that stands has a name"
                self._start(call.name)
            self._arguments(call.take())
            self._seen = ""
        elif outcome is Outcome.BROKEN:
            self._text = self._seen + taken + self._text
            self._seen = ""
        else:
            self._seen += taken
        return outcome
