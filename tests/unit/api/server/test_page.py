"""The page's files: how they are served, and what must never be in them. The page itself: tests/e2e/server."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

import paceline.api.server
from paceline.api.server.settings import ServerSettings
from tests.local_server import local_server

FOLDER = Path(paceline.api.server.__file__).parent / "page"
FILES = sorted(FOLDER.iterdir())


@pytest.fixture(scope="module")
def http() -> Iterator[httpx2.Client]:
    with local_server() as server, server.client() as found:
        yield found


def test_every_file_is_served_as_what_it_is(http: httpx2.Client) -> None:
    """A browser that may not guess types runs nothing that has the wrong one."""
    kinds = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
    for file in FILES:
        answer = http.get(f"/page/{file.name}")
        assert answer.content == file.read_bytes()
        assert answer.headers["content-type"].split(";")[0] == kinds.get(
            file.suffix, "image/svg+xml"
        )
        assert answer.headers["x-content-type-options"] == "nosniff"
    assert http.get("/").content == (FOLDER / "index.html").read_bytes()


def test_files_are_not_sent_twice(http: httpx2.Client) -> None:
    """A browser keeps them, and asks whether they have changed."""
    tag = http.get("/").headers["etag"]
    again = http.get("/", headers={"If-None-Match": tag})
    assert (again.status_code, again.content) == (304, b"")
    assert http.get("/", headers={"If-None-Match": '"other"'}).status_code == 200
    head = http.head("/")
    assert (head.status_code, head.content, head.headers["etag"]) == (200, b"", tag)


@pytest.mark.parametrize("name", ["other.js", "..%2Fapp.py", "%00", "page.py"])
def test_nothing_else_is_served(http: httpx2.Client, name: str) -> None:
    """Names are looked up, never paths."""
    answer = http.get(f"/page/{name}")
    assert answer.status_code == 404
    assert "message" in answer.json()["error"]


def test_a_server_may_have_no_page() -> None:
    """One that strangers can reach need not invite them."""
    with (
        local_server(settings=ServerSettings(disable_page=True)) as server,
        server.client() as client,
    ):
        assert {client.get(path).status_code for path in ("/", "/page/main.js")} == {404}


def test_the_policy_lets_nothing_in_and_nothing_out(http: httpx2.Client) -> None:
    """Whatever a model writes, and whatever a later change forgets."""
    policy = http.get("/").headers["content-security-policy"]
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules.pop("require-trusted-types-for") == "'script'"
    assert rules.pop("trusted-types") == "'none'"
    assert rules["default-src"] == rules["base-uri"] == rules["frame-ancestors"] == "'none'"
    assert set(rules.values()) == {"'none'", "'self'"}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_file_is_short_and_keeps_to_itself(file: Path) -> None:
    """Small files, no address of another place, no text set as markup, no style or script in attributes."""
    text = file.read_text(encoding="utf-8")
    assert text.count("\n") <= 300
    assert "\t" not in text
    addresses = re.findall(r"https?:[^\"'\s)]*|[\"'(]//\w[^\"'\s)]*", text)
    assert set(addresses) <= {"http://www.w3.org/2000/svg"}
    forbidden = (
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|\bon\w+="
    )
    assert not re.search(forbidden, text)
    if file.suffix == ".html":
        assert "<style" not in text
        assert " style=" not in text
        assert re.findall(r"<script(?![^>]* src=)", text) == []
        linked = re.findall(r'(?:src|href)="(?!#)([^"]+)"', text)
        assert all((FOLDER.parent / name).is_file() for name in linked)
