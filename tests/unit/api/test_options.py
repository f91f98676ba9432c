from __future__ import annotations

from dataclasses import fields

import pytest

from paceline.api.options import engine_config, options, speculative_keys, split_spec
from paceline.core.config import CacheConfig, DraftConfig, EngineConfig
from paceline.core.errors import ConfigError


def test_every_field_has_one_option_with_help() -> None:
    """A field without a flat name could not be set; one without help would be a riddle."""
    wanted = {("cache", f.name) for f in fields(CacheConfig)}
    wanted |= {("draft", f.name) for f in fields(DraftConfig)}
    wanted |= {("engine", f.name) for f in fields(EngineConfig) if f.name not in {"cache", "draft"}}
    assert {(o.part, o.field) for o in options().values()} == wanted
    assert [o.name for o in options().values() if not o.help] == []


def test_flat_values_reach_their_part() -> None:
    """Each option lands in its field; the rest keep their defaults."""
    config = engine_config(
        {"model": "m", "max_len": 64, "spec": "ngram", "spec_nodes": 3, "memory_gb": 2, "seed": 1}
    )
    assert (config.model, config.seed, config.dtype) == ("m", 1, "auto")
    assert (config.cache.max_len, config.cache.memory_gb, config.cache.max_rows) == (64, 2, 16)
    assert (config.draft.method, config.draft.num_speculative_tokens) == ("ngram", 3)


def test_a_base_keeps_what_is_not_named() -> None:
    """Options change the config given, not the defaults."""
    base = EngineConfig(model="m", cache=CacheConfig(max_rows=3))
    config = engine_config({"max_len": 64}, base)
    assert (config.model, config.cache.max_rows, config.cache.max_len) == ("m", 3, 64)


def test_known_aliases_mean_the_same() -> None:
    """What vLLM calls an option is understood."""
    config = engine_config({"max_model_len": 64, "max_num_seqs": 2, "num_speculative_tokens": 5})
    assert (config.cache.max_len, config.cache.max_rows) == (64, 2)
    assert config.draft.num_speculative_tokens == 5


@pytest.mark.parametrize(
    "values,message",
    [
        ({"max_lenn": 3}, "unknown option 'max_lenn'; did you mean 'max_len'"),
        ({"zzz": 3}, "known options: model, device"),
        ({"max_len": "abc"}, "max_len must be a whole number or none, got 'abc'"),
        ({"max_len": True}, "max_len must be a whole number or none, got True"),
        ({"memory_gb": float("nan")}, "memory_gb must be a finite number or none, got nan"),
        ({"dtype": "int4"}, "dtype must be one of auto, bfloat16"),
        ({"prefix_cache": 1}, "prefix_cache must be true or false, got 1"),
        ({"spec": 3}, "spec must be text, got 3"),
        ({"max_len": 3, "max_model_len": 4}, "given twice"),
        ({"spec": "suffix:tree", "suffix_shape": "path"}, "given twice"),
    ],
)
def test_mistakes_are_named(values: dict[str, object], message: str) -> None:
    """What was given, what is possible."""
    with pytest.raises(ConfigError, match=message):
        engine_config(values)


def test_all_mistakes_are_told_at_once() -> None:
    """One round of repair is enough."""
    with pytest.raises(ConfigError) as caught:
        engine_config({"max_lenn": 3, "dtype": "int4", "speculative_config": {"metod": "ngram"}})
    assert all(word in str(caught.value) for word in ("max_lenn", "int4", "metod"))


def test_drafter_forms() -> None:
    """A drafter's shape may stand after a colon, where it has one."""
    assert split_spec("ngram") == {"method": "ngram"}
    assert split_spec("suffix:path") == {"method": "suffix", "suffix_shape": "path"}
    for wrong in ("suffix:ring", "ngram:tree", "none:"):
        with pytest.raises(ConfigError, match="suffix:tree, suffix:path"):
            split_spec(wrong)


def test_vllm_keys_are_mapped() -> None:
    """A speculative config written for vLLM means the same here, as a mapping or as JSON."""
    given = (
        '{"method": "suffix", "num_speculative_tokens": 12, "suffix_decoding_max_tree_depth": 9,'
        ' "suffix_decoding_max_spec_factor": 2.0, "suffix_decoding_min_token_prob": 0.2}'
    )
    draft = engine_config({"speculative_config": given}).draft
    assert (draft.method, draft.num_speculative_tokens, draft.suffix_max_depth) == ("suffix", 12, 9)
    assert (draft.suffix_max_spec_factor, draft.suffix_min_token_prob) == (2.0, 0.2)
    ngram = engine_config({"speculative_config": {"method": "ngram", "prompt_lookup_max": 3}}).draft
    assert (ngram.prompt_lookup_min, ngram.prompt_lookup_max) == (3, 3)  # as vLLM reads it


@pytest.mark.parametrize(
    "given,message",
    [
        ("{", "is not JSON"),
        ("[1]", "must be a JSON object"),
        ({"metod": "ngram"}, "unknown key 'metod'.*known keys: method, model"),
        ({"num_speculative_tokens": "4"}, "must be a whole number, got '4'"),
        ({"suffix_decoding_max_cached_requests": 5}, "use suffix_max_cached_tokens"),
        ({"suffix_max_depth": 5, "suffix_decoding_max_tree_depth": 5}, "given twice"),
    ],
)
def test_mistakes_in_a_speculative_config_are_named(given: object, message: str) -> None:
    """Unknown keys are refused with the known ones; nothing is ignored."""
    with pytest.raises(ConfigError, match=message):
        engine_config({"speculative_config": given})


def test_an_option_and_the_speculative_config_may_not_disagree() -> None:
    """The same thing said twice is refused rather than guessed."""
    with pytest.raises(ConfigError, match="method is given both"):
        engine_config({"spec": "ngram", "speculative_config": {"method": "suffix"}})


def test_known_keys_are_listed_once() -> None:
    """The list in the error message has every field and vLLM's names."""
    keys = speculative_keys()
    assert len(set(keys)) == len(keys)
    assert {"method", "suffix_decoding_max_tree_depth", "adaptive"} <= set(keys)
