"""Several drafters behind one server, and requests that name one of them or none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from tests.browser import Page
from tests.e2e.server.conftest import FLAGS
from tests.http_cases import BODY, CASES, answer, shown
from tests.server_process import ServerProcess, running

SPEC = ("--spec", "merged", "--spec-parts", "suffix", "--spec-parts", "ngram", "--no-adaptive")
ASKED = {"ngram": {"own text", "target"}, "suffix": {"own text", "past outputs", "target"}}


@pytest.fixture(scope="module")
def several(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with two drafters."""
    with running(tiny_model, tmp_path_factory.mktemp("several"), *SPEC, *FLAGS) as found:
        yield found


def test_a_request_names_its_drafter(several, plain_server) -> None:
    """The tokens stay; the answer says who drafted; names that are not there are refused with those that are."""
    case = {**CASES["greedy"], "max_tokens": 200, "paceline": {"sources": True}}
    plain_case = {k: v for k, v in case.items() if k != "paceline"}
    with httpx2.Client(base_url=plain_server.url, timeout=60) as http:
        expected = shown(answer(http, plain_case))
    with httpx2.Client(base_url=several.url, timeout=60) as http:
        assert http.get("/server_info").json()["drafter"]["parts"] == ["suffix", "ngram"]
        for name, sources in ASKED.items():
            found = answer(http, case, speculative={"method": name})
            assert shown(found) == expected
            figures = found["metrics"]["speculative_decoding"]
            assert figures["method"] == name
            assert figures["num_accepted_draft_tokens"] > 0
            assert set(found["choices"][0]["paceline"]["sources"]) <= sources
        found = answer(http, case, speculative={"method": "none"})
        assert shown(found) == expected
        figures = found["metrics"]["speculative_decoding"]
        assert figures["method"] == "none"
        assert not figures["num_draft_tokens"]
        refused = http.post(
            "/v1/completions", json={**BODY, **case, "speculative": {"method": "eagle3"}}
        )
        assert refused.status_code == 400
        message = refused.json()["error"]["message"]
        assert "'merged' and 'suffix' and 'ngram' and 'none'" in message


def test_the_page_offers_each(several, browser) -> None:
    """Side by side can be any two of what the server has."""
    page = Page(browser, several.url)
    for name in ("drafter", "other"):
        options = page.element(f"#{name}").find_elements("tag name", "option")
        assert [o.text for o in options] == ["merged", "suffix", "ngram", "none"]
