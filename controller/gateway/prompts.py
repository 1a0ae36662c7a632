"""Which controller has computed how much of a prompt: by the names of its blocks, as controllers themselves name them.

    body -> ids (the controllers' own tokenizer and template) -> digests -> hints -> {controller: tokens}

A gateway has the model's folder, so it tokenizes as a controller does, off the event loop; and the server key and the
file of API keys, so that it knows a tenant's salt. Its digests are then those of the controllers' blocks, exactly: a
hint is there while a worker holds the block, and gone when it was evicted, which no guess by the text could say. The
price is that a prompt is tokenized twice.

A hint is only ever a hint: whatever is missing, late or wrong here costs a miss, and no request waits for the registry
longer than ASK_S. What this file does not know: HTTP, which member is well.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kilburn.controller.api import anthropic, responses
from kilburn.controller.api.checks import read_as
from kilburn.controller.api.errors import ApiError
from kilburn.controller.api.messages import chat_prompt
from kilburn.controller.api.schema import ChatRequest, CompletionRequest
from kilburn.controller.core.prefix_index import Salt, extend_chain
from kilburn.controller.core.prefixes import common_run
from kilburn.controller.registry import NamedEntry, NameKey, PrefixRegistry
from kilburn.controller.registry_redis import MOST_FETCHED
from kilburn.controller.salts import Salts
from kilburn.controller.text import Text
from kilburn.shared.digest import BlockHasher

ASK_S = 0.05  # what a request waits for the registry at most
MOST_NAMED = 4096  # blocks of a prompt: naming them takes a few microseconds each, on the loop


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is known of a request that could begin with something computed before."""

    ids: tuple[int, ...]
    salt: bytes


class Holders(Protocol):
    """As much of a registry as it takes to ask who holds a block, as `controller/group`."""

    def holders(self, digest: bytes, now: float) -> frozenset[str]: ...


@dataclass(slots=True)
class Prompts:
    """See the file's head."""

    text: Text
    salts: Salts
    registry: PrefixRegistry
    public: list[tuple[int, ...]] = field(default_factory=list)  # tokens of the public named prefixes

    def heard(self, entries: Mapping[NameKey, NamedEntry], is_whole: bool) -> list[NamedEntry]:
        """From the registry: which names there are. A gateway publishes none."""
        self.public = [tuple(entry.tokens) for entry in entries.values() if entry.is_public and not entry.is_deleted]
        return []

    async def read(self, path: str, value: object, tenant: str) -> Prompt | None:
        """The prompt of a body; None where it has none, or is no good: the controller will say what is wrong."""
        try:
            if path == "/v1/completions":
                asked = read_as(CompletionRequest, value)
                ids, cache_salt = await self._completion_ids(asked), asked.cache_salt
            elif (chat := _chat(path, value)) is not None:
                ids, cache_salt = await chat_prompt(chat, self.text), chat.cache_salt
            else:
                return None
        except ApiError:
            return None
        return Prompt(tuple(ids), self.salts.of(tenant, cache_salt))

    async def _completion_ids(self, asked: CompletionRequest) -> Sequence[int]:
        """Of several prompts the first: they go to one controller together."""
        prompt = asked.prompt[0]
        if not isinstance(prompt, str):
            return prompt
        trusted = asked.allow_special_tokens
        (ids,) = await self.text.encode([prompt], add_special=asked.add_special_tokens, trusted=trusted)
        return ids

    async def computed(self, prompt: Prompt, kinds: Iterable[tuple[bytes, int]]) -> dict[str, int]:
        """By controller's id, how many leading tokens its workers may hold. `kinds`: (model digest, block size)."""
        found: dict[str, int] = {}
        for model_digest, block_size in kinds:
            named = named_blocks(prompt, self.public, model_digest, block_size)
            if self.registry.counters.is_up:
                await self.registry.fetch([digest for _, digest in named], asyncio.get_running_loop().time(), ASK_S)
            note_found(found, named, self.registry, asyncio.get_running_loop().time())
        return found


def named_blocks(
    prompt: Prompt, public: Iterable[Sequence[int]], model_digest: bytes, block_size: int
) -> list[tuple[int, bytes]]:
    """Where blocks of the prompt end, and their digests: as many as can be asked about, evenly spaced."""
    ids = prompt.ids
    num_blocks = min((len(ids) - 1) // block_size, MOST_NAMED)
    salt = Salt(prompt.salt, max((common_run(ids, tokens) for tokens in public), default=0))
    chain: list[bytes] = []
    extend_chain(chain, BlockHasher(model_digest, block_size), block_size, ids, num_blocks, salt)
    stride = max(-(-num_blocks // MOST_FETCHED), 1)
    return [((i + 1) * block_size, chain[i]) for i in range(stride - 1, num_blocks, stride)]


def note_found(found: dict[str, int], named: Iterable[tuple[int, bytes]], registry: Holders, now: float) -> None:
    """By controller's id, how far the blocks go that its groups hold."""
    for end, digest in named:
        for group in registry.holders(digest, now):
            id = group.partition("/")[0]
            found[id] = max(found.get(id, 0), end)


def _chat(path: str, value: object) -> ChatRequest | None:
    """The conversation of a body; None where requests to this address have none. Raises ApiError."""
    match path:
        case "/v1/chat/completions":
            return read_as(ChatRequest, value)
        case "/v1/messages":
            return read_as(ChatRequest, anthropic.as_chat(read_as(anthropic.MessagesRequest, value)))
        case "/v1/responses":
            return read_as(ChatRequest, responses.as_chat(read_as(responses.ResponsesRequest, value)))
    return None
