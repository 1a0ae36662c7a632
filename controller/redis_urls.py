"""URLs of a Redis, of each kind that redis-py knows: one server, TLS, a socket file, a cluster, a Sentinel."""

from collections.abc import Callable
from typing import Any
from urllib.parse import unquote, urlsplit

from redis.asyncio import Redis, RedisCluster, Sentinel
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

Client = Any  # of redis-py: Redis and RedisCluster have no common type
SOCKET_S = 1.0


class UrlFault(ValueError):
    """The URL will not do. Never repeats it: it may hold a password."""


def connector(url: str) -> Callable[[], Client]:
    """What makes a client of the URL; making one connects to nothing. Raises UrlFault.

    redis://, rediss:// (TLS) and unix:// are as redis-py takes them, and so is what follows redis+cluster:// and
    rediss+cluster://. A Sentinel: redis+sentinel://[user:password@]host:port,host:port/service[/db].
    """
    options: dict[str, Any] = {
        "socket_timeout": SOCKET_S,
        "socket_connect_timeout": SOCKET_S,
        "max_connections": 4,
    }
    never = Retry(NoBackoff(), 0)
    scheme, _, rest = url.partition("://")
    match scheme:
        case "redis" | "rediss" | "unix":

            def connect() -> Client:
                return Redis.from_url(url, retry=never, **options)

        case "redis+cluster" | "rediss+cluster":
            plain = f"{scheme.partition('+')[0]}://{rest}"

            def connect() -> Client:
                return RedisCluster.from_url(plain, **options)

        case "redis+sentinel":
            connect = _sentinel(url, options)
        case _:
            raise UrlFault("must begin with redis://, rediss://, unix://, redis+cluster:// or redis+sentinel://")
    try:
        connect()
    except Exception as error:  # redis-py raises whatever its parsing meets
        raise UrlFault(f"is not a URL that redis-py takes ({type(error).__name__})") from None
    return connect


def _sentinel(url: str, options: dict[str, Any]) -> Callable[[], Client]:
    parts = urlsplit(url)
    names = parts.path.strip("/").split("/")
    hosts = [host.rpartition(":") for host in parts.netloc.rpartition("@")[2].split(",")]
    if not names[0] or len(names) > 2 or not all(host and port.isdigit() for host, _, port in hosts):
        raise UrlFault("must be redis+sentinel://host:port,host:port/service[/db]")
    service, db = names[0], int(names[1]) if names[1:] and names[1].isdigit() else 0
    user, _, password = parts.netloc.rpartition("@")[0].partition(":")
    known: dict[str, Any] = {"username": unquote(user) or None, "password": unquote(password) or None, "db": db}

    def connect() -> Client:
        at = [(host, int(port)) for host, _, port in hosts]
        sentinel = Sentinel(at, sentinel_kwargs=options, **options, **known)  # type: ignore[no-untyped-call]
        return sentinel.master_for(service)

    return connect
