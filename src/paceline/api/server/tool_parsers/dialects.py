"""Dialects: how a model family writes calls of functions, to be read (parser) and to be forced (grammar).

`DIALECTS` is the registry: a line is all that a new family needs. Names are those of vLLM's
`--tool-call-parser`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.api.server.tool_parsers import deepseek, hermes, kimi_k2, llama3
from paceline.api.server.tool_parsers.base import CallParser
from paceline.api.server.tool_parsers.deepseek import DeepSeekV3Parser, DeepSeekV31Parser
from paceline.api.server.tool_parsers.hermes import HermesParser
from paceline.api.server.tool_parsers.kimi_k2 import KimiK2Parser
from paceline.api.server.tool_parsers.llama3 import Llama3Parser

NAME, COUNT = "{name}", "{count}"  # stand in a dialect's `before`


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """How calls are written: trigger, then per call `before`, the arguments as JSON, `after`; then `closes`.

    Attributes:
        name: as flags have it.
        parser: reads them.
        marks: texts that may be tokens of their own.
        trigger: what a call, or a section of calls, begins with; "": nothing.
        before: what stands between the trigger and the arguments, with NAME for the function's name
            and, in some, COUNT for the call's number.
        after: what follows the arguments of each call.
        between: what separates calls.
        closes: what ends a section of calls; None: there are none, every call has its trigger.
        ends_reasoning: marks that cannot be mere talk about calls, so they end reasoning too.
    """

    name: str
    parser: type[CallParser]
    marks: tuple[str, ...]
    trigger: str
    before: str
    after: str
    between: str = ""
    closes: str | None = None
    ends_reasoning: tuple[str, ...] = ()

    def write(self, calls: Sequence[tuple[str, str]]) -> str:
        """Calls as the family's models write them: names, and arguments as JSON text."""
        parts = [
            self.before.replace(NAME, name).replace(COUNT, str(count)) + arguments + self.after
            for count, (name, arguments) in enumerate(calls)
        ]
        if self.closes is None:
            return self.between.join(self.trigger + part for part in parts)
        return self.trigger + self.between.join(parts) + self.closes


HERMES = Dialect(
    name="hermes",
    parser=HermesParser,
    marks=(hermes.OPEN, hermes.CLOSE),
    trigger=hermes.OPEN,
    before=f'\n{{"name": "{NAME}", "arguments": ',
    after=f"}}\n{hermes.CLOSE}",
    between="\n",
)
LLAMA3 = Dialect(
    name="llama3_json",
    parser=Llama3Parser,
    marks=(llama3.TAG,),
    trigger="",
    before=f'{{"name": "{NAME}", "parameters": ',
    after="}",
    between="; ",
)
KIMI_K2 = Dialect(
    name="kimi_k2",
    parser=KimiK2Parser,
    marks=(
        kimi_k2.OPEN,
        kimi_k2.CLOSE,
        kimi_k2.CALL_OPEN,
        kimi_k2.SEPARATOR,
        kimi_k2.CALL_CLOSE,
    ),
    trigger=kimi_k2.OPEN,
    before=f"{kimi_k2.CALL_OPEN}functions.{NAME}:{COUNT}{kimi_k2.SEPARATOR}",
    after=kimi_k2.CALL_CLOSE,
    closes=kimi_k2.CLOSE,
    ends_reasoning=KimiK2Parser.opens,
)
_DEEPSEEK_MARKS = (
    deepseek.OPEN,
    deepseek.CLOSE,
    deepseek.CALL_OPEN,
    deepseek.SEPARATOR,
    deepseek.CALL_CLOSE,
)
DEEPSEEK_V3 = Dialect(
    name="deepseek_v3",
    parser=DeepSeekV3Parser,
    marks=_DEEPSEEK_MARKS,
    trigger=deepseek.OPEN,
    before=f"{deepseek.CALL_OPEN}function{deepseek.SEPARATOR}{NAME}\n{deepseek.FENCE}\n",
    after=f"\n```{deepseek.CALL_CLOSE}",
    between="\n",
    closes=deepseek.CLOSE,
    ends_reasoning=DeepSeekV3Parser.opens,
)
DEEPSEEK_V31 = Dialect(
    name="deepseek_v31",
    parser=DeepSeekV31Parser,
    marks=_DEEPSEEK_MARKS,
    trigger=deepseek.OPEN,
    before=f"{deepseek.CALL_OPEN}{NAME}{deepseek.SEPARATOR}",
    after=deepseek.CALL_CLOSE,
    closes=deepseek.CLOSE,
    ends_reasoning=DeepSeekV3Parser.opens,
)
DIALECTS: Mapping[str, Dialect] = {
    dialect.name: dialect for dialect in (HERMES, LLAMA3, KIMI_K2, DEEPSEEK_V3, DEEPSEEK_V31)
}


def recognised(template: str) -> Dialect | None:
    """The dialect whose marks a chat template writes; None: none that is known."""
    if kimi_k2.CALL_OPEN in template:
        return KIMI_K2
    if deepseek.CALL_OPEN in template:
        return DEEPSEEK_V3 if deepseek.FENCE in template else DEEPSEEK_V31
    if hermes.OPEN in template and "<function=" not in template:
        return HERMES
    if "<|start_header_id|>" in template and '"parameters": ' in template:
        return LLAMA3
    return None
