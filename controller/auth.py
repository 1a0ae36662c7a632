"""Who may ask: API keys, and the tenant that each belongs to.

One key a line (or, in an environment variable, between commas):

    sk-...                      a key
    alice:sk-...                and the tenant that it belongs to
    alice:sk-...:admin          who may also use the routes for operators
    prometheus:sk-...:metrics   who may read /metrics and nothing else
    alice:sha256$5e88...:admin  the same, if the key itself shall not be written down
    alice:sk-...:weight=3       and her share of the tokens, where --fair gives shares; 1 where none is written

Only SHA-256 digests are kept. Every key is compared in constant time and all of them always, so that the time of an
answer tells nothing about a key or its place. What this file does not know: routes and headers (api/guard.py).
"""

import hashlib
import hmac
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

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
    parts, weight = line.split(":"), 1.0
    if len(parts) > 2 and parts[-1].startswith("weight="):
        weight = _weight(parts.pop().removeprefix("weight="), where)
    match parts:
        case [key]:
            name, role = "default", Role.USER
        case [name, key]:
            role = Role.USER
        case [name, key, "admin" | "metrics" as word]:
            role = Role(word)
        case _:
            raise KeyFault(
                f"{where} must be KEY, TENANT:KEY, TENANT:KEY:admin or NAME:KEY:metrics, and :weight=N perhaps"
            )
    if not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", name):
        raise KeyFault(f"{where}: a tenant's name has 1 to 64 letters, digits, '.', '_' or '-'")
    if key.startswith("sha256$"):
        if not re.fullmatch(r"[0-9a-f]{64}", key[7:]):
            raise KeyFault(f"{where}: after sha256$ come 64 hexadecimal digits")
        return bytes.fromhex(key[7:]), Tenant(name, role, weight)
    if len(key) < LEAST_CHARS or any(char.isspace() for char in key):
        raise KeyFault(f"{where}: a key has at least {LEAST_CHARS} characters and no blanks")
    return hashlib.sha256(key.encode()).digest(), Tenant(name, role, weight)


def _weight(text: str, where: str) -> float:
    if not re.fullmatch(r"[0-9]{1,4}(\.[0-9]{1,3})?", text) or not float(text):
        raise KeyFault(f"{where}: a weight is a number above 0 and below 10000, such as weight=2.5")
    return float(text)
