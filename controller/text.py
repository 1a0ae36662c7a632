"""Text on one side, token ids on the other.

    encode   text -> ids        off the event loop, in batches (`encode_batch` lets go of the interpreter's lock)
    chat     messages -> ids    template.py renders; here control tokens become ids, where the template wrote them
    decode   ids -> text        whole lists here, one id at a time in detokenize.py

Two readings of one tokenizer.json:

    plain    the text of a control token is that token: for callers that asked for it
    marked   it is just text, and "<|im_end|>" + a secret suffix is the control token <|im_end|>. What users write is
             read so, and a rendered chat, in which the template's own tokens got the suffix. The library's way of
             splitting at tokens is kept, so that spaces and merges come out the same.

What this file does not know: requests, sampling, HTTP.
"""

import asyncio
import json
import re
import secrets
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from tokenizers import AddedToken, Tokenizer

from kilburn.controller.calls.binding import is_control
from kilburn.controller.calls.forms import form_of
from kilburn.controller.detokenize import Detokenizer
from kilburn.controller.template import ChatTemplate, Message, select


class TextError(Exception):
    """The model folder lacks what text needs, or holds it in a broken form. Names the file."""


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """How a conversation is rendered."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    trusted: bool = False  # control tokens in the users' texts count as such
    extra: tuple[tuple[str, Any], ...] = ()  # further variables for the template
    tools: tuple[dict[str, Any], ...] = ()  # that the model may call


PLAIN_CHAT = ChatOptions()


class Text:
    """A model's tokenizer, chat template and the ids that end its answers."""

    def __init__(
        self,
        tokenizer_json: str,
        *,
        template_source: str | None = None,
        variables: dict[str, str] | None = None,
        eos_ids: Sequence[int] = (),
        eos_token: str | None = None,
        max_len: int | None = None,
        vocab_size: int | None = None,
    ) -> None:
        tokenizer, self._marked = _read_tokenizer(tokenizer_json), _read_tokenizer(tokenizer_json)
        self._plain = tokenizer
        added: dict[int, AddedToken] = tokenizer.get_added_tokens_decoder()
        self._controls = {id: token.content for id, token in added.items() if token.special}
        self.control_ids = {t.content: id for id, t in added.items() if is_control(t.content, t.special)}  # in grammars
        self._suffix = "x" + secrets.token_hex(12)
        self._real_ids = self._mark(added)
        own_eos = tokenizer.token_to_id(eos_token) if eos_token else None
        self.eos_ids = tuple(dict.fromkeys([*eos_ids, own_eos] if own_eos is not None else eos_ids))
        self.max_len = max_len
        self.vocab_size = max(vocab_size or 0, tokenizer.get_vocab_size(with_added_tokens=True))
        literals = tuple(self._controls.values())
        self._template = ChatTemplate(template_source, variables or {}, literals) if template_source else None
        self.call_form = form_of(template_source or "", literals)  # in which the model was taught to call tools
        self._bytes = _TokenBytes(tokenizer, added)
        self._encoders = ThreadPoolExecutor(2, "kilburn-encode")
        self._renderer = ThreadPoolExecutor(1, "kilburn-render")  # one at a time: the template's clock is its own

    def _mark(self, added: dict[int, AddedToken]) -> dict[int, int]:
        """Teaches the marked reading its tokens. Returns the id that each of them stands for."""
        marked = self._marked
        marked.encode_special_tokens = True
        marked.add_tokens(
            [
                AddedToken(
                    token.content + self._suffix,
                    special=False,
                    normalized=token.normalized,
                    lstrip=token.lstrip,
                    rstrip=token.rstrip,
                    single_word=token.single_word,
                )
                for id, token in added.items()
                if id in self._controls
            ]
        )
        real: dict[int, int] = {}
        for id, content in self._controls.items():
            marked_id = marked.token_to_id(content + self._suffix)
            if marked_id is None:
                raise TextError(f"the control token {content!r} cannot be told apart")
            real[marked_id] = id
        return real

    @property
    def has_template(self) -> bool:
        return self._template is not None

    def close(self) -> None:
        self._encoders.shutdown(wait=False, cancel_futures=True)
        self._renderer.shutdown(wait=False, cancel_futures=True)

    # --- text to ids

    async def encode(self, texts: Sequence[str], *, add_special: bool = True, trusted: bool = False) -> list[list[int]]:
        """Ids of plain prompts. `add_special`: the tokenizer's own default (a BOS, where it has one)."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._encoders, self._encode, list(texts), add_special, trusted)

    def _encode(self, texts: list[str], add_special: bool, trusted: bool) -> list[list[int]]:
        tokenizer = self._plain if trusted else self._marked
        return [e.ids for e in tokenizer.encode_batch_fast(texts, add_special_tokens=add_special)]

    async def encode_chat(self, messages: Sequence[Message], options: ChatOptions = PLAIN_CHAT) -> list[int]:
        """Ids of a rendered conversation; nothing is added to what the template wrote. Raises TemplateRefused."""
        template = self._template
        if template is None:
            raise TextError("this model has no chat template; use /v1/completions")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._renderer, self._encode_chat, template, messages, options)

    def _encode_chat(self, template: ChatTemplate, messages: Sequence[Message], options: ChatOptions) -> list[int]:
        rendered = template.render(
            messages,
            add_generation_prompt=options.add_generation_prompt,
            continue_final_message=options.continue_final_message,
            extra=dict(options.extra) | ({"tools": list(options.tools)} if options.tools else {}),
            trusted=options.trusted,
        )
        if options.trusted:
            return self._encode([rendered.text], False, True)[0]
        text = rendered.shield.mark_written(rendered.covered, self._suffix)
        (encoding,) = self._marked.encode_batch_fast([text], add_special_tokens=False)
        return [self._real_ids.get(id, id) for id in encoding.ids]

    # --- ids to text

    def decode(self, ids: Sequence[int], skip_special: bool = False) -> str:
        text: str = self._plain.decode(list(ids), skip_special_tokens=skip_special)
        return text

    def detokenizer(self, skip_special: bool = True) -> Detokenizer:
        return Detokenizer(self._plain, skip_special)

    def token_bytes(self, id: int) -> bytes:
        """What this id adds to a text, where it stands in the middle of one."""
        return self._bytes.of(id)

    def token_text(self, id: int) -> str:
        """The same as text; an id that is a part of a character only is written out as OpenAI does: `bytes:\\xf0`."""
        raw = self._bytes.of(id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _read_tokenizer(tokenizer_json: str) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_str(tokenizer_json)
    except Exception as error:  # the library raises nothing narrower
        raise TextError(f"cannot be read as a tokenizer: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


class _TokenBytes:
    """Bytes of single ids, by the tokenizer's own way of writing bytes as characters."""

    def __init__(self, tokenizer: Tokenizer, added: dict[int, AddedToken]) -> None:
        self._tokenizer = tokenizer
        self._added = {id: token.content.encode() for id, token in added.items()}
        decoder = tokenizer.decoder.__getstate__() if tokenizer.decoder is not None else b""
        self._byte_of = _byte_level_alphabet() if b'"ByteLevel"' in decoder else None

    def of(self, id: int) -> bytes:
        if id in self._added:
            return self._added[id]
        token = self._tokenizer.id_to_token(id)
        if token is None:
            return b""  # the model has more ids than the tokenizer has tokens
        if self._byte_of is not None:
            return b"".join(self._byte_of.get(char) or char.encode() for char in token)
        if byte := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", token):
            return bytes.fromhex(byte[1])
        return str(token).replace("\u2581", " ").encode()


def _byte_level_alphabet() -> dict[str, bytes]:
    """GPT-2's way to write each byte as a printable character: those that are printable stand for themselves."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): bytes([byte]) for byte in printable} | {
        chr(256 + i): bytes([byte]) for i, byte in enumerate(others)
    }


# --- a model folder


def read_folder(folder: Path) -> Text:
    """The text side of a model folder. Raises TextError."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise TextError(f"{folder} has no tokenizer.json; give a folder in Hugging Face form with a fast tokenizer")
    config, generation = _read_json(folder / "config.json"), _read_json(folder / "generation_config.json")
    about = _read_json(folder / "tokenizer_config.json")
    source = select(about.get("chat_template"))
    own_file = folder / "chat_template.jinja"
    if own_file.is_file():
        source = own_file.read_text(encoding="utf-8")
    variables = {name: text for name, value in about.items() if name.endswith("_token") and (text := _content(value))}
    nested = config.get("text_config")
    inner: dict[str, Any] = nested if isinstance(nested, dict) else config
    try:
        return Text(
            path.read_text(encoding="utf-8"),
            template_source=source,
            variables=variables,
            eos_ids=_eos_ids(generation, inner),
            eos_token=variables.get("eos_token"),
            max_len=_natural(inner.get("max_position_embeddings")),
            vocab_size=_natural(inner.get("vocab_size")),
        )
    except TextError as error:
        raise TextError(f"{path} {error}") from error
    except (jinja2.TemplateError, OSError, UnicodeDecodeError) as error:
        raise TextError(f"the chat template of {folder} is not usable: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TextError(f"{path} is not JSON: {error}") from error
    return value if isinstance(value, dict) else {}


def _content(value: object) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _natural(value: object) -> int | None:
    return value if isinstance(value, int) and value > 0 else None


def _eos_ids(generation: dict[str, Any], config: dict[str, Any]) -> list[int]:
    """Those of generation_config.json, else of config.json."""
    named = generation.get("eos_token_id", config.get("eos_token_id"))
    return [id for id in (named if isinstance(named, list) else [named]) if isinstance(id, int)]
