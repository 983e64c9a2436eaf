"""Errors as problem details (RFC 9457)."""

import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from starlette.responses import Response

_MEDIA_TYPE = "application/problem+json"
_PHRASES = {one.value: one.phrase for one in HTTPStatus}
_WITHOUT_BODY = (HTTPStatus.NO_CONTENT, HTTPStatus.RESET_CONTENT, HTTPStatus.NOT_MODIFIED)


def problem(
    status: int,
    detail: str,
    *,
    type: str = "about:blank",
    title: str | None = None,
    headers: Mapping[str, str] | None = None,
    **more: Any,
) -> Response:
    """Return a response with problem details; `more` are members of its own."""
    title = title or _PHRASES.get(status, f"Status {status}")
    content = {"type": type, "title": title, "status": int(status), "detail": detail, **more}
    # In ASCII: names of fields may have half a surrogate pair, which UTF-8 can't encode.
    body = None if status in _WITHOUT_BODY or status < HTTPStatus.OK else json.dumps(content)
    return Response(body, status, headers, media_type=body and _MEDIA_TYPE)
