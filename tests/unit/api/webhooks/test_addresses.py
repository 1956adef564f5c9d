"""Where webhooks may lead: nothing that is not public, in whatever dress it comes."""

import ipaddress
import socket
from collections.abc import Sequence

import pytest

from api.webhooks.addresses import NotAllowed, locate, resolve

PUBLIC = "93.184.215.14"


def means(*addresses: str):
    """A resolver to which every name means these addresses; it says what it was asked for."""
    asked: list[str] = []

    def find(host: str, port: int) -> Sequence[str]:
        asked.append(host)
        return addresses

    find.asked = asked  # type: ignore[attr-defined]
    return find


def test_a_public_name_becomes_the_address_that_was_checked() -> None:
    target = locate("https://hooks.example.org/a/b?c=d", (), means(PUBLIC))
    assert (target.url, target.host, target.host_header) == (
        f"https://{PUBLIC}:443/a/b?c=d", "hooks.example.org", "hooks.example.org",
    )  # fmt: skip
    other = locate("https://hooks.example.org:8443", (), means("2606:2800:21f:cb07:6820:80da:af6b:8b2c"))
    assert other.url == "https://[2606:2800:21f:cb07:6820:80da:af6b:8b2c]:8443/"
    assert other.host_header == "hooks.example.org:8443"
    find = means(PUBLIC, "10.0.0.1")
    with pytest.raises(NotAllowed):  # one bad address is enough
        locate("https://hooks.example.org/", (), find)
    assert find.asked == ["hooks.example.org"]  # once: nothing can change between the check and the connection


@pytest.mark.parametrize(
    "address",
    "0.0.0.0 0.1.2.3 10.1.2.3 100.64.0.1 127.0.0.1 127.255.255.254 169.254.169.254 172.16.0.1 172.31.255.255 192.0.0.1 "
    "192.168.1.1 192.0.2.1 198.18.0.1 203.0.113.9 224.0.0.1 239.1.1.1 240.0.0.1 255.255.255.255 "
    ":: ::1 ::ffff:127.0.0.1 ::ffff:10.0.0.1 ::ffff:169.254.169.254 ::7f00:1 fe80::1 fe80::1%eth0 fc00::1 "
    "fd00:ec2::254 ::ffff:93.184.215.14 "
    "ff02::1 2001:db8::1 64:ff9b::7f00:1 64:ff9b::a9fe:a9fe 64:ff9b:1::1 2002:7f00:1:: 2002:a9fe:a9fe:: 2001::1 "
    "fec0::1".split(),
)
def test_what_is_not_public(address: str) -> None:
    with pytest.raises(NotAllowed, match="not a public address"):
        locate("https://hooks.example.org/", (), means(address))


@pytest.mark.parametrize(
    "url",
    [
        "http://hooks.example.org/",
        "ftp://hooks.example.org/",
        "file:///etc/passwd",
        "gopher://hooks.example.org/",
        "//hooks.example.org/",
        "hooks.example.org",
        "",
        "https://",
        "https:///path",
        "https://user@hooks.example.org/",
        "https://user:secret@hooks.example.org/",
        "https://hooks.example.org/#fragment",
        "https://hooks.example.org:99999/",
        "https://hooks.example.org:0/",
        "https://hooks.example.org:22/",
        "https://hooks.example.org:x/",
        "https://hooks.example.org\\@127.0.0.1/",
        "https://hooks.example.org /",
        "https://hooks.example.org/\r\nHost: inside",
        "https://ex\u00e4mple.org/",
        "https://hooks..example.org/",
        "https://-.example.org/",
        "https://[::1",
        "https://[fe80::1%25eth0]/",
        "https://" + "a" * 2000 + ".org/",
        # an address in one of the dresses that resolvers undo
        "https://2130706433/",
        "https://0x7f000001/",
        "https://0x7f.1/",
        "https://0177.0.0.1/",
        "https://127.1/",
        "https://127.0.0.1.",
    ],
)
def test_what_is_no_url_for_a_webhook(url: str) -> None:
    find = means(PUBLIC)
    with pytest.raises(NotAllowed):
        locate(url, (), find)


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "169.254.169.254", "10.0.0.1", "localhost", "0.0.0.0"])
def test_the_systems_own_resolver_is_no_way_in(host: str) -> None:
    with pytest.raises(NotAllowed):
        locate(f"https://{host}/", (), resolve)


def test_what_cannot_be_resolved() -> None:
    def fail(host: str, port: int) -> Sequence[str]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    with pytest.raises(NotAllowed, match="cannot be resolved"):
        locate("https://nothing.example.org/", (), fail)
    with pytest.raises(NotAllowed, match="no address"):
        locate("https://nothing.example.org/", (), means())


def test_the_operators_networks() -> None:
    """There plain http and any port will do, everywhere else nothing changes."""
    inside = (ipaddress.ip_network("10.0.0.0/8"), ipaddress.ip_network("fd00::/8"))
    assert locate("http://ci.internal:80/x", inside, means("10.1.2.3")).url == "http://10.1.2.3:80/x"
    assert locate("https://ci.internal:22/", inside, means("fd00::1")).url == "https://[fd00::1]:22/"
    for url, address in (
        ("http://ci.internal/", "10.1.2.3 93.184.215.14"),
        ("http://ci.internal/", PUBLIC),
        ("https://ci.internal/", "11.0.0.1 10.0.0.1 192.168.0.1"),
        ("https://ci.internal/", "::ffff:192.168.0.1"),
    ):
        with pytest.raises(NotAllowed):
            locate(url, inside, means(*address.split()))
