"""The page at /: its files, and the headers that keep it to itself.

Nothing is built: the files in page/ are what a browser gets. The policy lets it load and ask nothing but
this server, and a browser that knows trusted types refuses every text that is set as HTML.
"""

from __future__ import annotations

import hashlib
from importlib import resources

from fastapi import APIRouter, Request
from starlette.responses import Response

from paceline.api.server.errors import ApiError, shown

_FOLDER = "page"
_INDEX = "index.html"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_ALLOWED = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "img-src": "'self'",
    "connect-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
    "require-trusted-types-for": "'script'",
    "trusted-types": "'none'",
}
POLICY = "; ".join(f"{what} {whence}" for what, whence in _ALLOWED.items())
_HEADERS = {
    "Cache-Control": "no-cache",  # asked for again each time, and answered 304
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def router() -> APIRouter:
    """The page's paths: / and /page/NAME. No key is needed for them, and none is in them."""
    files = _files()
    routes = APIRouter(include_in_schema=False)

    @routes.api_route("/", methods=["GET", "HEAD"])
    async def index(request: Request) -> Response:
        """The page."""
        return answer(request, _INDEX, files[_INDEX])

    @routes.api_route("/page/{name}", methods=["GET", "HEAD"])
    async def part(name: str, request: Request) -> Response:
        """One of its files."""
        if name not in files:
            msg = f"the page has no file {shown(name)}; it has {', '.join(files)}; ask for one of these"
            raise ApiError(404, msg)
        return answer(request, name, files[name])

    return routes


def _files() -> dict[str, bytes]:
    folder = resources.files(__package__) / _FOLDER
    found = sorted(folder.iterdir(), key=lambda file: file.name)
    return {file.name: file.read_bytes() for file in found if _suffix(file.name) in _TYPES}


def _suffix(name: str) -> str:
    return name[name.rfind(".") :]


def answer(request: Request, name: str, content: bytes) -> Response:
    """A file as a browser gets it, with the policy above.

    Args:
        request: may say which version the browser has.
        name: its ending gives its type.
        content: of the file.
    """
    tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
    headers = {**_HEADERS, "ETag": tag}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(content, media_type=_TYPES[_suffix(name)], headers=headers)
