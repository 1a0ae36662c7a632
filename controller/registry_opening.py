"""What controllers and gateways of one service have in common: a server key, and a registry for one model.

Names of one model are no names of another: a tokenizer of its own gives them other tokens. So the namespace in Redis
is made of the model's public name and of the files that decide what its tokens are.
"""

import logging
import secrets
from pathlib import Path

from kilburn.controller.redis_urls import UrlFault, connector
from kilburn.controller.registry import InProcessRegistry, PrefixRegistry
from kilburn.controller.registry_entries import EntrySigner
from kilburn.controller.registry_redis import RedisRegistry
from kilburn.controller.salts import KeyFileFault, Salts, keyed, read_server_key
from kilburn.shared.keys import SettingError

log = logging.getLogger("kilburn")


def salts_for(server_key_file: str, is_shared: bool) -> Salts:
    """Raises SettingError."""
    try:
        key = read_server_key(server_key_file)
    except KeyFileFault as fault:
        raise SettingError(f"--server-key-file: {fault}") from fault
    if not server_key_file and is_shared:
        log.warning(
            "no server_key_file: this process drew a key of its own, so that no other process can read what it "
            "publishes in Redis, nor it what they do; write 32 random bytes to a file and give it to all of them"
        )
    return Salts(key)


def registry_for(redis: str, model: Path, model_name: str, salts: Salts) -> PrefixRegistry:
    """`model`: its folder. Raises SettingError."""
    if not redis:
        return InProcessRegistry()
    try:
        connect = connector(redis)
    except UrlFault as fault:
        raise SettingError(f"--redis: the URL {fault}") from fault
    about = [file.read_bytes() if file.exists() else b"" for file in (model / "tokenizer.json", model / "config.json")]
    namespace = keyed(salts.service_key(), b"namespace", model_name.encode(), *about)
    signer = EntrySigner(salts.service_key(), namespace)
    return RedisRegistry(connect, signer, namespace.hex()[:32], secrets.token_hex(8))
