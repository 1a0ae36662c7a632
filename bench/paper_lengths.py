"""Lengths of public texts in tokens of the paper's models, counted by their own vocabularies.

    OPT      GPT-2's byte-level BPE
    LLaMA    SentencePiece

and one token that begins every prompt. A text's characters over four, which is what the simulator counts where a trace
has no tokenizer, is right in the mean and wrong in the tails: answers in other scripts and code are of more tokens, and
it is long sequences that fill a pool.
"""

import gzip
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import fmean

from kilburn.controller.simulate.traces import CHARACTERS_PER_TOKEN, Asked, TraceError, read_json, read_text

OPT, LLAMA = "ggml-vocab-gpt-2.gguf.gz", "ggml-vocab-llama-spm.gguf.gz"
BEGIN = 1  # the token before every prompt
NumTokens = Callable[[str], int]
Turn = tuple[str, str]  # who, what


@lru_cache(maxsize=2)
def counter(path: Path) -> NumTokens:
    """Counts a text's tokens by the vocabulary of a GGUF file, plain or gz. Raises TraceError."""
    from gguf import GGUFReader

    from kilburn.shared.model_files import ModelRefused
    from kilburn.worker.gguf_tokenizer import read_tokenizer

    with tempfile.NamedTemporaryFile(suffix=".gguf") as plain:
        try:
            raw = path.read_bytes()
            plain.write(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
            plain.flush()
            reader = GGUFReader(plain.name)
            tokenizer = read_tokenizer({name: one.contents() for name, one in reader.fields.items()}).tokenizer
        except (ValueError, IndexError, OSError, EOFError, ModelRefused) as error:
            raise TraceError(f"{path}: no GGUF file with a vocabulary ({error})") from error
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)


def by_characters(text: str) -> int:
    return max(len(text) // CHARACTERS_PER_TOKEN, 1)


def conversations(path: Path) -> Iterator[list[Turn]]:
    """Who said what, of each conversation of ShareGPT. Raises TraceError."""
    for where, entry in read_json(path):
        try:
            turns = [(turn["from"], turn["value"]) for turn in entry["conversations"]]
            yield [(who, text) for who, text in turns if text.strip()]
        except (TypeError, KeyError, AttributeError) as error:
            raise TraceError(f"{where}: expected conversations of turns with texts in `from` and `value`") from error


def first_turns(path: Path, num_tokens: NumTokens) -> Iterator[Asked]:
    """Of each conversation the first question that is followed by an answer. Raises TraceError."""
    for turns in conversations(path):
        for (asks, prompt), (answers, output) in pairwise(turns):
            if asks == "human" and answers == "gpt":
                yield Asked(None, BEGIN + num_tokens(prompt), num_tokens(output))
                break


def chats(path: Path, num_tokens: NumTokens, most: int) -> Iterator[Asked]:
    """Each answer of a conversation: of what was said before, the last tokens, and the answer's first. TraceError."""
    for turns in conversations(path):
        before = 0
        for who, text in turns:
            num = num_tokens(text)
            if who == "gpt" and before:
                yield Asked(None, min(BEGIN + before, most), min(num, most))
            before += num


def sessions(
    talks: Sequence[list[Turn]], num_tokens: NumTokens, rate: float, seconds: float, pause_s: float, max_len: int
) -> list[Asked]:
    """Conversations that begin at random, drawn from `talks`; the next question comes `pause_s` later in the mean.

    Each is asked with all that was said before. One that would grow beyond `max_len` ends there.
    """
    rng, start_s, number, found = Random(1), 0.0, 0, list[Asked]()
    while (start_s := start_s + rng.expovariate(rate)) < seconds:
        at_s, number, before = start_s, number + 1, tuple[int, ...]()
        for (asks, prompt), (answers, output) in pairwise(rng.choice(talks)):
            if asks != "human" or answers != "gpt":
                continue
            num_prompt, num_output = sum(before) + num_tokens(prompt), num_tokens(output)
            if at_s >= seconds or num_prompt + num_output > max_len:
                break
            found.append(Asked(at_s, num_prompt, num_output, conversation=number, before=before))
            before = (*before, num_prompt - sum(before), num_output)
            at_s += rng.expovariate(1.0 / pause_s)
    return sorted(found, key=lambda asked: asked.at_s or 0.0)


def instructions(path: Path, num_tokens: NumTokens) -> Iterator[Asked]:
    """Alpaca's rows. Raises TraceError."""
    for where, entry in read_json(path):
        try:
            parts, answer = (entry["instruction"], entry["input"]), entry["output"]
            if answer.strip():
                yield Asked(None, BEGIN + num_tokens("\n".join(part for part in parts if part)), num_tokens(answer))
        except (TypeError, KeyError, AttributeError) as error:
            raise TraceError(f"{where}: expected texts in instruction, input and output") from error


def translations(sentences: Path, pairs: Path, num_tokens: NumTokens) -> Iterator[Asked]:
    """English sentences, each with an answer as much longer as German references of `pairs` are. Raises TraceError."""
    longer = []
    for number, line in enumerate(read_text(pairs).splitlines(), 1):
        columns = line.split("\t")
        if len(columns) < 6:
            raise TraceError(f"{pairs}:{number}: expected 8 columns, of which the third is English, the sixth German")
        longer.append((num_tokens(columns[2]), num_tokens(columns[5])))
    ratio = sum(german for _, german in longer) / max(sum(english for english, _ in longer), 1)
    for sentence in read_text(sentences).splitlines():
        num = num_tokens(sentence)
        yield Asked(None, num, round(num * ratio) + 1)  # the end of text is drawn as well


def mean_lengths(asked: Sequence[Asked]) -> tuple[float, float]:
    """Of prompts and answers."""
    return fmean(one.num_prompt for one in asked), fmean(one.num_output for one in asked)


def told(lengths: Sequence[Asked]) -> str:
    prompt, output = mean_lengths(lengths)
    return f"{prompt:.0f} tokens in and {output:.0f} out in the mean"


def mean_filled(asked: Sequence[Asked]) -> float:
    """Slots of a running sequence that are filled, in the mean over the steps of all: long answers run for longer."""
    filled = sum(one.num_output * (one.num_prompt + one.num_output / 2) for one in asked)
    return filled / sum(one.num_output for one in asked)
