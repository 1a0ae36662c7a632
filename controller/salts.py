"""What keeps the cached blocks of one tenant from another's requests, and what signs the registry's entries.

    server key --HMAC(tenant)--> the tenant's salt --HMAC(cache_salt of a body)--> a narrower one

A client chooses neither the key nor the tenant, so a `cache_salt` can only cut it off from blocks, never join it to
somebody's. Every part is length-prefixed and every use of the key has a name of its own: `a|bc` is not `ab|c`, and a
salt is not a signature. Controllers that shall share what they know are given the same key.
"""

import hmac
import secrets
from hashlib import sha256
from pathlib import Path
from struct import pack

LEAST_KEY_BYTES = 16
MOST_KEY_BYTES = 4096


class KeyFileFault(ValueError):
    """The file of the server key will not do. Says why, and never what is in it."""


def keyed(key: bytes, purpose: bytes, *parts: bytes) -> bytes:
    """HMAC-SHA256 over length-prefixed parts, for one purpose."""
    message = b"".join([pack("<I", len(part)) + part for part in (b"kilburn.1", purpose, *parts)])
    return hmac.digest(key, message, sha256)


class Salts:
    """Derives salts from a server key."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def of(self, tenant: str, cache_salt: str = "") -> bytes:
        """The salt of a tenant's request; never empty, which would be the salt of what is public."""
        salt = keyed(self._key, b"tenant", tenant.encode())
        return keyed(salt, b"narrowed", cache_salt.encode()) if cache_salt else salt

    def service_key(self) -> bytes:
        """What the registry's entries are signed with."""
        return keyed(self._key, b"registry")


def read_server_key(path: str) -> bytes:
    """The key in a file, or a random one where there is no file. Raises KeyFileFault."""
    if not path:
        return secrets.token_bytes(32)
    try:
        if Path(path).stat().st_size > MOST_KEY_BYTES:
            raise KeyFileFault(f"{path} is larger than {MOST_KEY_BYTES} bytes")
        key = Path(path).read_bytes().strip()
    except OSError as error:
        raise KeyFileFault(f"{path} cannot be read ({error.strerror})") from error
    if len(key) < LEAST_KEY_BYTES:
        raise KeyFileFault(f"{path} holds {len(key)} bytes; write at least {LEAST_KEY_BYTES} random ones")
    return key
