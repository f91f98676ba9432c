"""Keys of a drafter's JSON as flags of their own, as vLLM takes them.

--spec-config.method=ngram -sc.num_speculative_tokens 4
--speculative-config '{"method": "ngram", "num_speculative_tokens": 4}'      # what becomes of it
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from paceline.core.errors import ConfigError

_FLAG = "--speculative-config"
_WHOLE = (_FLAG, "-sc")
_DOTTED = re.compile(r"(?:--spec-config|--speculative-config|-sc)\.([^=]*)(?:=(.*))?", re.DOTALL)


def joined(words: Sequence[str]) -> list[str]:
    """The command line with one JSON flag in place of its dotted ones.

    A value is JSON, where it can be read so, and else text.

    Args:
        words: the command line; what comes after `--` stays as it is.

    Raises:
        ConfigError: a value is missing, a key is given twice, or the JSON flag is there too.
    """
    kept: list[str] = []
    found: dict[str, object] = {}
    left = list(words)
    while left:
        word = left.pop(0)
        if word == "--":
            kept += [word, *left]
            break
        match = _DOTTED.fullmatch(word)
        if match is None:
            kept.append(word)
            continue
        key, value = match.groups()
        flag = word.partition("=")[0]
        if value is None:
            if not left:
                msg = f"{flag} has no value; one is needed; write it as {flag}=VALUE"
                raise ConfigError(msg)
            value = left.pop(0)
        if key in found:
            msg = f"{key} of the speculative config is given twice; one value is possible; keep one"
            raise ConfigError(msg)
        found[key] = _read(value)
    if not found:
        return kept
    if any(
        word in _WHOLE or word.startswith(tuple(f"{flag}=" for flag in _WHOLE)) for word in kept
    ):
        msg = (
            f"the speculative config is given as JSON and by key ({', '.join(found)}); one of the two is "
            "possible; put the keys into the JSON"
        )
        raise ConfigError(msg)
    end = kept.index("--") if "--" in kept else len(kept)
    return [*kept[:end], f"{_FLAG}={json.dumps(found)}", *kept[end:]]


def _read(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text
