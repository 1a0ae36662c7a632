"""Who may speak: CURVE keys as files, an allow-list of workers, and where plain text is allowed.

    controller.key     public, secret                  stays with the controller
    workers.allow      name = public key, per worker   the controller admits these and nobody else
    NAME.key           public, secret, and the controller's public key: the one file that a worker needs

All are TOML, keys in Z85 (40 printable characters). Without keys a link stays on this machine: loopback or a socket in
the file system. Whether an address is loopback is decided by parsing it, and the address that was judged is the address
that is used: a name is resolved once, here.

What this file does not know: ZeroMQ. Making key pairs, binding and checking a peer's key are for the links.
"""

import ipaddress
import os
import re
import socket
import stat
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

CONTROLLER_FILE = "controller.key"
ALLOW_FILE = "workers.allow"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")  # of a worker; also a file's name and part of an identity
_KEY = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
_TCP = re.compile(r"tcp://(?P<host>\[[0-9A-Fa-f:.]+\]|[^\[\]:/;@%\s]+):(?P<port>\d{1,5}|\*)")
_MAX_IPC_BYTES = 107  # sun_path, less its closing zero
_MAX_FILE_BYTES = 1 << 20


class SettingError(ValueError):
    """A setting that cannot be used. The text names it and says what to change it to."""


@dataclass(frozen=True, slots=True)
class KeyPair:
    public: str
    secret: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class ControllerKeys:
    pair: KeyPair
    allowed: frozenset[str]  # public keys of workers

    @staticmethod
    def in_folder(folder: Path) -> "ControllerKeys":
        """Raises SettingError on a file that is missing, malformed, or open to others."""
        return ControllerKeys.read(folder / CONTROLLER_FILE, folder / ALLOW_FILE)

    @staticmethod
    def read(key_file: Path, allow_file: Path) -> "ControllerKeys":
        """Raises SettingError on a file that is missing, malformed, or open to others."""
        fields = _read(key_file, is_secret=True)
        listed = _read(allow_file, is_secret=False)
        return ControllerKeys(_pair(fields, key_file), frozenset(_key(listed, name, allow_file) for name in listed))


@dataclass(frozen=True, slots=True)
class WorkerKeys:
    pair: KeyPair
    controller: str  # its public key

    @staticmethod
    def in_folder(folder: Path, name: str) -> "WorkerKeys":
        """Raises SettingError on a file that is missing, malformed, or open to others."""
        return WorkerKeys.read(folder / f"{name}.key")

    @staticmethod
    def read(file: Path) -> "WorkerKeys":
        """Raises SettingError on a file that is missing, malformed, or open to others."""
        fields = _read(file, is_secret=True)
        return WorkerKeys(_pair(fields, file), _key(fields, "controller", file))


@dataclass(frozen=True, slots=True)
class NewKeys:
    """The files that `write_keys` made."""

    controller: Path
    allowed: Path
    workers: tuple[Path, ...]


def write_keys(folder: Path, controller: KeyPair, workers: dict[str, KeyPair]) -> NewKeys:
    """Write the files of one controller and its workers, mode 0600. Nothing is ever overwritten."""
    for name in workers:
        if NAME.fullmatch(name) is None or f"{name}.key" == CONTROLLER_FILE:
            raise SettingError(
                f"worker name {name!r}: use letters, digits, '.', '_' and '-', at most 64, not 'controller'"
            )
    made = NewKeys(folder / CONTROLLER_FILE, folder / ALLOW_FILE, tuple([folder / f"{name}.key" for name in workers]))
    for path in (made.controller, made.allowed, *made.workers):
        if path.exists():
            raise SettingError(f"{path} exists and is not overwritten: name an empty folder, or move the file away")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _write(made.controller, "# The controller's key pair. Never leaves its machine.", _lines(controller))
    for path, pair in zip(made.workers, workers.values(), strict=True):
        text = [*_lines(pair), f'controller = "{controller.public}"']
        _write(path, "# A worker's key pair and the public key of its controller.", text)
    listed = [f'"{name}" = "{pair.public}"' for name, pair in workers.items()]
    _write(
        made.allowed, "# The workers that the controller admits, by public key. Delete a line to lock one out.", listed
    )
    return made


def checked_endpoint(endpoint: str, has_keys: bool, setting: str) -> str:
    """The endpoint to hand to ZeroMQ, its address in numbers where it is local. Raises SettingError.

    Without keys only loopback and sockets in the file system pass. `setting` is the flag that an error shows.
    """
    if endpoint.startswith("ipc://"):
        path = endpoint.removeprefix("ipc://")
        # An abstract name (@) has no permissions, and * would be made wherever the process happens to stand.
        if not path.startswith("/") or len(os.fsencode(path)) > _MAX_IPC_BYTES:
            raise SettingError(f"{setting} {endpoint}: give ipc:// an absolute path of at most {_MAX_IPC_BYTES} bytes")
        return endpoint
    match = _TCP.fullmatch(endpoint)
    if match is None or (match["port"] != "*" and int(match["port"]) > 65535):
        raise SettingError(f"{setting} {endpoint}: give tcp://HOST:PORT or ipc:///PATH")
    address = _loopback(match["host"])
    if address is not None:
        host = f"[{address}]" if address.version == 6 else str(address)
        return f"tcp://{host}:{match['port']}"
    if not has_keys:
        raise SettingError(
            f"{setting} {endpoint}: this is not loopback and there are no keys: whoever reaches it could read prompts "
            f"and answer for a worker. Make keys with `kilburn keys new FOLDER` and give --curve-keys FOLDER, or "
            f"{setting} tcp://127.0.0.1:{match['port']}"
        )
    return endpoint


def _loopback(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The loopback address that `host` is, or None. A name counts only if all its addresses are loopback."""
    if host == "*":
        return None
    try:
        addresses = [_plain(host.strip("[]"))]
    except ValueError:
        try:
            found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            return None
        try:
            addresses = [_plain(str(entry[4][0])) for entry in found]
        except ValueError:
            return None
    if not addresses or not all(address.is_loopback for address in addresses):
        return None
    return min(addresses, key=lambda address: address.version)


def _plain(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    address = ipaddress.ip_address(text)
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped  # ::ffff:127.0.0.1: which Pythons call it loopback differs by version
    return address


def _lines(pair: KeyPair) -> list[str]:
    return [f'public = "{pair.public}"', f'secret = "{pair.secret}"']


def _write(path: Path, comment: str, lines: list[str]) -> None:
    # O_EXCL: not even a file that appears between the look above and now is overwritten.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write("\n".join([comment, *lines, ""]))


def _read(path: Path, is_secret: bool) -> dict[str, object]:
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            content = file.read(_MAX_FILE_BYTES)
        fields: dict[str, object] = tomllib.loads(content.decode("utf-8"))
    except OSError as error:
        raise SettingError(f"key file {path}: {error.strerror}. `kilburn keys new FOLDER` makes one") from error
    except ValueError as error:
        raise SettingError(f"key file {path} is not TOML: {error}. `kilburn keys new FOLDER` makes one") from error
    if mode & (0o027 if is_secret else 0o022):
        raise SettingError(f"key file {path} is open to others (mode {mode:04o}): run `chmod 600 {path}`")
    return fields


def _pair(fields: dict[str, object], path: Path) -> KeyPair:
    return KeyPair(_key(fields, "public", path), _key(fields, "secret", path))


def _key(fields: dict[str, object], name: str, path: Path) -> str:
    value = fields.get(name)
    if not isinstance(value, str) or _KEY.fullmatch(value) is None:
        raise SettingError(f"key file {path}: {name} should be a key of 40 characters")
    return value


def default_name() -> str:
    """Of a worker: host name and process id, in the letters that a name may have."""
    host = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in os.uname().nodename)
    return f"{host.lstrip('._-')[:48] or 'worker'}-{os.getpid()}"
