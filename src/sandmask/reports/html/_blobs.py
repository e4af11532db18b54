"""Data inside a page: deflated, then written in base64, which a browser can undo by itself."""

import base64
import json
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sandmask._text import printable
from sandmask.reports._json import finite

MISSING = 0xFFFF  # the code of a value that is not there


def blob(content: bytes) -> str:
    """Bytes as text that needs no escaping in HTML."""
    return base64.b64encode(zlib.compress(content, 9)).decode()


def json_blob(content: Any) -> str:
    """A JSON value as text, with null for NaN and infinities, which a browser would not read.

    All words are made printable, keys and values alike, so that they still find each other.
    """
    safe = _printable(finite(content))
    return blob(json.dumps(safe, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode())


def _printable(value: Any) -> Any:
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printable(str(name)): _printable(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_printable(one) for one in value]
    return value


def codes_blob(header: Any, curves: Sequence[NDArray[np.uint16]]) -> str:
    """Coded curves ([curves, points] each) behind a JSON header that says how to read them.

    Stored as changes from point to point, 0, -1, 1, -2, 2, ... written as 0, 1, 2, 3, 4, ..., and all lower bytes
    before all upper ones: most of the upper ones are zero then, which is what compresses.
    """
    changes = [np.diff(codes, axis=1, prepend=np.uint16(0)).view(np.int16).ravel() for codes in curves]
    joined = np.concatenate([np.empty(0, np.int16), *changes])
    folded = ((joined << 1) ^ (joined >> 15)).astype("<u2")
    planes = folded.view(np.uint8).reshape(-1, 2).T.tobytes()
    words = json.dumps(_printable(finite(header)), allow_nan=False, separators=(",", ":")).encode()
    return blob(len(words).to_bytes(4, "little") + words + planes)
