"""Secrets at rest: opened by an independent reading of the format, by nobody else, and a key file that others may read
is refused."""

import base64
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from api.settings import Settings
from api.store.vault import CannotOpen, Vault, write_new_key
from quantcore.errors import ConfigError

KEY = bytes(range(32))


def test_it_is_aes_256_gcm() -> None:
    """Taken apart by the primitive itself: mark, nonce, ciphertext, tag."""
    sealed = Vault(KEY).seal("hf_secret", "hub_token p n")
    nonce, ciphertext, tag = sealed[4:16], sealed[16:-16], sealed[-16:]
    reader = Cipher(algorithms.AES(KEY), modes.GCM(nonce, tag)).decryptor()
    reader.authenticate_additional_data(b"hub_token p n")
    assert reader.update(ciphertext) + reader.finalize() == b"hf_secret"
    assert b"hf_secret" not in sealed
    assert Vault(KEY).open(sealed, "hub_token p n") == "hf_secret"


def test_the_same_text_is_never_sealed_the_same() -> None:
    assert len({Vault(KEY).seal("x", "y") for _ in range(100)}) == 100


def test_what_does_not_open() -> None:
    vault = Vault(KEY)
    sealed = vault.seal("hf_secret", "row 1")
    with pytest.raises(CannotOpen, match="another entry"):
        vault.open(sealed, "row 2")
    for position in (5, 20, len(sealed) - 1):
        damaged = bytearray(sealed)
        damaged[position] ^= 1
        with pytest.raises(CannotOpen, match="damaged"):
            vault.open(bytes(damaged), "row 1")
    with pytest.raises(CannotOpen, match="another secret key"):
        Vault(KEY[::-1]).open(sealed, "row 1")


@pytest.mark.parametrize("text", ["", "short", base64.b64encode(KEY[:31]).decode(), "é" * 44, "=" * 44])
def test_what_is_no_key(text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Vault.of_text(text)
    assert refused.value.code == "invalid_secret_key"
    assert not text or text not in str(refused.value)


def test_both_alphabets_of_base64_are_read() -> None:
    key = bytes([0xFB, 0xFF] * 16)
    sealed = Vault(key).seal("x", "y")
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        assert Vault.of_text(encode(key).decode() + "\n").open(sealed, "y") == "x"


def test_a_key_file_is_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "secret.key"
    write_new_key(path)
    assert path.stat().st_mode & 0o777 == 0o600
    settings = Settings(database_url="x", broker_url="x", data_dir=tmp_path, secret_key_file=path)  # type: ignore[arg-type]
    assert settings.vault and settings.vault.open(settings.vault.seal("x", "y"), "y") == "x"
    with pytest.raises(FileExistsError):
        write_new_key(path)  # what it sealed would be lost
    for mode in (0o640, 0o604, 0o622, 0o644):
        path.chmod(mode)
        with pytest.raises(ConfigError, match=f"mode is {mode:04o}") as refused:
            Vault.of_file(path)
        assert refused.value.code == "unsafe_secret_key_file"
    for other in (tmp_path / "none", tmp_path):
        with pytest.raises(ConfigError) as refused:
            Vault.of_file(other)
        assert refused.value.code == "unsafe_secret_key_file"


def test_an_app_does_not_start_with_an_unsafe_key(tmp_path: Path) -> None:
    from api.main import create_app

    path = tmp_path / "secret.key"
    write_new_key(path)
    path.chmod(0o644)
    settings = Settings(
        database_url="postgresql+psycopg://x@/x", broker_url="memory://", data_dir=tmp_path, secret_key_file=path
    )  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="Other users can read"):
        create_app(settings)
