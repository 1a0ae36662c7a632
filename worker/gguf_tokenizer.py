"""The tokenizer inside a GGUF file, as tokenizer.json and tokenizer_config.json.

Two models of tokenizer exist in the files that we read:

    gpt2     byte-level BPE. The file has the merges; how text is cut before merging has only a name (`pre`), for which
             the table CUTS has the rule.
    llama    SentencePiece BPE with byte fallback. The file has a score for each piece and no merges: two neighbours
             merge where their union is a piece, the best score first. So the merges are all the ways to cut each
             piece in two pieces, in the order of the whole's score.

Written with the `tokenizers` library; nothing here imports transformers.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from kilburn.shared.model_files import ModelRefused

Metadata = Mapping[str, Any]


class Kind(IntEnum):
    """tokenizer.ggml.token_type."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True)
class Cut:
    """How a kind of byte-level BPE prepares text. Without a pattern GPT-2's own is used."""

    pattern: str | None = None
    single_digits: bool = False
    compose: bool = False  # to Unicode's NFC first
    whole_words_first: bool = False  # a word that is a token is not merged together
    starts_with_bos: bool = False  # unless the file says otherwise


_LLAMA3 = Cut(rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}", whole_words_first=True, starts_with_bos=True)
_QWEN2 = Cut(rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}", compose=True)
CUTS: Mapping[str, Cut] = {
    "gpt-2": Cut(),
    "smollm": Cut(single_digits=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
}

# Tokens that end an answer by their name, whatever the file calls its end of text.
_END_NAMES = {"<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>", "</s>"}


@dataclass(frozen=True, slots=True)
class GgufTokenizer:
    """What the metadata says, checked. Ids index `tokens`."""

    tokens: list[str]
    kinds: list[int]
    bos: int | None
    eos: int | None
    unknown: int | None
    padding: int | None
    add_bos: bool
    add_eos: bool
    end_ids: tuple[int, ...]
    tokenizer: Tokenizer


def read_tokenizer(metadata: Metadata) -> GgufTokenizer:
    """The tokenizer that `metadata` describes. Raises ModelRefused."""
    kind, tokens = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise ModelRefused("tokenizer.ggml.tokens is missing: the GGUF file has no vocabulary; use a complete one")
    kinds = metadata.get("tokenizer.ggml.token_type") or [int(Kind.NORMAL)] * len(tokens)
    if len(kinds) != len(tokens):
        raise ModelRefused(f"tokenizer.ggml.token_type has {len(kinds)} entries for {len(tokens)} tokens")

    def one(name: str) -> int | None:
        value = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if value is not None and not 0 <= value < len(tokens):
            raise ModelRefused(f"tokenizer.ggml.{name}_token_id = {value} is not below the vocabulary's {len(tokens)}")
        return value

    bos, eos, unknown = one("bos"), one("eos"), one("unknown")
    match kind:
        case "gpt2":
            pre = metadata.get("tokenizer.ggml.pre", "")
            if pre not in CUTS:
                raise ModelRefused(f"tokenizer.ggml.pre = {pre!r} is not supported; these are: {', '.join(CUTS)}")
            tokenizer, starts_with_bos = _byte_level(tokens, metadata, CUTS[pre]), CUTS[pre].starts_with_bos
        case "llama":
            tokenizer, starts_with_bos = _sentence_piece(tokens, kinds, metadata, unknown), True
        case _:
            raise ModelRefused(f"tokenizer.ggml.model = {kind!r} is not supported; these are: gpt2, llama")
    add_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", starts_with_bos)) and bos is not None
    add_eos = bool(metadata.get("tokenizer.ggml.add_eos_token", False)) and eos is not None
    _name_specials(tokenizer, tokens, kinds)
    _frame(tokenizer, tokens, bos if add_bos else None, eos if add_eos else None)
    ends = [eos, one("eot"), one("eom")]
    ends += [i for i, name in enumerate(tokens) if name in _END_NAMES and kinds[i] == Kind.CONTROL]
    end_ids = tuple(dict.fromkeys(i for i in ends if i is not None))
    return GgufTokenizer(tokens, kinds, bos, eos, unknown, one("padding"), add_bos, add_eos, end_ids, tokenizer)


def _vocabulary(tokens: list[str]) -> dict[str, int]:
    vocabulary = {token: i for i, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        twice = next(token for i, token in enumerate(tokens) if vocabulary[token] != i)
        raise ModelRefused(f"tokenizer.ggml.tokens holds {twice!r} twice; the file is damaged")
    return vocabulary


def _byte_level(tokens: list[str], metadata: Metadata, cut: Cut) -> Tokenizer:
    vocabulary = _vocabulary(tokens)
    merges = [tuple(merge.split(" ")) for merge in metadata.get("tokenizer.ggml.merges") or ()]
    for merge in merges:
        if len(merge) != 2 or any(part not in vocabulary for part in (*merge, "".join(merge))):
            raise ModelRefused(f"tokenizer.ggml.merges holds {' '.join(merge)!r}, which the vocabulary does not")
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=cut.whole_words_first))
    if cut.compose:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if cut.single_digits else []
    if cut.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(cut.pattern), behavior="isolated", invert=False))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=cut.pattern is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_piece(tokens: list[str], kinds: list[int], metadata: Metadata, unknown: int | None) -> Tokenizer:
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise ModelRefused("tokenizer.ggml.scores must have one entry for each token")
    vocabulary = _vocabulary(tokens)
    unk = None if unknown is None else tokens[unknown]
    model = models.BPE(
        vocab=vocabulary,
        merges=_merges_by_score(vocabulary, kinds, scores),
        unk_token=unk,
        fuse_unk=True,
        byte_fallback=Kind.BYTE in kinds,
    )
    tokenizer = Tokenizer(model)
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    steps: list[Any] = [normalizers.Prepend("▁")] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    joined: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*joined, decoders.Strip(" ", 1, 0)] if prefix else joined)
    return tokenizer


def _merges_by_score(vocabulary: dict[str, int], kinds: list[int], scores: list[float]) -> list[tuple[str, str]]:
    merges = []
    for piece, whole in vocabulary.items():
        if kinds[whole] not in (Kind.NORMAL, Kind.USER_DEFINED):
            continue
        cuts = [(piece[:i], piece[i:]) for i in range(1, len(piece))]
        known = [(left, right) for left, right in cuts if left in vocabulary and right in vocabulary]
        known.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        merges += [(scores[whole], left, right) for left, right in known]
    # A stable sort: among the ways to cut one piece, the longer left part first.
    merges.sort(key=lambda merge: (merge[0], len(merge[1]), len(merge[2])), reverse=True)
    return [(left, right) for _, left, right in merges]


def _name_specials(tokenizer: Tokenizer, tokens: list[str], kinds: list[int]) -> None:
    special = {Kind.CONTROL, Kind.UNKNOWN}
    for kind_set, is_special in ((special, True), ({Kind.USER_DEFINED}, False)):
        named = [name for name, kind in zip(tokens, kinds, strict=True) if kind in kind_set]
        tokenizer.add_tokens([AddedToken(name, normalized=False, special=is_special) for name in named])


def _frame(tokenizer: Tokenizer, tokens: list[str], bos: int | None, eos: int | None) -> None:
    """What is put around a text by default."""
    ends = [i for i in (bos, eos) if i is not None]
    if not ends:
        return

    def framed(part: str, kind: int) -> list[str]:
        before = [] if bos is None else [f"{tokens[bos]}:{kind}"]
        after = [] if eos is None else [f"{tokens[eos]}:{kind}"]
        return [*before, f"{part}:{kind}", *after]

    tokenizer.post_processor = processors.TemplateProcessing(
        single=framed("$A", 0),
        pair=[*framed("$A", 0), *framed("$B", 1)],
        special_tokens=[(tokens[i], i) for i in dict.fromkeys(ends)],
    )


def write_tokenizer(read: GgufTokenizer, metadata: Metadata, folder: Path) -> None:
    """tokenizer.json, tokenizer_config.json and generation_config.json."""
    read.tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": read.add_bos,
        "add_eos_token": read.add_eos,
        "clean_up_tokenization_spaces": False,
    }
    named = (("bos_token", read.bos), ("eos_token", read.eos), ("unk_token", read.unknown), ("pad_token", read.padding))
    settings |= {name: read.tokens[i] for name, i in named if i is not None}
    template = metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1, ensure_ascii=False), encoding="utf-8")
    generation = {"bos_token_id": read.bos, "eos_token_id": list(read.end_ids), "pad_token_id": read.padding}
    chosen = {name: value for name, value in generation.items() if value not in (None, [])}
    (folder / "generation_config.json").write_text(json.dumps(chosen, indent=1), encoding="utf-8")
