"""Seals secrets, AES-256-GCM (NIST SP 800-38D), and signs backups, with one key of the operator's.

The key is never in the database. A sealed secret is bound to its place (``about``, the additional authenticated data):
copied into another row it does not open.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
import secrets
import stat
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from quantcore.errors import ConfigError

KEY_BYTES = 32
NONCE_BYTES = 12  # random: with one key good for 2**32 secrets, far more than there will be
MARK_BYTES = 4  # says which key sealed it, so that a changed key is not mistaken for damage


class CannotOpen(Exception):
    """A sealed text does not open: another key, another place, or damage. The message says which it may be."""


class Vault:
    """Seals and opens short texts."""

    def __init__(self, key: bytes) -> None:
        self._cipher = AESGCM(key)
        self._signing_key = hashlib.sha256(b"bitfoundry signatures" + key).digest()
        self._mark = hashlib.sha256(b"bitfoundry vault" + key).digest()[:MARK_BYTES]

    @classmethod
    def of_text(cls, text: str) -> Vault:
        """Return the vault for a key of 32 bytes in base64.

        Raises ConfigError ``invalid_secret_key``; the text is not in it.
        """
        try:
            key = base64.b64decode(text.strip(), altchars=b"-_" if set(text) & set("-_") else None, validate=True)
        except (binascii.Error, ValueError):
            key = b""
        if len(key) != KEY_BYTES:
            raise ConfigError(
                "The secret key is not 32 bytes in base64.",
                code="invalid_secret_key",
                hint="Create one with `openssl rand -base64 32` and keep it: without it, the stored secrets cannot "
                "be decrypted.",
            )
        return cls(key)

    @classmethod
    def of_file(cls, path: Path) -> Vault:
        """Return the vault for the key in a file that only its owner may read.

        Raises ConfigError ``unsafe_secret_key_file``, also if there is no such file.
        """
        return cls.of_text(read_secret_file(path))

    def seal(self, text: str, about: str) -> bytes:
        nonce = secrets.token_bytes(NONCE_BYTES)
        return self._mark + nonce + self._cipher.encrypt(nonce, text.encode(), about.encode())

    def open(self, sealed: bytes, about: str) -> str:
        """Return the text of a sealed one. Raises CannotOpen."""
        mark, nonce, rest = sealed[:MARK_BYTES], sealed[MARK_BYTES:][:NONCE_BYTES], sealed[MARK_BYTES + NONCE_BYTES :]
        if mark != self._mark:
            raise CannotOpen("it was encrypted with another secret key")
        try:
            return self._cipher.decrypt(nonce, rest, about.encode()).decode()
        except InvalidTag as error:
            raise CannotOpen("it is damaged, or was encrypted for another entry") from error

    def sign(self, data: bytes) -> str:
        """Return the HMAC-SHA256 of the data: only who has the key can make it, or check it."""
        return hmac.new(self._signing_key, data, hashlib.sha256).hexdigest()

    def has_signed(self, data: bytes, signature: str) -> bool:
        return hmac.compare_digest(self.sign(data).encode(), signature.encode())


def write_new_key(path: Path) -> None:
    """Write a new random key into a new file with mode 0600. Raises FileExistsError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w") as stream:
        stream.write(base64.b64encode(secrets.token_bytes(KEY_BYTES)).decode() + "\n")


def read_secret_file(path: Path) -> str:
    """Return the text of a file that only its owner may read.

    Raises ConfigError ``unsafe_secret_key_file``, also if there is no such file.
    """
    try:
        with path.open() as stream:
            mode = stat.S_IMODE(os.fstat(stream.fileno()).st_mode)  # of the file that is read, not of a path
            text = stream.read(1024)
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not text"
        raise _unsafe(f"The secret key file {path} cannot be read: {why}.") from error
    if mode & 0o077:
        raise _unsafe(f"Other users can read the secret key file {path}: its mode is {mode:04o}.")
    return text


def _unsafe(message: str) -> ConfigError:
    return ConfigError(
        message,
        code="unsafe_secret_key_file",
        hint="It must belong to the service's account and have mode 0600.",
    )
