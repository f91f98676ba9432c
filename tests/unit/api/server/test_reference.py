"""/docs: every path with its fields and a command that works, and nothing from elsewhere."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser

import httpx2
import pytest

from paceline.api.server.page import POLICY
from paceline.api.server.reference_page import curl, fields_of, page_of
from paceline.api.server.settings import ServerSettings
from tests.local_server import LocalServer, local_server

EMPTY = frozenset({"meta", "link"})


class Page(HTMLParser):
    """Texts by tag, and every attribute; fails where tags do not fit."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.texts: dict[str, list[str]] = {}
        self.attributes: list[tuple[str, str, str]] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in EMPTY:
            self._open.append(tag)
            self.texts.setdefault(tag, []).append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        for tag in set(self._open):
            self.texts[tag][-1] += data


@pytest.fixture(scope="module")
def server() -> Iterator[LocalServer]:
    with local_server() as found:
        yield found


@pytest.fixture(scope="module")
def http(server: LocalServer) -> Iterator[httpx2.Client]:
    with server.client() as found:
        yield found


@pytest.fixture(scope="module")
def shown(http: httpx2.Client) -> Page:
    return Page(http.get("/docs").text)


def test_nothing_comes_from_elsewhere(http: httpx2.Client, shown: Page) -> None:
    """No script at all, one style of this server's, and the policy of the page at /."""
    answer = http.get("/docs")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["content-security-policy"] == POLICY
    assert not {"script", "style", "iframe", "img"} & set(shown.texts)
    loaded = {
        value for tag, name, value in shown.attributes if name in {"src", "href"} if tag != "a"
    }
    assert loaded == {"docs/style.css", "docs/icon.svg"}
    assert http.get("/docs/icon.svg").headers["content-type"] == "image/svg+xml"
    assert not [name for _, name, _ in shown.attributes if name.startswith("on") or name == "style"]
    style = http.get("/docs/style.css")
    assert style.headers["content-type"] == "text/css; charset=utf-8"
    assert not re.search(r"url\(|@import|https?:", style.text)
    again = http.get("/docs", headers={"if-none-match": answer.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_every_path_and_field_is_there(http: httpx2.Client, shown: Page) -> None:
    """What /openapi.json has, under a link from the list at the top."""
    described = http.get("/openapi.json").json()
    heads = [" ".join(text.split()) for text in shown.texts["h3"]]
    every = [
        f"{method.upper()} {path}" for path, ways in described["paths"].items() for method in ways
    ]
    assert sorted(heads) == sorted(every)
    targets = {value for _, name, value in shown.attributes if name == "id"}
    links = {value[1:] for _, name, value in shown.attributes if name == "href" and value[0] == "#"}
    assert links == targets
    assert len(targets) == len(every)
    cells = set(shown.texts["code"])
    for name in ("temperature", "stream_options.include_usage", "messages[].role", "response_id"):
        assert name in cells
    chat = described["paths"]["/v1/chat/completions"]["post"]
    schema = chat["requestBody"]["content"]["application/json"]["schema"]
    assert set(schema["properties"]) <= cells


def test_no_answer_is_promised_that_never_comes(http: httpx2.Client) -> None:
    """Wrong values get 400; FastAPI's 422 and its schemas are left out."""
    assert "422" not in http.get("/openapi.json").text
    assert "ValidationError" not in http.get("/openapi.json").text


def test_it_is_made_once_whoever_asks_at_the_same_time() -> None:
    """What is left out of it must not go while another thread writes it down."""
    with local_server() as server, server.client() as client, ThreadPoolExecutor(4) as several:
        texts = set(several.map(lambda _: client.get("/openapi.json").text, range(8)))
        pages = set(several.map(lambda _: client.get("/docs").text, range(4)))
    assert len(texts) == len(pages) == 1


def test_every_example_works(server: LocalServer, http: httpx2.Client, shown: Page) -> None:
    """As it stands there, the names of models and responses aside."""
    commands = [text for text in shown.texts["pre"] if text.startswith("curl")]
    assert len(commands) == len(shown.texts["h3"])
    for command in commands:
        words = shlex.split(command)
        url = next(word for word in words if word.startswith("http"))
        assert url.startswith(f"{server.url}/")
        data = words[words.index("-d") + 1] if "-d" in words else None
        method = words[words.index("-X") + 1] if "-X" in words else "POST" if data else "GET"
        headers = dict(words[i + 1].split(": ") for i, word in enumerate(words) if word == "-H")
        named = url.replace("/NAME", "/tiny")
        answer = http.request(method, named, content=data, headers=headers)
        assert answer.status_code == (404 if "RESPONSE_ID" in url else 200), (command, answer.text)


def test_a_server_with_keys_says_where_one_is_needed() -> None:
    """The page itself needs none."""
    settings = ServerSettings(served_model_name=("tiny",), api_key=("hush",))
    with local_server(settings=settings) as server, server.client() as client:
        page = client.get("/docs").text
    commands = [text for text in Page(page).texts["pre"] if text.startswith("curl")]
    for command in commands:
        guarded = re.search(r":\d+/(v1|tokenize|detokenize|health_generate)\b", command)
        assert ("Bearer KEY" in command) == bool(guarded), command
    assert "hush" not in page


@pytest.mark.parametrize(
    "host,shown",
    [
        ("gpu.example:8000", "http://gpu.example:8000/tokenize"),
        ("[::1]:80", "http://[::1]:80/tokenize"),
        ("x'$(ls)'", "http://localhost:8000/tokenize"),
        ("<b>", "http://"),
    ],
)
def test_commands_ask_the_server_that_was_asked(http: httpx2.Client, host: str, shown: str) -> None:
    """By the name that the reader knows it by, if it is one."""
    page = http.get("/docs", headers={"host": host}).text
    assert f"curl {shown}" in page
    assert "$(ls)" not in page
    assert "//<b>" not in page
    assert "//&lt;b&gt;" not in page


def test_behind_a_prefix_links_and_commands_have_it() -> None:
    """A proxy shows the server somewhere below its own address, and takes that off what it passes on."""
    settings = ServerSettings(served_model_name=("tiny",), root_path="/llm")
    with local_server(settings=settings) as server, server.client() as client:
        page = client.get("/docs").text
        assert client.get("/docs/style.css").status_code == 200
    assert f"curl {server.url}/llm/tokenize" in page
    assert 'href="docs/style.css"' in page


def test_a_server_may_keep_it_to_itself() -> None:
    """Then there is neither page nor description."""
    settings = ServerSettings(served_model_name=("tiny",), disable_fastapi_docs=True)
    with local_server(settings=settings) as server, server.client() as client:
        paths = ("/docs", "/docs/style.css", "/openapi.json")
        assert {client.get(path).status_code for path in paths} == {404}


def test_what_a_description_says_is_text() -> None:
    """No mark in it becomes one of the page's."""
    evil = "<script>alert(1)</script>"
    schema = {"type": "object", "properties": {evil: {"type": "string", "description": evil}}}
    body = {"application/json": {"schema": schema, "example": {evil: evil}}}
    operation = {
        "tags": [evil],
        "description": evil,
        "requestBody": {"content": body},
        "responses": {"200": {"description": evil}},
    }
    info = {"title": evil, "version": evil, "summary": evil}
    text = page_of({"info": info, "paths": {f"/{evil}": {"post": operation}}}, lambda _: True)
    assert "<script" not in text
    assert Page(text).texts["h1"] == [f"{evil} {evil}"]


def test_fields_say_types_limits_and_needs() -> None:
    """In words; what an optional field may be beside null is what counts."""
    parts = {"Part": {"type": "object", "properties": {"on": {"type": "boolean"}}}}
    schema = {
        "type": "object",
        "required": ["n"],
        "properties": {
            "many": {"type": "array", "items": {"$ref": "#/components/schemas/Part"}},
            "n": {"anyOf": [{"type": "integer", "minimum": 1.0, "maximum": 9}, {"type": "null"}]},
            "way": {"enum": ["a", "b"], "description": "how"},
        },
    }
    found = {f.name: (f.kind, f.limits, f.text, f.required) for f in fields_of(schema, parts)}
    assert next(iter(found)) == "n"
    assert found == {
        "n": ("integer", "≥ 1, ≤ 9", "", True),
        "many": ("list of object", "", "", False),
        "many[].on": ("boolean", "", "", False),
        "way": ('"a" or "b"', "", "how", False),
    }


@pytest.mark.parametrize(
    "method,body,begins",
    [
        ("GET", None, "curl BASE"),
        ("POST", {}, "curl BASE"),
        ("DELETE", None, "curl -X DELETE BASE"),
    ],
)
def test_a_command_says_no_more_than_it_must(method: str, body: object, begins: str) -> None:
    """curl knows GET and, where there is data, POST."""
    assert curl("/x", method, body, key=False).startswith(begins)
