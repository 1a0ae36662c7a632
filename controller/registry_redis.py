"""The registry in Redis: what several controllers know together.

    kilburn:names:NAMESPACE    a hash, one field for each name: signed NamedEntry
    kilburn:hint:DIGEST        a hash, one field for each worker group: signed expiry; the key itself expires too

One task talks to Redis, in turns of bounded length: send what has gathered, read the names. `learn` and `publish` only
put down what there is to send, in bounded lists, so nobody ever waits for Redis, and of what it says nothing is
believed that is not signed (registry_entries.py). A turn that fails, for whatever reason, costs the hints that were to
be sent in it; names are kept and sent again. What Redis loses, those who registered it publish anew.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any
from urllib.parse import unquote, urlsplit

from redis.asyncio import Redis, RedisCluster, Sentinel
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from kilburn.controller.registry import InProcessRegistry, NamedEntry, NameKey, NamesHeard, RegistryCounters
from kilburn.controller.registry_entries import EntrySigner

log = logging.getLogger("kilburn.registry")
Client = Any  # of redis-py: Redis and RedisCluster have no common type

TURN_S = 2.0  # what one turn may take in all
SOCKET_S = 1.0
PAUSE_S = 0.1  # between turns that had something to send
NAMES_S = 1.0  # between looks at the names
MOST_PAUSE_S = 5.0  # between tries while it is down
MOST_QUEUED = 1 << 16  # hints
BATCH = 512  # hints in one turn
MOST_NAMES = 4096  # read in one turn
MOST_FETCHED = 128  # digests asked about at once
HINT_TTL_S = 600.0
DELETED_S = 3600.0  # how long the word that a name was deleted is kept: those cut off for longer may bring it back


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


class RedisRegistry:
    """See the file's head. `controller` tells this process's worker groups from those of others."""

    def __init__(self, connect: Callable[[], Client], signer: EntrySigner, namespace: str, controller: str) -> None:
        self._connect, self._signer = connect, signer
        self._names_at, self._controller = f"kilburn:names:{namespace}", controller
        self._client: Client = None
        self._here, self._there = InProcessRegistry(), InProcessRegistry(ttl_s=HINT_TTL_S)
        self._hints: deque[tuple[bytes, bytes, bool]] = deque()  # (digest, group, whether it has it)
        self._names: dict[NameKey, NamedEntry] = {}  # to be published
        self._heard: NamesHeard = lambda entries, is_whole: ()
        self._work = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._read_at = 0.0
        self.counters = RegistryCounters(is_up=False)

    @property
    def is_up(self) -> bool:
        return self.counters.is_up

    # --- what everybody calls: nothing here waits

    def learn(self, group: str, published: Sequence[bytes], withdrawn: Sequence[bytes], now: float) -> None:
        self._here.learn(group, published, withdrawn, now)
        field = f"{self._controller}/{group}".encode()
        self._hints.extend([(digest, field, False) for digest in withdrawn])
        self._hints.extend([(digest, field, True) for digest in published])
        while len(self._hints) > MOST_QUEUED:
            self._hints.popleft()
            self.counters.dropped += 1
        self._work.set()

    def holders(self, digest: bytes, now: float) -> frozenset[str]:
        """Groups of this process by their names, those of others as `controller/name`."""
        return self._here.holders(digest, now) | self._there.holders(digest, now)

    def publish(self, entry: NamedEntry) -> None:
        self._names[entry.key] = entry
        self._work.set()

    def listen(self, heard: NamesHeard) -> None:
        self._heard = heard

    # --- the task

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._disconnect()

    async def _run(self) -> None:
        pause_s = PAUSE_S
        while True:
            begun = time.monotonic()
            try:
                async with asyncio.timeout(TURN_S):
                    await self._turn()
            except Exception as error:  # whatever Redis, or what poses as it, makes the client raise
                self._failed(error)
                await self._disconnect()
                pause_s = min(pause_s * 2, MOST_PAUSE_S)
                await asyncio.sleep(pause_s)
                continue
            self.counters.turn_s.observe(time.monotonic() - begun)
            if not self.counters.is_up:
                log.info("the prefix registry answers")
            self.counters.is_up, pause_s = True, PAUSE_S
            await asyncio.sleep(PAUSE_S)
            if not self._hints and not self._names:
                self._work.clear()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._work.wait(), NAMES_S)

    def _failed(self, error: Exception) -> None:
        self.counters.failures += 1
        if self.counters.is_up or self.counters.failures == 1:
            # Not its words: they may hold what a hostile server said.
            log.warning("the prefix registry does not answer (%s); serving goes on without it", type(error).__name__)
        self.counters.is_up = False

    async def _disconnect(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            with suppress(Exception):
                async with asyncio.timeout(SOCKET_S):
                    await client.aclose()

    async def _turn(self) -> None:
        if self._client is None:
            self._client = self._connect()
        await self._send_hints()
        await self._send_names()
        if time.monotonic() - self._read_at >= NAMES_S:
            await self._read_names()
            self._read_at = time.monotonic()

    async def _send_hints(self) -> None:
        batch = [self._hints.popleft() for _ in range(min(BATCH, len(self._hints)))]
        if not batch:
            return
        expires_ms = int((time.time() + HINT_TTL_S) * 1000)
        try:
            async with self._client.pipeline(transaction=False) as pipeline:
                for digest, group, is_there in batch:
                    at = f"kilburn:hint:{digest.hex()}"
                    if is_there:
                        pipeline.hset(at, group, self._signer.write_hint(digest, group, expires_ms))
                        pipeline.pexpire(at, int(HINT_TTL_S * 1000))
                    else:
                        pipeline.hdel(at, group)
                await pipeline.execute()
        except BaseException:
            self.counters.dropped += len(batch)  # hints: not worth a second try
            raise
        self.counters.sent += len(batch)

    async def _send_names(self) -> None:
        for entry in list(self._names.values()):
            await self._client.hset(self._names_at, self._signer.field_of(*entry.key), self._signer.write_name(entry))
            self.counters.sent += 1
            if self._names.get(entry.key) is entry:
                del self._names[entry.key]

    async def _read_names(self) -> None:
        found: dict[NameKey, NamedEntry] = {}
        outdated: list[bytes] = []
        num_read, is_whole, too_old = 0, True, (time.time() - DELETED_S) * 1e6
        async for field, value in self._client.hscan_iter(self._names_at, count=64):
            num_read += 1
            if num_read > MOST_NAMES:
                is_whole = False  # what was not read may well be there
                break
            entry = self._signer.read_name(field, value)
            if entry is None or self._signer.field_of(*entry.key) != field:
                self.counters.ignored += 1
                continue
            found[entry.key] = entry
            if entry.is_deleted and entry.stamp < too_old:
                outdated.append(field)
        self.counters.names = sum(not entry.is_deleted for entry in found.values())
        if outdated:
            await self._client.hdel(self._names_at, *outdated)
        for entry in self._heard(found, is_whole):
            self._names.setdefault(entry.key, entry)

    # --- for whoever places requests

    async def fetch(self, digests: Iterable[bytes], now: float) -> None:
        """Ask which groups of other controllers hold these; `holders` knows afterwards. Fails as if none did."""
        if self._client is None:
            return
        wanted = list(islice(digests, MOST_FETCHED))
        try:
            async with asyncio.timeout(SOCKET_S):
                async with self._client.pipeline(transaction=False) as pipeline:
                    for digest in wanted:
                        pipeline.hgetall(f"kilburn:hint:{digest.hex()}")
                    answers = await pipeline.execute(raise_on_error=False)
        except Exception:
            self.counters.failures += 1
            return
        for digest, answer in zip(wanted, answers if isinstance(answers, list) else [], strict=False):
            self._note_holders(digest, answer, now)

    def _note_holders(self, digest: bytes, answer: object, now: float) -> None:
        own, now_ms, is_held = f"{self._controller}/".encode(), time.time() * 1000, False
        for group, value in islice(answer.items(), MOST_FETCHED) if isinstance(answer, Mapping) else ():
            expires_ms = self._signer.read_hint(digest, group, value)
            if expires_ms is None:
                self.counters.ignored += 1
            elif not group.startswith(own) and now_ms < expires_ms <= now_ms + 2000 * HINT_TTL_S:
                self._there.learn(group.decode("utf-8", "replace"), [digest], [], now)
                is_held = True
        self.counters.hits += is_held
        self.counters.misses += not is_held
