"""Chat templates: a conversation becomes the one text that the model was taught to read.

    messages --shield--> messages' --jinja sandbox--> text' --Shield.split--> [(written by the template?), ...]

The template is the model's own code and the messages are strangers' text; both end in one string. A control token
(`<|im_end|>`) counts as one only where the template wrote it. So every such literal inside a stranger's text is cut
by a secret mark before rendering: what is whole afterwards is the template's, and taking the marks out again
restores the stranger's text, letter by letter. `text.py` encodes the two kinds apart.

To continue the last message, its text is put between two secret marks, and the prompt is what stands before the
second: no template's trimming and no end-of-turn marker can get between.

A template is code and may loop: rendering checks a clock at every turn of a loop, call, attribute and piece of output.
What this file does not know: token ids, HTTP, threads.
"""

import json
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

Message = dict[str, Any]
_TIMED = "each of, in time"  # no name that a template could say


class TemplateRefused(Exception):
    """The conversation cannot be rendered: the template's own complaint, or a limit. For the client's eyes."""


class Shield:
    """Tells the control tokens that a template writes from those that its users do. One per rendering.

    `literals` are the texts of the control tokens.
    """

    def __init__(self, literals: Sequence[str]) -> None:
        self._mark = "x" + secrets.token_hex(12)
        ordered = sorted((text for text in literals if text), key=len, reverse=True)
        # What a text may end with that another text could complete. Words are left alone: templates compare them.
        self._beginnings = {
            literal[:length] for literal in ordered if not literal[0].isalnum() for length in range(1, len(literal))
        }
        self._longest = max(map(len, self._beginnings), default=0)
        self._pattern = re.compile("|".join(map(re.escape, ordered))) if ordered else None

    def cover(self, value: Any) -> Any:
        """The same value with every control literal in its texts cut in two. Mappings keep their keys' order."""
        match value:
            case str():
                return self._cover_text(value)
            case Mapping():
                return {self._cover_text(str(key)): self.cover(item) for key, item in value.items()}
            case list() | tuple():
                return [self.cover(item) for item in value]
        return value

    def _cover_text(self, text: str) -> str:
        if self._pattern is None:
            return text
        mark = self._mark
        covered = self._pattern.sub(lambda found: found[0][:1] + mark + found[0][1:], text)
        # A literal could also be completed by whatever follows this text in the rendering: cut its beginning too.
        for length in range(min(self._longest, len(covered)), 0, -1):
            if covered[-length:] in self._beginnings:
                at = len(covered) - length + 1
                return covered[:at] + mark + covered[at:]
        return covered

    def mark_written(self, rendered: str, suffix: str) -> str:
        """The rendering with `suffix` behind each control token that the template wrote, and our marks taken out."""
        if self._pattern is None:
            return rendered
        return self._pattern.sub(lambda found: found[0] + suffix, rendered).replace(self._mark, "")

    def uncover(self, text: str) -> str:
        return text.replace(self._mark, "")


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt as text, and the shield that it was rendered under."""

    covered: str
    shield: Shield

    @property
    def text(self) -> str:
        return self.shield.uncover(self.covered)


class _GenerationBlock(Extension):
    """`{% generation %}` marks what a model would be trained on. Here its body is rendered, no more."""

    tags = {"generation"}  # noqa: RUF012  # declared so by jinja

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with a clock. One rendering at a time."""

    intercepted_binops = frozenset({"*", "**"})
    clock: Callable[[], float] = staticmethod(time.monotonic)
    deadline = float("inf")

    def check_clock(self) -> None:
        if self.clock() > self.deadline:
            raise TemplateRefused("the chat template took too long; send fewer or shorter messages")

    def timed(self, items: Iterable[Any]) -> Iterator[Any]:
        """What every loop of a template goes over: a loop without a body does nothing else that could be checked."""
        for item in items:
            self.check_clock()
            yield item

    def _generate(self, source: jinja2.nodes.Template, *args: Any, **kwargs: Any) -> str:  # jinja's hook
        for loop in source.find_all(jinja2.nodes.For):
            loop.iter = jinja2.nodes.Filter(loop.iter, _TIMED, [], [], None, None)
        return super()._generate(source, *args, **kwargs)

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:  # jinja's own signature
        self.check_clock()
        return super().call(context, obj, *args, **kwargs)

    def getattr(self, obj: Any, attribute: str) -> Any:
        self.check_clock()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        self.check_clock()
        return super().getitem(obj, argument)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self.check_clock()
        for value, times in ((left, right), (right, left)):
            if isinstance(value, str | list | tuple) and isinstance(times, int) and len(value) * times > 1 << 20:
                raise SecurityError("the template repeats a value too often")
        if operator == "**" and not (isinstance(right, int | float) and abs(right) <= 64):
            raise SecurityError("the template raises to too high a power")
        return super().call_binop(context, operator, left, right)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(shape: str) -> str:
    return datetime.now().strftime(shape)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Not jinja's own, which escapes < > & ' for HTML: models were not taught with these escapes.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class ChatTemplate:
    """One model's chat template. `variables` are its named tokens (bos_token, eos_token ...)."""

    def __init__(
        self,
        source: str,
        variables: Mapping[str, str],
        literals: Sequence[str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._environment = _Environment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
        )
        self._environment.clock = clock
        self._environment.filters |= {"tojson": _tojson, _TIMED: self._environment.timed}
        self._environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        self._template = self._environment.from_string(source)
        self._variables = dict(variables)
        self._literals = tuple(literals)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        extra: Mapping[str, Any] | None = None,
        trusted: bool = False,
        limit_s: float = 5.0,
        limit_chars: int = 1 << 24,
    ) -> Rendered:
        """The prompt of a conversation. Raises TemplateRefused. `trusted`: users' control tokens count as such."""
        shield = Shield(() if trusted else self._literals)
        given = [shield.cover(message) | {"role": message["role"]} for message in messages]
        start, end = "x" + secrets.token_hex(12), "x" + secrets.token_hex(12)
        prefill = ""
        if continue_final_message:
            prefill = str(given[-1].get("content", ""))
            given[-1] = given[-1] | {"content": start + prefill + end}
        values = {**shield.cover(extra or {}), **self._variables}
        values |= {"messages": given, "add_generation_prompt": add_generation_prompt}
        values.setdefault("tools", None)
        values.setdefault("documents", None)
        text = self._run(values, limit_s, limit_chars)
        if continue_final_message:
            text = _cut_at_end(text, start, end, prefill)
        return Rendered(text, shield)

    def _run(self, values: dict[str, Any], limit_s: float, limit_chars: int) -> str:
        self._environment.deadline = self._environment.clock() + limit_s
        try:
            return self._collect(self._template.generate(values), limit_chars)
        except TemplateRefused:
            raise
        except jinja2.TemplateError as error:
            raise TemplateRefused(
                f"the chat template refuses this conversation: {error.message or 'no reason'}"
            ) from None
        except RecursionError:
            raise TemplateRefused("the conversation is nested too deeply for the chat template") from None
        except (TypeError, ValueError, KeyError, AttributeError, IndexError, ZeroDivisionError, OverflowError):
            # What a template does with a value of a shape that it did not expect. Its own words would show our insides.
            raise TemplateRefused("the chat template cannot render this conversation; check its messages") from None

    def _collect(self, pieces: Iterable[str], limit_chars: int) -> str:
        collected: list[str] = []
        num_chars = 0
        for piece in pieces:
            self._environment.check_clock()
            num_chars += len(piece)
            if num_chars > limit_chars:
                raise TemplateRefused(f"the rendered conversation exceeds {limit_chars} characters")
            collected.append(piece)
        return "".join(collected)


def _cut_at_end(text: str, start: str, end: str, prefill: str) -> str:
    at = text.rfind(end)
    if at < 0:
        raise TemplateRefused("the chat template does not show the last message, so it cannot be continued")
    text = text[:at].replace(start, "").replace(end, "")
    if not text.endswith(prefill):
        raise TemplateRefused("the chat template rewrites the last message, so it cannot be continued")
    return text


def select(chat_template: object) -> str | None:
    """The source in tokenizer_config.json: a text, or a list of named ones of which `default` is meant."""
    if isinstance(chat_template, str):
        return chat_template
    if isinstance(chat_template, list):
        named = {entry.get("name"): entry.get("template") for entry in chat_template if isinstance(entry, dict)}
        chosen = named.get("default") or next(iter(named.values()), None)
        return chosen if isinstance(chosen, str) else None
    return None
