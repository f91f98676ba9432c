"""Context: everything that reading a request and answering it need to know of the server; frozen."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from paceline.api.server.errors import ApiError
from paceline.core.tree import FORCED

if TYPE_CHECKING:
    from paceline.api.grammar import Whitespace
    from paceline.api.server.settings import ServerSettings, SpecMetrics
    from paceline.api.tokenizer import Tokenizer
    from paceline.core.config import EngineConfig, ModelConfig
    from paceline.core.request import Constraint
    from paceline.draft.base import DrafterSpec

NO_DRAFTER = "none"
# Where a token came from that no drafter proposed, by the number that it carries.
_SOURCES: Mapping[int, str] = {0: "target", FORCED: "grammar"}


class Compiler(Protocol):
    """Makes constraints from what a client wrote; raises RequestError where it cannot.

    Attributes:
        whitespace: of JSON, for requests that do not say.
    """

    @property
    def whitespace(self) -> Whitespace: ...  # noqa: D102 (see the class)

    def json_schema(self, schema: object, *, whitespace: Whitespace) -> Constraint:
        """Answers are JSON that a schema accepts."""
        ...

    def json_object(self, *, whitespace: Whitespace) -> Constraint:
        """Answers are a JSON object."""
        ...

    def regex(self, pattern: str) -> Constraint:
        """Answers match a regular expression as a whole."""
        ...

    def choice(self, choices: Sequence[str]) -> Constraint:
        """Answers are one of these strings."""
        ...

    def lark(self, grammar: str) -> Constraint:
        """Answers follow a grammar."""
        ...


class Served(Protocol):
    """The part of an LLM whose facts a server tells."""

    config: EngineConfig
    model_config: ModelConfig
    spec: DrafterSpec
    max_len: int
    tokenizer: Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Facts about what is served.

    `model_names`: the first is the one that answers carry. `sources`: where a token came from, by the
    number that it carries; 0 is the model itself, a number without a name the drafter.
    """

    tokenizer: Tokenizer
    model_names: Sequence[str]
    max_len: int
    vocab_size: int
    drafter: str
    parts: Sequence[str]  # drafters in it that a request may name instead
    max_depth: int  # most draft tokens on a path
    sources: Mapping[int, str]
    fingerprint: str
    created: int  # Unix seconds at which the server started
    compiler: Compiler | None  # None: requests for structured output are refused
    strict: bool  # unknown fields are refused
    draft_usage: bool  # usage counts accepted and rejected draft tokens
    spec_metrics: SpecMetrics  # what answers say of how they were speculated on

    @property
    def model(self) -> str:
        """The name that answers carry."""
        return self.model_names[0]

    def check_model(self, name: str | None) -> None:
        """Refuse a model that is not served; none named is the one that is.

        Raises:
            ApiError: 404.
        """
        if name is None or name in self.model_names:
            return
        msg = (
            f"the model {name[:100]!r} does not exist here; served: "
            f"{', '.join(self.model_names)}; name one of these, or leave `model` out"
        )
        raise ApiError(404, msg, code="model_not_found", param="model")

    def source(self, number: int) -> str:
        """Where a token came from: "target" is the model itself, all else was drafted."""
        return self.sources.get(number, self.drafter)


def context_of(
    llm: Served,
    settings: ServerSettings,
    *,
    created: int,
    version: str,
    compiler: Compiler | None = None,
) -> Context:
    """The context of a server over an LLM.

    Args:
        llm: what is served.
        settings: of the server.
        created: Unix seconds.
        version: the package's.
        compiler: of constraints; None: requests for structured output are refused.
    """
    spec = llm.spec
    digest = hashlib.sha256(repr((llm.config, llm.model_config)).encode()).hexdigest()[:8]
    return Context(
        tokenizer=llm.tokenizer,
        model_names=settings.served_model_name or (llm.config.model,),
        max_len=llm.max_len,
        vocab_size=llm.model_config.vocab_size,
        drafter=spec.name,
        parts=spec.parts,
        max_depth=spec.max_depth,
        sources={**spec.sources, **_SOURCES},
        fingerprint=f"paceline-{version}-{spec.name}-{digest}",
        created=created,
        compiler=compiler,
        strict=settings.strict,
        draft_usage=settings.enable_draft_usage,
        spec_metrics=settings.per_request_spec_decode_metrics,
    )
