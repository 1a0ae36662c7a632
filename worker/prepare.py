"""Makes a MODEL ready to serve: converts a GGUF file, or fetches a snapshot from a hub.

    python -m kilburn.worker.prepare MODEL [--revision R]

shows progress on stderr, and prints the folder as the last line on stdout. From a hub come safetensors, JSON files,
templates and tokenizers, at one pinned commit, and nothing that could be run.
"""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

from kilburn.shared.model_files import (
    Bundled,
    Folder,
    Gguf,
    HubId,
    ModelRefused,
    cache_folder,
    complete_mark,
    gguf_file,
    prepared_folder,
    resolve,
)

OnProgress = Callable[[str, int, int], None]  # what is being done, how much of it is done, out of how much

HUB_PATTERNS = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]


def prepare(model: str, revision: str | None = None, on_progress: OnProgress | None = None) -> Path:
    """The folder to serve `model` from, made if it has to be. Raises ModelRefused with what to change."""
    if (ready := prepared_folder(model, revision)) is not None:
        return ready
    match resolve(model, revision):
        case Folder(path):
            return path
        case Gguf() | Bundled() as source:
            from kilburn.worker.convert import convert  # brings numpy and gguf, which a ready folder does not need

            return convert(gguf_file(source), cache_folder(source), on_progress)
        case HubId(repo, pinned):
            return _fetch(repo, pinned or "main", on_progress)


def _fetch(repo: str, revision: str, on_progress: OnProgress | None) -> Path:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        if on_progress is not None:
            on_progress(f"fetching {repo}", 0, 1)
        # One commit for everything that follows: a branch may move between two requests.
        info = HfApi().model_info(repo, revision=revision)
        if not any(file.rfilename.endswith(".safetensors") for file in info.siblings or ()):
            raise ModelRefused(
                f"MODEL {repo}, revision {revision}: has no safetensors, and pickled weights are never read; "
                "name another revision or repository"
            )
        snapshot = Path(snapshot_download(repo, revision=info.sha, allow_patterns=HUB_PATTERNS))
        _remember(snapshot, revision)
    except GatedRepoError as error:
        raise ModelRefused(f"MODEL {repo}: access is gated; accept its terms on the hub and set HF_TOKEN") from error
    except RevisionNotFoundError as error:
        raise ModelRefused(f"revision {revision}: {repo} has none of that name; leave revision out for main") from error
    except RepositoryNotFoundError as error:
        raise ModelRefused(
            f"MODEL {repo}: the hub has no such model, or it is private: check the name, or set HF_TOKEN"
        ) from error
    except ModelRefused:
        raise
    except Exception as error:  # whatever its HTTP library raises: that is another in each of its versions
        if (held := _held(repo, revision)) is not None:
            return held
        raise ModelRefused(
            f"MODEL {repo}: the hub at {os.environ.get('HF_ENDPOINT', 'https://huggingface.co')} cannot be read "
            f"({type(error).__name__}); check the network or HF_ENDPOINT, or name a local folder as MODEL"
        ) from error
    if on_progress is not None:
        on_progress(f"fetching {repo}", 1, 1)
    return snapshot


def _held(repo: str, revision: str) -> Path | None:
    """A snapshot that someone else fetched into the hub's cache, if all that serving needs is in it. The hub library
    puts a file there only once it is whole."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    from kilburn.worker.models.checkpoint import weight_files

    try:
        snapshot = Path(snapshot_download(repo, revision=revision, local_files_only=True, allow_patterns=HUB_PATTERNS))
        weight_files(snapshot)
    except (LocalEntryNotFoundError, ModelRefused, OSError, ValueError):
        return None
    return snapshot if all((snapshot / name).is_file() for name in ("config.json", "tokenizer.json")) else None


def _remember(snapshot: Path, revision: str) -> None:
    """That this snapshot is whole, and which commit the name `revision` stands for, as the hub library keeps it."""
    mark = complete_mark(snapshot)
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.write_text(str(snapshot))
    if revision != snapshot.name:
        reference = snapshot.parent.parent / "refs" / revision
        reference.parent.mkdir(parents=True, exist_ok=True)
        reference.write_text(snapshot.name)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m kilburn.worker.prepare", description="Make a model ready.")
    parser.add_argument("model", help="a folder, a .gguf file, smollm2-135m-instruct, or a hub id")
    parser.add_argument("--revision", help="of a hub id: a branch, a tag or a commit (default: main)")
    arguments = parser.parse_args()
    try:
        folder = _with_bar(arguments.model, arguments.revision)
    except ModelRefused as refusal:
        print(refusal, file=sys.stderr)
        return 2
    print(folder)
    return 0


def _with_bar(model: str, revision: str | None) -> Path:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("preparing", total=None)
        tenths = -1

        def show(what: str, done: int, total: int) -> None:
            nonlocal tenths
            bar.update(task, description=what, completed=done, total=total)
            # Not a terminal: a line for each tenth, so that a log shows that something moves.
            if not console.is_terminal and done * 10 // max(total, 1) > tenths:
                tenths = done * 10 // max(total, 1)
                print(f"{what}: {done * 100 // max(total, 1)} %", file=sys.stderr, flush=True)

        return prepare(model, revision, show)


if __name__ == "__main__":
    sys.exit(main())
