"""How the registry's entries are written: signed for their place, and read with no trust at all.

    name    HMAC(service key; namespace, field | json) | json          json: one NamedEntry
    hint    HMAC(service key; digest, group | expiry)  | expiry        expiry: milliseconds since 1970, 8 bytes
    fleet   HMAC(service key; namespace, id | json) | json             json: one Announcement and its expiry

The signature covers where an entry lies, so that none can be moved to another place. Whatever is not signed, or makes
no sense although it is, reads as None: it costs a missed hit and no more.
"""

import hmac
import json
from struct import pack, unpack
from typing import Any

from kilburn.controller.registry import Announcement, NamedEntry
from kilburn.controller.salts import keyed

MAC_BYTES = 32
HINT_BYTES = MAC_BYTES + 8
MOST_ENTRY_BYTES = 16 << 20
MOST_TOKENS = 1 << 20
MOST_TEXT = 1024
MOST_BLOCK_SIZES = 64
INT32_MAX = 2**31 - 1


class EntrySigner:
    """Writes and reads entries of one service key and one namespace: a model under its name."""

    def __init__(self, service_key: bytes, namespace: bytes) -> None:
        self._key, self._namespace = service_key, namespace

    def field_of(self, tenant: str, name: str) -> bytes:
        """Where a name lies. Tells nobody the tenant."""
        return keyed(self._key, b"field", self._namespace, tenant.encode(), name.encode()).hex().encode()

    def write_name(self, entry: NamedEntry) -> bytes:
        body = json.dumps([entry.tenant, entry.name, entry.cache_salt, list(entry.tokens), entry.stamp]).encode()
        return keyed(self._key, b"name", self._namespace, self.field_of(*entry.key), body) + body

    def read_name(self, field: object, value: object) -> NamedEntry | None:
        return _entry(self._signed_json(b"name", field, value))

    def _signed_json(self, purpose: bytes, field: object, value: object) -> Any:
        """What was signed for this place, or None."""
        if not isinstance(field, bytes) or not isinstance(value, bytes) or len(value) > MOST_ENTRY_BYTES:
            return None
        mac, body = value[:MAC_BYTES], value[MAC_BYTES:]
        if not hmac.compare_digest(mac, keyed(self._key, purpose, self._namespace, field, body)):
            return None
        try:
            return json.loads(body)
        except (ValueError, RecursionError):
            return None

    def write_controller(self, controller: bytes, about: Announcement, expires_ms: int) -> bytes:
        told = [about.address, about.num_requests, about.model_digest.hex(), list(about.block_sizes), expires_ms]
        body = json.dumps(told).encode()
        return keyed(self._key, b"fleet", self._namespace, controller, body) + body

    def read_controller(self, controller: object, value: object) -> tuple[Announcement, int] | None:
        """What a controller said of itself, and when that expires, in milliseconds since 1970."""
        return _announcement(self._signed_json(b"fleet", controller, value))

    def write_hint(self, digest: bytes, group: bytes, expires_ms: int) -> bytes:
        expiry = pack("<Q", expires_ms)
        return keyed(self._key, b"hint", digest, group, expiry) + expiry

    def read_hint(self, digest: bytes, group: object, value: object) -> int | None:
        """When the hint expires, in milliseconds since 1970."""
        if not isinstance(group, bytes) or not isinstance(value, bytes) or len(value) != HINT_BYTES:
            return None
        mac, expiry = value[:MAC_BYTES], value[MAC_BYTES:]
        if not hmac.compare_digest(mac, keyed(self._key, b"hint", digest, group, expiry)):
            return None
        expires_ms: int = unpack("<Q", expiry)[0]
        return expires_ms


def _entry(read: Any) -> NamedEntry | None:
    match read:
        case [str(tenant), str(name), str(cache_salt), list(tokens), int(stamp)]:
            texts_fit = all(len(text) <= MOST_TEXT for text in (tenant, name, cache_salt))
            if not name or not texts_fit or len(tokens) > MOST_TOKENS or stamp < 0:
                return None
            if not all(type(token) is int and 0 <= token <= INT32_MAX for token in tokens):
                return None
            return NamedEntry(tenant, name, cache_salt, tuple(tokens), stamp)
        case _:
            return None


def _announcement(read: Any) -> tuple[Announcement, int] | None:
    match read:
        case [str(address), int(num_requests), str(digest), list(sizes), int(expires_ms)]:
            is_digest = len(digest) <= 2 * MAC_BYTES and all(char in "0123456789abcdef" for char in digest)
            if not is_digest or len(digest) % 2 or len(sizes) > MOST_BLOCK_SIZES or num_requests < 0:
                return None
            if not all(type(size) is int and 0 < size <= INT32_MAX for size in sizes):
                return None
            if len(address) > MOST_TEXT or not address.startswith(("http://", "https://")):
                return None
            return Announcement(address, num_requests, bytes.fromhex(digest), tuple(sizes)), expires_ms
        case _:
            return None
