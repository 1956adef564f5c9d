"""Secrets are taken out of what an engine says before it is stored: engines read models that strangers made."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

MASK = "***"
MIN_SECRET_LENGTH = 8  # a shorter value would blot out half of every log

_SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|PRIVATE_KEY|CREDENTIAL", re.IGNORECASE)
_PATTERNS = (
    (re.compile(r"\bhf_[A-Za-z0-9]{8,}"), MASK),  # Hugging Face
    (re.compile(r"\bbf_[0-9a-f]{12}_[0-9A-Za-z_-]{43}"), MASK),  # ours
    (re.compile(r"\b(Bearer|Basic)\s+[A-Za-z0-9._~+/=-]{8,}", re.IGNORECASE), rf"\1 {MASK}"),
    (re.compile(r"(://)[^/\s@\"']+@"), rf"\1{MASK}@"),  # a URL's user and password
    (
        re.compile(
            r"([?&](?:X-Amz-[A-Za-z-]+|Signature|Policy|Key-Pair-Id|token|sig|access_token|api_key)=)[^&\s\"']+",
            re.IGNORECASE,
        ),
        rf"\1{MASK}",
    ),  # a signed URL's right to read
)


class Redactor:
    """Masks ``secrets`` wherever they stand, and whatever looks like a key."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        self._secrets: list[str] = []
        for secret in secrets:
            self.hide(secret)

    @classmethod
    def of_environment(cls, environment: Mapping[str, str] = os.environ) -> Redactor:
        """Masks what variables hold whose names say that it is secret."""
        return cls(value for name, value in environment.items() if _SECRET_NAME.search(name))

    def hide(self, secret: str) -> None:
        """Mask this one, too, from now on."""
        if len(secret) >= MIN_SECRET_LENGTH:
            # the longest first: one may contain another
            self._secrets = sorted({*self._secrets, secret}, key=len, reverse=True)

    def clean(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, MASK)
        for pattern, mask in _PATTERNS:
            text = pattern.sub(mask, text)
        return text

    def clean_all(self, value: Any) -> Any:
        """``value`` from JSON with every string in it cleaned, names included."""
        if isinstance(value, str):
            return self.clean(value)
        if isinstance(value, dict):
            return {self.clean(name): self.clean_all(member) for name, member in value.items()}
        if isinstance(value, list):
            return [self.clean_all(member) for member in value]
        return value
