"""URLs of object storage: which texts are URLs, and what they may hold."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from steadyrl.core.errors import SettingError

URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


def is_url(text: object) -> bool:
    """Return whether a text is a URL, not a path."""
    return isinstance(text, str) and URL.match(text) is not None


def validate_url(field: str, url: str) -> None:
    """Raise SettingError for a URL that is none of a folder, or that holds a password."""
    if not is_url(url) or "::" in url:
        reason = "must be the URL of a folder, such as s3://bucket/folder or file:///path"
        raise SettingError(field, url, reason)
    try:
        parts = urlsplit(url)
        password = parts.password
    except ValueError as error:
        raise SettingError(field, url, f"is no URL: {error}") from None
    if password is not None:
        shown = url.replace(f":{password}@", ":…@")
        reason = "holds a password, which would be logged and saved: set it in the environment"
        raise SettingError(field, shown, f"{reason} (AWS_SECRET_ACCESS_KEY, …)")
    if parts.query or parts.fragment:
        reason = "must end with a folder: it has a query or a fragment, which may hold a key"
        raise SettingError(field, url.partition("?")[0].partition("#")[0], reason)
