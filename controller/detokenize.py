"""A growing list of token ids becomes text, one id at a time.

    ids --Detokenizer--> pieces of whole characters --StopStrings--> pieces that may be sent

The join of what both let out is the decoded whole, cut at the first stop string. A character may take several ids and
a stop string several pieces, so both hold a tail back, and let go of it at the end. One difference is meant: where a
bad byte follows good ones, the library's byte-fallback decoder gives up the whole run of bytes; here characters that
were complete stay, and only the bad bytes are replaced.
What this file does not know: requests, finish reasons, the wire.
"""

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

MOST_PENDING = 16  # ids without a whole character: four make one at most, more are bad bytes or hidden tokens


class Detokenizer:
    """Text of a growing list of ids. Half a character is held until its other half comes, or until `flush`."""

    __slots__ = ("_context", "_pending", "_skip_special", "_stream", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._stream = DecodeStream(skip_special_tokens=skip_special)
        self._context: list[int] = []  # ids whose text was let out last: what the pending ones are decoded behind
        self._pending: list[int] = []

    def step(self, id: int) -> str:
        """The text that is certain now and was not before; often that of this id."""
        try:
            piece = self._stream.step(self._tokenizer, id)
        except Exception:  # "invalid prefix", which has no class of its own
            piece = self._begin_anew(id)
        pending = self._pending
        pending.append(id)
        if piece is not None:
            self._context, self._pending = pending, []
            return str(piece)
        return self._let_go() if len(pending) >= MOST_PENDING else ""

    def _begin_anew(self, id: int) -> str:
        """A bad byte behind good ones made the library take back what it had let out. What was sent stays sent."""
        ids = [*self._pending, id]
        self._stream = DecodeStream(ids=ids, skip_special_tokens=self._skip_special)
        return self._decode(ids)

    def _decode(self, ids: list[int]) -> str:
        """Text of `ids` where they stand, behind the context."""
        before = self._tokenizer.decode(self._context, skip_special_tokens=self._skip_special)
        both = self._tokenizer.decode(self._context + ids, skip_special_tokens=self._skip_special)
        if both.startswith(before):
            return str(both[len(before) :])
        return str(self._tokenizer.decode(ids, skip_special_tokens=self._skip_special))

    def _let_go(self) -> str:
        """Lets out the older of the pending ids, cut where no character is split. "" if there is no such place yet."""
        whole = self._decode(self._pending)
        for end in range(len(self._pending) - 4, len(self._pending) - 9, -1):
            older, newer = self._pending[:end], self._pending[end:]
            text = self._decode(older)
            context, self._context = self._context, older
            if text + self._decode(newer) == whole:
                self._pending = newer
                self._stream = DecodeStream(ids=older, skip_special_tokens=self._skip_special)
                for id in newer:
                    self._stream.step(self._tokenizer, id)
                return text
            self._context = context
        return ""

    def flush(self) -> str:
        """What was held: the end has come, so half a character is a bad one."""
        text = self._decode(self._pending) if self._pending else ""
        self._context, self._pending = self._context + self._pending, []
        return text


class StopStrings:
    """Lets text through up to the first stop string, and holds back a tail that may become one.

    The first to be complete wins, as if the text came letter by letter: so the cut does not depend on the chunking.
    """

    __slots__ = ("_held", "_include", "_stops", "completed")

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self.completed = ""  # the stop string that was met

    def feed(self, piece: str) -> tuple[str, bool]:
        """(text that may be sent, whether a stop string was completed). After True nothing more is to be fed."""
        text = self._held + piece
        first: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0 and (first is None or (start + len(stop), start, stop) < first):
                first = (start + len(stop), start, stop)
        if first is not None:
            end, start, self.completed = first
            self._held = ""
            return text[: end if self._include else start], True
        keep = self._tail(text)
        self._held = text[keep:]
        return text[:keep], False

    def _tail(self, text: str) -> int:
        """Where the longest tail begins that is the beginning of a stop string."""
        keep = len(text)
        for stop in self._stops:
            at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
            while 0 <= at < keep:
                if stop.startswith(text[at:]):
                    keep = at
                    break
                at = text.find(stop[0], at + 1)
        return keep

    def flush(self) -> str:
        text, self._held = self._held, ""
        return text
