"""A figure on the page with its exact value and whence it is, so that a reader or a test can hold one to the other."""

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from markupsafe import Markup

CREDENTIALS = re.compile(r"(?<=://)[^/@\s]+:[^/@\s]+@")


def figure(text: Any, value: Any, path: Sequence[Any], file: str = "run.json", per: Sequence[Any] | None = None) -> Markup:
    """A figure with its exact value and its source; `per` is the path of the figure it was divided by."""
    value = masked(value) if isinstance(value, str) else value
    source = pointer(file, path)
    origin = source if per is None else f"{source} / {pointer(file, per)}"
    divided = Markup("") if per is None else Markup(' data-per="{}"').format(pointer(file, per))
    return Markup('<data value="{}" title="{}" data-source="{}"{}>{}</data>').format(json.dumps(value), origin, source, divided, text)


def pointer(file: str, path: Iterable[Any]) -> str:
    """`file#` and a JSON pointer (RFC 6901)."""
    return f"{file}#" + "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in path)


def masked(text: Any) -> str:
    """Settings hold no secrets by design; a password somebody put into a URL is not shown either."""
    return CREDENTIALS.sub("…@", str(text))
