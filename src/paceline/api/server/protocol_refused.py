"""Fields that the body of a path does not have: refused where something is asked with them.

A field that another server knows and that cannot be honoured here is refused (`REFUSED`), and so are the
fields of this server's other paths, and whatever else stands in a part that constrains the answer. A
field that nobody knows is ignored, or refused where the server is strict about it.
Not for: fields that a path has and cannot honour (completions.py, chat.py, responses_checks.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.api.server.errors import bad, shown
from paceline.api.server.protocol import (
    Fields,
    JsonSchemaFormat,
    ResponseFormat,
    StructuredOutputs,
    same,
)
from paceline.api.server.protocol_chat import ChatRequest
from paceline.api.server.protocol_completions import CompletionRequest
from paceline.api.server.protocol_responses import ResponsesRequest
from paceline.api.server.protocol_sampling import SamplingFields
from paceline.api.server.protocol_tokens import DetokenizeRequest, TokenizeRequest

_SHOWN = 10  # unknown fields that one message names

_NOT_HERE = "it cannot be honoured here; leave it out"
_GUIDED = "it was removed from the interface; use structured_outputs or response_format"
_SAMPLER = "this sampler does not exist here; temperature, top_p, top_k and min_p do; leave it out"
# Field -> (values that ask for nothing, what is said about all others). Null asks for nothing too.
REFUSED: Mapping[str, tuple[tuple[object, ...], str]] = {
    "prompt_embeds": ((), "prompts are text or token ids; pass `prompt`"),
    "use_beam_search": ((False,), "there is no beam search; use n for several answers"),
    "length_penalty": ((1,), "there is no beam search; leave it out"),
    "early_stopping": ((False,), "there is no beam search; leave it out"),
    "functions": (([],), "it is replaced by `tools`; use that"),
    "function_call": ((), "it is replaced by `tool_choice`; use that"),
    "modalities": ((["text"],), "text is the only modality; leave it out"),
    "audio": ((), "text is the only modality; leave it out"),
    "prediction": ((), "drafts come from the loaded drafter; leave it out"),
    "web_search_options": ((), "the server searches nothing; leave it out"),
    "store": ((False,), "answers are not stored by this path; /v1/responses stores some"),
    "priority": ((0,), "requests are served in the order they come; leave it out"),
    "verbosity": (("medium",), _NOT_HERE),
    "service_tier": (("auto", "default"), "there is one tier; leave it out"),
    "chat_template": ((), "templates come with the model or from the command line; leave it out"),
    "documents": (([],), "put them into chat_template_kwargs if the template knows them"),
    "mm_processor_kwargs": (({},), "text is the only modality; leave it out"),
    "media_io_kwargs": (({},), "text is the only modality; leave it out"),
    "logits_processors": (([],), _NOT_HERE),
    "custom_logit_processor": ((), _NOT_HERE),
    "custom_params": (({},), _NOT_HERE),
    "logprob_token_ids": (([],), "use top_logprobs for the most likely tokens"),
    "kv_transfer_params": (({},), _NOT_HERE),
    "vllm_xargs": (({},), _NOT_HERE),
    "lora_path": ((), "no adapters are served; leave it out"),
    "return_hidden_states": ((False,), _NOT_HERE),
    "thinking_token_budget": ((), _NOT_HERE),
    "repetition_detection": ((), _NOT_HERE),
    "stop_regex": (([],), "use stop (strings) or structured_outputs.regex"),
    "timings_per_token": ((False,), "timings come with the end of an answer; leave it out"),
    "speculative.n_min": ((0,), "use speculative.num_speculative_tokens for the most drafts"),
    "speculative.p_min": ((0,), "use speculative.num_speculative_tokens for the most drafts"),
    "guided_json": ((), _GUIDED),
    "guided_regex": ((), _GUIDED),
    "guided_choice": ((), _GUIDED),
    "guided_grammar": ((), _GUIDED),
    "guided_json_object": ((False,), _GUIDED),
    "guided_decoding_backend": ((), _GUIDED),
    "guided_whitespace_pattern": ((), _GUIDED),
    "structural_tag": ((), "use structured_outputs.grammar or tools"),
    "disable_any_whitespace": (
        (False,),
        "it is a field of structured_outputs; give it there",
    ),
    "disable_additional_properties": (
        (False,),
        "write additionalProperties: false into the schema; leave it out",
    ),
    "whitespace_pattern": ((), "use structured_outputs.grammar for another white space"),
    "typical_p": ((1,), _SAMPLER),
    "mirostat": ((0,), _SAMPLER),
    "dynatemp_range": ((0,), _SAMPLER),
    "xtc_probability": ((0,), _SAMPLER),
    "dry_multiplier": ((0,), _SAMPLER),
    "samplers": (([],), _SAMPLER),
    "top_n_sigma": ((-1, 0), _SAMPLER),
    "tfs_z": ((1,), _SAMPLER),
    "top_a": ((0,), _SAMPLER),
    "epsilon_cutoff": ((0,), _SAMPLER),
    "eta_cutoff": ((0,), _SAMPLER),
    "do_sample": ((True,), "temperature 0 is greedy; use that"),
    "num_beams": ((1,), "there is no beam search; use n for several answers"),
    "no_repeat_ngram_size": ((0,), "penalties are by token; use repetition_penalty"),
    "n_probs": ((0,), "use logprobs for the most likely tokens"),
    "t_max_predict_ms": ((0, -1), "answers are limited by their tokens; use max_tokens"),
    "separate_reasoning": (
        (True,),
        "reasoning is told apart from the answer, or with include_reasoning false not at all; use that",
    ),
    "stream_reasoning": ((True,), "reasoning is told as it is made; leave it out"),
    "enable_thinking": ((), "it is a variable of templates; give it in chat_template_kwargs"),
    "include_obfuscation": ((False,), "nothing is obfuscated; leave it out"),
    "repeat_last_n": ((-1,), "penalties see the whole text; leave it out"),
}

PATHS: Mapping[type[Fields], str] = {
    ChatRequest: "/v1/chat/completions",
    CompletionRequest: "/v1/completions",
    ResponsesRequest: "/v1/responses",
    TokenizeRequest: "/tokenize",
    DetokenizeRequest: "/detokenize",
}
# Fields of other paths -> values that ask for nothing where there is no such field; null, [] and {} ask for
# nothing either.
ELSEWHERE: Mapping[str, tuple[object, ...]] = {
    "add_special_tokens": (False,),  # /v1/responses: the template writes them
    "background": (False,),
    "continue_final_message": (False,),
    "echo": (False,),
    "include_reasoning": (True,),
    "instructions": ("",),
    "logprobs": (False,),
    "parallel_tool_calls": (True, False),
    "return_token_strs": (False,),
    "skip_special_tokens": (False,),
    "spaces_between_special_tokens": (False,),
    "suffix": ("",),
    "text": ({"format": {"type": "text"}},),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
_INSTEAD: Mapping[str, str] = {  # what a path calls it that does not know it by this name
    "max_output_tokens": "use max_tokens",
    "max_completion_tokens": "use max_output_tokens",
    "messages": "use `input` or `prompt`",
    "reasoning_effort": "use reasoning.effort of /v1/responses",
    "reasoning": "use reasoning_effort of /v1/chat/completions",
}
# These say how an answer is made, so they ask for nothing where none is; tokens of a whole chat body are
# asked for so.
_OF_ANSWERS = (SamplingFields.model_fields.keys() - {"truncate_prompt_tokens"}) | {
    "best_of",
    "include_reasoning",
    "logprobs",
    "max_completion_tokens",
    "max_output_tokens",
    "top_logprobs",
}
_OF_TEXTS = {"skip_special_tokens", "spaces_between_special_tokens"}
_IGNORED: Mapping[str, frozenset[str]] = {
    "/tokenize": frozenset(_OF_ANSWERS),
    "/detokenize": frozenset(_OF_ANSWERS - _OF_TEXTS),
}
# Parts of which nothing may be dropped: an answer would be less constrained than was asked.
_WHOLE = (StructuredOutputs, ResponseFormat, JsonSchemaFormat)


@dataclass(frozen=True, slots=True)
class _Extra:
    """A field that no model names; `part` is what it stands in."""

    place: str
    name: str
    value: Any
    part: Fields


def check_fields(body: Fields, *, strict: bool) -> None:
    """Refuse what cannot be honoured and, where `strict`, what is unknown.

    Raises:
        ApiError: 400, naming the field.
    """
    extras, path = list(_extras(body, "")), PATHS[type(body)]
    unknown = []
    for extra in extras:
        name = extra.name
        owners = [other for model, other in PATHS.items() if name in model.model_fields]
        if name in REFUSED:
            _check_refused(extra)
        elif isinstance(extra.part, _WHOLE):
            _check_whole(extra)
        elif extra.part is body and owners:
            _check_elsewhere(extra, path, owners)
            continue
        if name not in REFUSED:
            unknown.append(extra.place)
    if strict and unknown:
        more = f" and {len(unknown) - _SHOWN} more" if len(unknown) > _SHOWN else ""
        named = ", ".join(shown(place, 60) for place in unknown[:_SHOWN])
        msg = (
            f"unknown fields: {named}{more}; /openapi.json lists the known ones; leave these out, or "
            "start the server without --strict, which ignores them"
        )
        raise bad(msg, unknown[0])


def _extras(body: Fields, prefix: str) -> Iterator[_Extra]:
    for name, value in (body.model_extra or {}).items():
        yield _Extra(f"{prefix}{name}", name, value, body)
    for name in type(body).model_fields:
        value = getattr(body, name)
        if isinstance(value, Fields):
            yield from _extras(value, f"{prefix}{name.rstrip('_')}.")


def _check_refused(extra: _Extra) -> None:
    neutral, why = REFUSED[extra.name]
    if extra.value is not None and not _among(extra.value, neutral):
        msg = f"{extra.place}: {why}"
        raise bad(msg, extra.place)


def _check_whole(extra: _Extra) -> None:
    if _among(extra.value, (None, False)):
        return
    known = [field.alias or name for name, field in type(extra.part).model_fields.items()]
    msg = (
        f"{shown(extra.place, 60)} is not known here, and an answer without it may not be what is asked; "
        f"{', '.join(known)} are possible; leave it out, or say it with these"
    )
    raise bad(msg, shown(extra.place, 60))


def _check_elsewhere(extra: _Extra, path: str, owners: list[str]) -> None:
    """A field of this server's other paths."""
    name, value, body = extra.name, extra.value, extra.part
    match name:
        case "best_of":
            neutral: tuple[object, ...] = (getattr(body, "n", None) or 1,)
        case "add_generation_prompt":
            neutral = (path == PATHS[ResponsesRequest],)  # which always adds it
        case "tool_choice":
            neutral = ("auto",) if getattr(body, "tools", None) else ("auto", "none")
        case _:
            neutral = ELSEWHERE.get(name, ())
    if name in _IGNORED.get(path, ()) or _among(value, (None, [], {}, *neutral)):
        return
    msg = (
        f"{name} is a field of {' and '.join(owners)}, and {path} has none of this name; "
        f"{_INSTEAD.get(name, 'ask there')}, or leave it out"
    )
    raise bad(msg, name)


def _among(value: object, values: tuple[object, ...]) -> bool:
    return any(same(value, other) for other in values)
