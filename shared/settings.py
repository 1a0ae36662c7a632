"""Settings, declared once and read from three places.

                   max_rows: int = setting(64, Count(1, 4096), "sequences in one batch")
                      |
      --max-rows 64   |   KILBURN_MAX_ROWS=64   |   max_rows = 64 in the file that --config names
          flags      before     environment    before     file     before     the default

A setting is a dataclass field whose metadata holds its kind (how text becomes a value, and what is legal) and one line
of help. Every place speaks text to the same kind, so a value means the same wherever it stands. All faults are found
in one pass, and each names the setting in the form that the user wrote and says what to write instead.

One file and one environment serve every command: a name that belongs to another command is ignored, a name that belongs
to none is a fault, with the nearest name that exists.

What this file does not know: which settings there are (config.py), and whether a folder exists or a port is free.
"""

import os
import sys
import textwrap
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, ClassVar, NoReturn, TypeVar

from kilburn.shared.kinds import Kind, Switch, nearest

T = TypeVar("T")

# Names of the environment that begin like settings and are not: each is read where it is used.
ENVIRONMENT_ONLY = {
    "KILBURN_CACHE": "folder for converted models; default ~/.cache/kilburn",
    "KILBURN_API_KEYS": "API keys themselves, for those who keep none in a file",
}
PREFIX = "KILBURN_"


# --- declaring


@dataclass(frozen=True, slots=True)
class Setting:
    kind: Kind
    help: str
    required: bool = False


def setting(default: T, kind: Kind, help: str, required: bool = False) -> T:
    """A field of a settings class. Typed as its value, as `dataclasses.field` is."""
    declared: T = field(default=default, metadata={"setting": Setting(kind, help, required)})
    return declared


class Settings:
    """Base of every settings class. Subclasses are frozen dataclasses whose fields are all made by `setting`."""

    every_class: ClassVar[list[type["Settings"]]] = []

    def __init_subclass__(cls) -> None:
        cls.every_class.append(cls)

    def faults(self) -> Iterable[tuple[str, str]]:
        """(setting, what to change) for values that are legal alone and not together."""
        return ()


S = TypeVar("S", bound=Settings)


class SettingsError(Exception):
    """Every fault found, one line each."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


def _fields(cls: type[Settings]) -> "tuple[Field[Any], ...]":
    return fields(cls)  # type: ignore[arg-type]  # subclasses are dataclasses, their base has no fields


def declared(cls: type[Settings]) -> dict[str, Setting]:
    return {f.name: f.metadata["setting"] for f in _fields(cls)}


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def variable(name: str) -> str:
    return PREFIX + name.upper()


def _known_anywhere() -> set[str]:
    return {name for cls in Settings.every_class for name in declared(cls)}


# --- reading


@dataclass(frozen=True, slots=True)
class _Given:
    """A value as the user wrote it, and where: `--port`, `KILBURN_PORT`, `port in kilburn.toml`."""

    form: str
    text: str


def _from_flags(cls: type[Settings], argv: Sequence[str], positional: str, problems: list[str]) -> dict[str, _Given]:
    known = declared(cls)
    by_flag = {flag(name): name for name in known}
    given: dict[str, _Given] = {}
    words = list(argv)
    while words:
        word, equals, text = words.pop(0).partition("=")
        if not word.startswith("--"):
            word = word + equals + text
            if positional and positional not in given and not word.startswith("-"):
                given[positional] = _Given(positional.upper(), word)
            else:
                problems.append(f"{word}: not understood here; every setting is written as --name value")
            continue
        off = word.removeprefix("--no-")
        if (
            word not in by_flag
            and word != off
            and f"--{off}" in by_flag
            and known[by_flag[f"--{off}"]].kind == Switch()
        ):
            given[by_flag[f"--{off}"]] = _Given(word, "false")
            continue
        if word != "--config" and word not in by_flag:
            problems.append(f"{word}: no such flag{nearest(word, [*by_flag, '--config', '--help'])}")
            if not equals and words and not words[0].startswith("--"):
                words.pop(0)  # its value, most likely: one mistake is one line
            continue
        name = by_flag.get(word, "config")
        if not equals and name != "config" and known[name].kind == Switch():
            text = "true"
        elif not equals and (not words or words[0].startswith("--")):
            problems.append(
                f"{word}: needs a value, as in {word} {known[name].kind.shape if name in known else 'FILE'}"
            )
            continue
        elif not equals:
            text = words.pop(0)
        given[name] = _Given(word, text)
    return given


def _from_environment(cls: type[Settings], environ: Mapping[str, str], problems: list[str]) -> dict[str, _Given]:
    known = {variable(name): name for name in [*_known_anywhere(), "config"]}
    given: dict[str, _Given] = {}
    for word, text in environ.items():
        if not word.startswith(PREFIX) or word in ENVIRONMENT_ONLY:
            continue
        if word not in known:
            problems.append(f"{word}: no such setting, so unset it{nearest(word, [*known, *ENVIRONMENT_ONLY])}")
        elif known[word] == "config" or known[word] in declared(cls):
            given[known[word]] = _Given(word, text)
    return given


def _from_file(cls: type[Settings], where: _Given, problems: list[str]) -> dict[str, _Given]:
    try:
        with open(where.text, "rb") as file:
            table = tomllib.load(file)
    except OSError as error:
        problems.append(f"{where.form}: cannot read {where.text!r} ({error.strerror}); name a TOML file")
        return {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        problems.append(f"{where.form}: {where.text} is not TOML ({error}); lines read name = value")
        return {}
    given: dict[str, _Given] = {}
    known = _known_anywhere()
    for name, value in table.items():
        form = f"{name} in {where.text}"
        if name not in known:
            problems.append(f"{form}: no such setting{nearest(name.replace('-', '_'), known)}")
        elif not isinstance(value, str | int | float):
            problems.append(f"{form}: give one text, number or boolean, not {type(value).__name__}")
        elif name in declared(cls):
            given[name] = _Given(form, str(value).lower() if isinstance(value, bool) else str(value))
    return given


def load(cls: type[S], argv: Sequence[str], environ: Mapping[str, str], positional: str = "") -> S:
    """The settings of one command. `positional` is the setting that may stand without its flag.

    Raises SettingsError with every fault at once.
    """
    problems: list[str] = []
    flags = _from_flags(cls, argv, positional, problems)
    variables = _from_environment(cls, environ, problems)
    config = flags.pop("config", None) or variables.pop("config", None)
    variables.pop("config", None)
    in_file = _from_file(cls, config, problems) if config is not None else {}
    given = in_file | variables | flags
    values: dict[str, Any] = {}
    for name, declaration in declared(cls).items():
        if name not in given:
            if declaration.required:
                problems.append(f"{flag(name)}: missing ({declaration.help}); or set {variable(name)}")
            continue
        try:
            values[name] = declaration.kind.parse(given[name].text)
        except ValueError as error:
            problems.append(f"{given[name].form}: {given[name].text!r} will not do; {error}")
    if problems:
        raise SettingsError(problems)
    settings = cls(**values)
    problems += [f"{given[n].form if n in given else flag(n)}: {what}" for n, what in settings.faults()]
    if problems:
        raise SettingsError(problems)
    return settings


def load_or_exit(cls: type[S], argv: Sequence[str], program: str, about: str, positional: str = "") -> S:
    """`load`, as a command does it: --help prints and ends with 0, faults are printed and end with 2."""
    if any(word in ("--help", "-h") for word in argv):
        print(help_text(cls, program, about, positional))
        raise SystemExit(0)
    try:
        return load(cls, argv, os.environ, positional)
    except SettingsError as error:
        complain(program, error.problems)


def complain(program: str, problems: Sequence[str]) -> NoReturn:
    many = f"{len(problems)} settings need a change" if len(problems) > 1 else "one setting needs a change"
    lines = "".join(f"  {problem}\n" for problem in problems)
    print(f"{program}: {many}:\n{lines}`{program} --help` lists every setting.", file=sys.stderr)
    raise SystemExit(2)


# --- showing


def help_text(cls: type[Settings], program: str, about: str, positional: str = "") -> str:
    usage = (
        f"{program} {positional.upper()} [--setting value ...]" if positional else f"{program} [--setting value ...]"
    )
    lines = [f"usage: {usage}", "", *textwrap.wrap(about, 100), "", "Settings:"]
    for f in _fields(cls):
        declaration: Setting = f.metadata["setting"]
        left = f"  {flag(f.name)} {declaration.kind.shape}".rstrip()
        default = declaration.kind.show(f.default) if f.default is not MISSING and not declaration.required else ""
        shown = f" [{default}]" if default else ""
        body = textwrap.wrap(declaration.help + shown, 66)
        lines.append(f"{left:<32} {body[0]}" if len(left) <= 32 else left)
        lines += [" " * 33 + line for line in (body if len(left) > 32 else body[1:])]
    lines.append(f"{'  --config FILE':<32} a TOML file of the same names: max_rows = 64")
    lines += ["", "Each may also be set as KILBURN_NAME in the environment (--max-rows is KILBURN_MAX_ROWS).",
              "A flag wins over the environment, the environment over the file."]  # fmt: skip
    lines += ["", "Environment only:", *(f"  {name:<30} {what}" for name, what in ENVIRONMENT_ONLY.items())]
    return "\n".join(lines)


def narrowed(settings: Settings, cls: type[S]) -> S:
    """The part of a wider command's settings that another command takes."""
    return cls(**{f.name: getattr(settings, f.name) for f in _fields(cls)})


def as_flags(settings: Settings) -> list[str]:
    """The command line that gives these settings, whatever the environment or a file may say."""
    words: list[str] = []
    for f in _fields(type(settings)):
        words.append(f"{flag(f.name)}={f.metadata['setting'].kind.show(getattr(settings, f.name))}")
    return words
