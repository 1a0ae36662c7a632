"""Who may ask: API keys, and the tenant that each belongs to.

One key a line (or, in an environment variable, between commas):

    sk-...                      a key
    alice:sk-...                and the tenant that it belongs to
    alice:sk-...:admin          who may also use the routes for operators
    prometheus:sk-...:metrics   who may read /metrics and nothing else
    alice:sha256$5e88...:admin  the same, if the key itself shall not be written down
    alice:sk-...:weight=3       and her share of the tokens, where --fair gives shares; 1 where none is written
    alice:sk-...:rpm=60:tpm=90000:at-once=4    and what this key may use (quota.py); any amount where none is written

Only SHA-256 digests are kept. Every key is compared in constant time and all of them always, so that the time of an
answer tells nothing about a key or its place. What this file does not know: routes and headers (api/guard.py).
"""

import hashlib
import hmac
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from kilburn.controller.quota import ANY, Allowance

LEAST_CHARS = 8


class Role(Enum):
    """What a key is for. The words are those of a line of keys."""

    USER = "user"  # written by writing none
    ADMIN = "admin"
    METRICS = "metrics"


class KeyFault(ValueError):
    """A line of keys cannot be read. Names the line's number, never the key."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """On whose behalf a request is made."""

    name: str
    role: Role = Role.USER
    weight: float = 1.0
    allowance: Allowance = ANY
    key_id: bytes = field(default=b"", repr=False, compare=False)  # whose allowance it is: a key's, not a tenant's

    @property
    def is_admin(self) -> bool:
        return self.role is Role.ADMIN


ANYONE = Tenant("default", Role.ADMIN)  # where no keys are set: loopback, one person's machine


@dataclass(frozen=True, slots=True)
class Keyring:
    """The keys that open the door. An empty one means that none is needed."""

    entries: tuple[tuple[bytes, Tenant], ...] = ()  # (SHA-256 of the key, tenant)

    @property
    def is_empty(self) -> bool:
        return not self.entries

    def tenant_of(self, key: str) -> Tenant | None:
        digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
        found: Tenant | None = None
        for known, tenant in self.entries:
            if hmac.compare_digest(known, digest):
                found = tenant
        return found


def read_keys(api_key_file: str, inline: str) -> Keyring:
    """The keys of a file and of KILBURN_API_KEYS together. Raises KeyFault."""
    entries: list[tuple[bytes, Tenant]] = []
    if api_key_file:
        try:
            lines = Path(api_key_file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise KeyFault(f"--api-key-file: {api_key_file} cannot be read ({type(error).__name__})") from error
        entries += _entries(lines, "--api-key-file: line")
        if not entries:
            raise KeyFault(f"--api-key-file: {api_key_file} holds no key; write one a line")
    entries += _entries(re.split(r"[,\n]", inline), "KILBURN_API_KEYS: entry")
    return Keyring(tuple(entries))


def _entries(lines: Iterable[str], where: str) -> list[tuple[bytes, Tenant]]:
    found = []
    for number, line in enumerate(lines, start=1):
        line = line.strip()
        if line and not line.startswith("#"):
            found.append(_entry(line, f"{where} {number}"))
    return found


def _entry(line: str, where: str) -> tuple[bytes, Tenant]:
    parts, weight, amounts = line.split(":"), 1.0, dict[str, int]()
    while len(parts) > 2 and "=" in parts[-1]:
        word, _, text = parts.pop().partition("=")
        if word == "weight":
            weight = _weight(text, where)
        elif word in _AMOUNTS:
            amounts[_AMOUNTS[word]] = _amount(word, text, where)
        else:
            raise KeyFault(f"{where}: after a key may come weight=, {'=, '.join(_AMOUNTS)}=")
    match parts:
        case [key]:
            name, role = "default", Role.USER
        case [name, key]:
            role = Role.USER
        case [name, key, "admin" | "metrics" as word]:
            role = Role(word)
        case _:
            raise KeyFault(
                f"{where} must be KEY, TENANT:KEY, TENANT:KEY:admin or NAME:KEY:metrics, "
                "and :weight=N or :rpm=N perhaps"
            )
    if not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", name):
        raise KeyFault(f"{where}: a tenant's name has 1 to 64 letters, digits, '.', '_' or '-'")
    if key.startswith("sha256$"):
        if not re.fullmatch(r"[0-9a-f]{64}", key[7:]):
            raise KeyFault(f"{where}: after sha256$ come 64 hexadecimal digits")
        digest = bytes.fromhex(key[7:])
        return digest, Tenant(name, role, weight, Allowance(**amounts), digest)
    if len(key) < LEAST_CHARS or any(char.isspace() for char in key):
        raise KeyFault(f"{where}: a key has at least {LEAST_CHARS} characters and no blanks")
    digest = hashlib.sha256(key.encode()).digest()
    return digest, Tenant(name, role, weight, Allowance(**amounts), digest)


_AMOUNTS = {"at-once": "at_once", "rpm": "requests_per_minute", "tpm": "tokens_per_minute"}  # word of a line: field


def _amount(word: str, text: str, where: str) -> int:
    if not re.fullmatch(r"[1-9][0-9]{0,11}", text):
        raise KeyFault(f"{where}: {word} is a whole number above 0, such as {word}=60")
    return int(text)


def _weight(text: str, where: str) -> float:
    if not re.fullmatch(r"[0-9]{1,4}(\.[0-9]{1,3})?", text) or not float(text):
        raise KeyFault(f"{where}: a weight is a number above 0 and below 10000, such as weight=2.5")
    return float(text)
