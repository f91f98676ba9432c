"""Every other drafter behind the server: each option's tokens are those of plain decoding."""

from __future__ import annotations

from pathlib import Path

import httpx2
import pytest

from paceline import draft
from paceline.draft import COMPOSITES, NETWORKS
from tests.e2e.server.conftest import FLAGS
from tests.http_cases import CASES, CONTRADICTIONS, answer, refusal, shown
from tests.server_process import running
from tests.tiny_drafters import overfit_dflash
from tests.tiny_eagle3 import overfit_eagle3

# Cases whose answers networks learn by heart, and those whose answers are partly the same.
LEARNED = ("greedy", "seeded", "top_k", "allowed", "two ids", "bad words", "min_tokens")
REACHED = (*LEARNED, "hot", "penalties", "logprobs", "capped")
REPEATING = ("two ids",)
STEPS = 300  # of training
# Name of a drafter -> its network, flags beside its own, cases that it must have drafts accepted in.
DRAFTERS = {
    "ngram": (None, (), REPEATING),
    "dflash": ("dflash", (), REACHED),
    "ddtree": ("dflash", (), REACHED),
    "eagle3": ("eagle3", ("--eagle-topk", "3", "--eagle-num-steps", "3"), REACHED),
    "merged": ("dflash", (), REACHED),
}


@pytest.fixture(scope="module")
def expected(plain_server):
    """What plain decoding says."""
    found = {}
    with httpx2.Client(base_url=plain_server.url, timeout=60) as http:
        for name, case in CASES.items():
            plain = {k: v for k, v in case.items() if k != "speculative"}
            found[name] = shown(answer(http, plain))
    return found


@pytest.fixture(scope="module")
def refused(plain_server):
    """What plain decoding says of options that a grammar contradicts."""
    with httpx2.Client(base_url=plain_server.url, timeout=60) as http:
        return {name: refusal(http, case) for name, case in CONTRADICTIONS.items()}


@pytest.fixture(scope="module")
def networks(tiny_model, expected, tmp_path_factory) -> dict[str, Path]:
    """Drafters that have learned some answers by heart."""
    from tests.byte_tokenizer import byte_tokenizer
    from tests.http_cases import TEXT

    prompt = byte_tokenizer().encode(TEXT * 2)
    texts = [[*prompt, *expected[name][0][1]] for name in LEARNED]
    root = tmp_path_factory.mktemp("drafters")
    return {
        "dflash": overfit_dflash(root / "dflash", tiny_model, texts, steps=STEPS),
        "eagle3": overfit_eagle3(root / "eagle3", tiny_model, texts, steps=STEPS),
    }


def test_no_drafter_is_forgotten() -> None:
    """A registry line brings a drafter here; the suffix drafter is test_lossless_http.py's."""
    assert DRAFTERS.keys() | {"none", "suffix"} == {*draft.DRAFTERS, *NETWORKS, *COMPOSITES}


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAFTERS)
def test_every_drafter_changes_no_token(
    name, tiny_model, networks, expected, refused, tmp_path
) -> None:
    """The same ids, text, log-probabilities and reason, while drafts are accepted wherever they can be."""
    network, flags, reached = DRAFTERS[name]
    # Not adaptive: whether drafts pay depends on how busy a machine is.
    given = ["--spec", name, "--spec-check", "off", "--no-adaptive", *FLAGS, *flags]
    if network is not None:
        given += ["--spec-model", str(networks[network])]
    accepted: dict[str, int] = {}
    with (
        running(tiny_model, tmp_path, *given) as server,
        httpx2.Client(base_url=server.url, timeout=60) as http,
    ):
        for case_name, case in CASES.items():
            found = answer(http, case)
            assert shown(found) == expected[case_name], case_name
            figures = found.get("metrics", {}).get("speculative_decoding", {})
            # A grammar's forced tokens are accepted whatever the drafter does.
            drafts = figures.get("num_accepted_draft_tokens", 0)
            accepted[case_name] = drafts - figures.get("num_forced_tokens", 0)
        for key, contradiction in CONTRADICTIONS.items():
            assert refusal(http, contradiction) == refused[key], key
    missed = [case for case in reached if not accepted[case]]
    assert not missed, f"no draft was accepted in {missed}, so nothing is shown there: {accepted}"
