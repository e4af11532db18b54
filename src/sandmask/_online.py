"""Find out quickly whether a server can be reached, because libraries would retry for most of a minute."""

import os
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SECONDS_TO_ANSWER = 5.0


def answers(address: str) -> bool:
    """Whether a server answers at an address; False if HF_HUB_OFFLINE is set."""
    if os.environ.get("HF_HUB_OFFLINE", "0").upper() in ("1", "ON", "YES", "TRUE"):
        return False
    try:
        urllib.request.urlopen(  # noqa: S310 - the callers' addresses are constants of libraries
            urllib.request.Request(address, method="HEAD"),  # noqa: S310
            timeout=SECONDS_TO_ANSWER,
        ).close()
    except urllib.error.HTTPError:
        return True  # an error is also an answer
    except (OSError, ValueError):
        return False
    return True


@contextmanager
def hub_if_reachable() -> Iterator[str | None]:
    """Within this context, Hugging Face's libraries use only their cache if the Hub does not answer.

    Yields the address of the Hub, or None if it does not answer.
    """
    from huggingface_hub import constants

    if answers(constants.ENDPOINT):
        yield constants.ENDPOINT
        return
    settings: list[Any] = [constants]
    if "datasets" in sys.modules:
        settings.append(sys.modules["datasets"].config)
    before = [each.HF_HUB_OFFLINE for each in settings]
    for each in settings:
        each.HF_HUB_OFFLINE = True
    try:
        yield None
    finally:
        for each, value in zip(settings, before, strict=True):
            each.HF_HUB_OFFLINE = value
