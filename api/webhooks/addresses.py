"""Checks where a webhook may lead. Its URL is a stranger's, and what it reaches is reached from inside our network.

So a name is resolved once, every address that it has must be public, and the connection goes to the very address that
was checked: a name that means something else a moment later (DNS rebinding) changes nothing. The operator may allow
networks of his own; plain http is good enough only there.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Resolve = Callable[[str, int], Sequence[str]]

MAX_URL_LENGTH = 2000
_UNICAST = ipaddress.ip_network("2000::/3")  # all assigned unicast addresses of IPv6
# Those of them that carry an IPv4 address, which a gateway may unpack: 6to4, Teredo.
_CARRIERS = (ipaddress.ip_network("2002::/16"), ipaddress.ip_network("2001::/32"))
_LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_HOST = re.compile(rf"(?=.{{1,253}}$)({_LABEL}\.)*(?=[A-Za-z]){_LABEL}")  # the last label is no number


class NotAllowed(Exception):
    """A webhook may not lead there. The message says why, without telling what our network looks like."""


@dataclass(frozen=True)
class Target:
    """A parsed URL, and the address that a connection for it goes to."""

    scheme: str
    host: str
    port: int
    path: str
    address: str

    @property
    def url(self) -> str:
        """The URL with the address in place of the name."""
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"{self.scheme}://{host}:{self.port}{self.path}"

    @property
    def host_header(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.scheme == "https" else 80) else f"{host}:{self.port}"


def resolve(host: str, port: int) -> Sequence[str]:
    """Return all addresses of a name, by the system's resolver. Raises OSError."""
    entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in entries))


def locate(url: str, allowed: Sequence[Network], find: Resolve | None = None) -> Target:
    """Return the target of a message for ``url``. ``allowed``: networks of the operator's. Raises NotAllowed."""
    scheme, host, port, path = _take_apart(url)
    try:
        addresses = [ipaddress.ip_address(literal.partition("%")[0]) for literal in (find or resolve)(host, port)]
    except (OSError, UnicodeError, ValueError) as error:
        raise NotAllowed(f"the name '{host}' cannot be resolved") from error
    if not addresses:
        raise NotAllowed(f"the name '{host}' has no address")
    if not all(_lies_in(address, allowed) for address in addresses):
        if scheme != "https":
            raise NotAllowed("the URL must begin with https://")
        if not all(_is_public(address) for address in addresses):
            raise NotAllowed(f"'{host}' is not a public address")
        if port != 443 and port < 1024:
            raise NotAllowed("the port must be 443, or 1024 and above")
    return Target(scheme, host, port, path, str(addresses[0]))


def _take_apart(url: str) -> tuple[str, str, int, str]:
    """Return (scheme, host, port, path and query) of a plain http or https URL. Raises NotAllowed."""
    if len(url) > MAX_URL_LENGTH or not url.isascii() or not url.isprintable() or " " in url or "\\" in url:
        raise NotAllowed(f"a URL has at most {MAX_URL_LENGTH} characters, only printable ASCII")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise NotAllowed("this is not a URL") from error
    scheme, host = parts.scheme.lower(), parts.hostname or ""
    if scheme not in ("https", "http"):
        raise NotAllowed("the URL must begin with https://")
    if port == 0:
        raise NotAllowed("the port must be between 1 and 65535")
    if parts.username is not None or parts.password is not None or parts.fragment:
        raise NotAllowed("a webhook URL cannot have a user, password or fragment")
    if not (_HOST.fullmatch(host) or _is_plain_address(host)):
        raise NotAllowed("the host must be a name, or an address in standard form")
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return scheme, host, port or (443 if scheme == "https" else 80), path


def _is_plain_address(host: str) -> bool:
    """Return True for 192.0.2.1 and 2001:db8::1; False for 3221225985, 0xC0.1 and others that resolvers take, too."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return "%" not in host


def _lies_in(address: Address, networks: Sequence[Network]) -> bool:
    return any(address.version == network.version and address in network for network in networks)


def _is_public(address: Address) -> bool:
    if address.version == 6 and (not _lies_in(address, [_UNICAST]) or _lies_in(address, _CARRIERS)):
        return False
    return address.is_global and not address.is_multicast
