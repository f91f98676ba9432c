"""API keys: who may ask, and whose cached prefixes a request may find.

Keys are kept as digests and compared in constant time, all of them, whichever fits. Only the paths
that cost tokens are guarded; probes and /metrics stay open.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from pathlib import Path

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from paceline.api.server.errors import ApiError
from paceline.api.server.settings import ServerSettings
from paceline.api.server.sse import JsonAnswer
from paceline.core.errors import ConfigError

GUARDED = ("/v1", "/tokenize", "/detokenize", "/health_generate")
_TENANT = "tenant"
_OWNER = "owner"  # always, while the tenant is empty where caches are shared


class Keys:
    """The keys that are good; none: everybody is let in."""

    def __init__(self, keys: Iterable[str]) -> None:
        # On a command line a key may be any bytes; those that are no UTF-8 stand as surrogates.
        data = [key.encode("utf-8", "surrogateescape") for key in keys]
        self._digests = tuple(dict.fromkeys(map(_digest, data)))

    @classmethod
    def of(cls, settings: ServerSettings) -> Keys:
        """The keys of flags and file together.

        Raises:
            ConfigError: the file cannot be read, or holds no key.
        """
        keys = list(settings.api_key)
        if settings.api_key_file is not None:
            keys += _read(settings.api_key_file)
        return cls(keys)

    def __bool__(self) -> bool:
        return bool(self._digests)

    def owner(self, authorization: bytes) -> str | None:
        """A name for the key in an Authorization header; None: it is not a good one."""
        scheme, _, shown = authorization.strip().partition(b" ")
        digest = _digest(shown.strip())
        fits = [hmac.compare_digest(digest, known) for known in self._digests]  # all, always
        if scheme.lower() != b"bearer" or not any(fits):
            return None
        return digest.hex()[:32]


class KeyGuard:
    """ASGI middleware: 401 for guarded paths without a good key.

    Args:
        app: what is guarded.
        keys: the good ones.
        by_key: requests of different keys share no cached prefixes.
    """

    def __init__(self, app: ASGIApp, keys: Keys, *, by_key: bool) -> None:
        self._app = app
        self._keys = keys
        self._by_key = by_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let through, or refuse."""
        if scope["type"] != "http" or not self._keys or not is_guarded(scope):
            await self._app(scope, receive, send)
            return
        shown = b"".join(value for name, value in scope["headers"] if name == b"authorization")
        owner = self._keys.owner(shown)
        if owner is None:
            what = "a wrong API key was shown" if shown else "no API key was shown"
            msg = f"{what}; this server asks for one; send the header 'Authorization: Bearer KEY'"
            error = ApiError(401, msg, code="invalid_api_key")
            headers = {"WWW-Authenticate": "Bearer"}
            await JsonAnswer(error.body, 401, headers)(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        state[_OWNER] = owner
        if self._by_key:
            state[_TENANT] = owner
        await self._app(scope, receive, send)


def is_guarded(scope: Scope) -> bool:
    """Whether a request's path is one that needs a key."""
    path = str(scope["path"]).removeprefix(scope.get("root_path", ""))
    return any(path == start or path.startswith(f"{start}/") for start in GUARDED)


def owner_of(request: Request) -> str:
    """Whose key a request showed, by `Keys.owner`; "" where no keys are asked for."""
    return str(getattr(request.state, _OWNER, ""))


def tenant_of(request: Request) -> str:
    """A name for the owner of a request's key, where the server separates keys; else empty."""
    return str(getattr(request.state, _TENANT, ""))


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _read(path: str) -> list[str]:
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        msg = f"api_key_file {path} cannot be read ({error}); give a text file with a key a line"
        raise ConfigError(msg) from error
    keys = [line.strip() for line in lines]
    keys = [key for key in keys if key and not key.startswith("#")]
    if not keys:
        msg = f"api_key_file {path} holds no key; write one a line, or leave the option out"
        raise ConfigError(msg)
    return keys
