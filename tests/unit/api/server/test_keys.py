"""Keys: who is let in, and whose requests share a cache."""

from __future__ import annotations

import pytest

from paceline.api.server.keys import Keys
from paceline.api.server.settings import ServerSettings
from paceline.core.errors import ConfigError
from tests.local_server import PATH, LocalServer, body, local_server


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory):
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text("# of others\nfrom-file\n\n  also-from-file  \n")
    settings = ServerSettings(
        served_model_name=("tiny",),
        api_key=("first", "second"),
        api_key_file=str(file),
        cache_scope="key",
        allowed_origins=("https://page.example",),
    )
    with local_server(settings=settings) as found:
        yield found


@pytest.mark.parametrize(
    "shown,status",
    [
        ("Bearer first", 200),
        ("bearer second", 200),
        ("Bearer from-file", 200),
        ("Bearer also-from-file", 200),
        ("Bearer firs", 401),
        ("Bearer  first", 200),
        ("Bearer", 401),
        ("Basic first", 401),
        ("first", 401),
        ("Bearer # of others", 401),
        (None, 401),
    ],
)
def test_only_good_keys_are_let_in(guarded: LocalServer, shown: str | None, status: int) -> None:
    """Keys of flags and file; whatever else is shown is 401, in OpenAI's form."""
    headers = {} if shown is None else {"authorization": shown}
    with guarded.client() as client:
        answer = client.post(PATH, json=body(), headers=headers)
    assert answer.status_code == status
    if status == 401:
        assert answer.json()["error"]["type"] == "authentication_error"
        assert answer.headers["www-authenticate"] == "Bearer"


def test_every_path_that_costs_tokens_is_guarded(guarded: LocalServer) -> None:
    """What is not known to be harmless needs a key; probes and figures are open."""
    open_ones = {"/health", "/ping", "/ready", "/version", "/load", "/server_info", "/metrics"}
    with guarded.client() as client:
        paths = client.get("/openapi.json").json()["paths"]
        assert set(paths) >= open_ones | {PATH, "/v1/chat/completions", "/v1/models", "/tokenize"}
        for path, methods in paths.items():
            for method in methods:
                status = client.request(method, path.replace("{", "").replace("}", "")).status_code
                assert (status == 401) == (path not in open_ones), (method, path)
        assert client.get("/v1/unknown").status_code == 401
        assert client.get("//v1/models").status_code == 404


def test_a_page_of_an_allowed_origin_may_ask(guarded: LocalServer) -> None:
    """A browser's question before the request needs no key, and refusals can be read."""
    asks = {
        "origin": "https://page.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization",
    }
    with guarded.client() as client:
        allowed = client.options(PATH, headers=asks)
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == "https://page.example"
        refused = client.post(PATH, json=body(), headers={"origin": "https://page.example"})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://page.example"
        other = client.options(PATH, headers={**asks, "origin": "https://other.example"})
        assert "access-control-allow-origin" not in other.headers


def test_keys_separate_caches_and_so_do_salts(guarded: LocalServer) -> None:
    """Same key and salt, same scope; scopes hold neither key nor salt."""
    before = len(guarded.engine.added)
    with guarded.client() as client:
        for key in ("first", "second", "first"):
            for salt in (None, "s"):
                fields = body() if salt is None else body(cache_salt=salt)
                headers = {"authorization": f"Bearer {key}"}
                assert client.post(PATH, json=fields, headers=headers).status_code == 200
    scopes = [request.scope for request in guarded.engine.added[before:]]
    assert len(set(scopes)) == 4
    assert scopes[:2] == scopes[4:]
    assert all(scopes)
    assert not any("first" in scope or "second" in scope for scope in scopes)


def test_without_keys_or_salts_caches_are_shared() -> None:
    """The default: one scope; a salt separates."""
    with local_server() as server, server.client() as client:
        for salt in (None, None, "s"):
            client.post(PATH, json=body() if salt is None else body(cache_salt=salt))
    scopes = [request.scope for request in server.engine.added]
    assert scopes[:2] == ["", ""]
    assert scopes[2]


def test_a_key_may_be_any_bytes() -> None:
    """Keys are compared as bytes; a command line gives those that are no UTF-8 as surrogates."""
    keys = Keys(["ключ", b"latin\xe9".decode("utf-8", "surrogateescape")])
    assert keys.owner("Bearer ключ".encode())
    assert keys.owner(b"Bearer latin\xe9")
    assert not keys.owner("Bearer latin\u00e9".encode())


def test_a_key_file_must_hold_keys(tmp_path) -> None:
    """An empty file would leave a server open that was meant to be closed."""
    empty = tmp_path / "keys"
    empty.write_text("# nothing\n")
    with pytest.raises(ConfigError, match="holds no key"):
        Keys.of(ServerSettings(api_key_file=str(empty)))
    with pytest.raises(ConfigError, match="cannot be read"):
        Keys.of(ServerSettings(api_key_file=str(tmp_path / "none")))
