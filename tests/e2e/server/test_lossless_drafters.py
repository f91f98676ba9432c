"""Every other drafter behind the server: each option's tokens are those of plain decoding."""

from __future__ import annotations

from pathlib import Path

import httpx2
import pytest

from tests.e2e.server.conftest import FLAGS
from tests.http_cases import CASES, CONTRADICTIONS, answer, refusal, shown
from tests.server_process import running
from tests.tiny_drafters import overfit_dflash
from tests.tiny_eagle3 import overfit_eagle3

# Name of a drafter -> flags beside its own; None for the folder: it has no network.
DRAFTERS = {
    "ngram": (None, ()),
    "dflash": ("dflash", ()),
    "ddtree": ("dflash", ()),
    "eagle3": ("eagle3", ("--eagle-topk", "3", "--eagle-num-steps", "3")),
    "merged": ("dflash", ()),
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
    """Drafters that have learned a greedy answer by heart."""
    from tests.byte_tokenizer import byte_tokenizer
    from tests.http_cases import TEXT

    text = [*byte_tokenizer().encode(TEXT * 2), *expected["greedy"][0][1]]
    root = tmp_path_factory.mktemp("drafters")
    return {
        "dflash": overfit_dflash(root / "dflash", tiny_model, [text], steps=120),
        "eagle3": overfit_eagle3(root / "eagle3", tiny_model, [text], steps=120),
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAFTERS)
def test_every_drafter_changes_no_token(
    name, tiny_model, networks, expected, refused, tmp_path
) -> None:
    """The same ids, text, log-probabilities and reason, while drafts are accepted."""
    network, flags = DRAFTERS[name]
    # Not adaptive: whether drafts pay depends on how busy a machine is.
    given = ["--spec", name, "--spec-check", "off", "--no-adaptive", *FLAGS, *flags]
    if network is not None:
        given += ["--spec-model", str(networks[network])]
    accepted = 0
    with (
        running(tiny_model, tmp_path, *given) as server,
        httpx2.Client(base_url=server.url, timeout=60) as http,
    ):
        for case_name, case in CASES.items():
            found = answer(http, case)
            assert shown(found) == expected[case_name], case_name
            figures = found.get("metrics", {}).get("speculative_decoding", {})
            # A grammar's forced tokens are accepted whatever the drafter does.
            accepted += figures.get("num_accepted_draft_tokens", 0)
            accepted -= figures.get("num_forced_tokens", 0)
        for key, contradiction in CONTRADICTIONS.items():
            assert refusal(http, contradiction) == refused[key], key
    assert accepted > 9, "hardly a draft was accepted, so little is shown"
