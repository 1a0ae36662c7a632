"""The tensors of a folder, each to be taken exactly once.

safetensors only, one file or many with an index, memory-mapped: a tensor that is taken is a view of its file, and lives
on it until its last user lets go. A layer that has its own copies says `forget`, so that packed weights and the mapped
file are never both in memory beyond one layer. Whoever builds a model takes each tensor that it needs by name and
shape; `finish` then refuses the checkpoint if anything is left that nobody took and that is not on the architecture's
list of leftovers. So a checkpoint of another model, or with one tensor more or less, never loads by accident.
"""

import ctypes
import json
import mmap
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kilburn.shared.model_files import ModelRefused

OnProgress = Callable[[str, int, int], None]  # what is being done, how much of it is done, out of how much

_FLOATS = {"F64", "F32", "F16", "BF16"}
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What a file's header says of one tensor."""

    file: str
    dtype: str
    shape: tuple[int, ...]


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that make up the model, in order of name. Raises ModelRefused."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        names = sorted(set(_weight_map(index).values()))
        if missing := [name for name in names if not (folder / name).is_file()]:
            raise ModelRefused(f"{index}: names {missing[0]}, which is not in the folder; fetch the model again")
        return [folder / name for name in names]
    if single.is_file():
        return [single]
    if found := [file.name for pattern in _PICKLES for file in sorted(folder.glob(pattern))]:
        raise ModelRefused(
            f"{folder}: holds {found[0]} but no model.safetensors; pickled weights can run code when they are loaded "
            "and are never read: convert them to safetensors, or name a revision that has them"
        )
    raise ModelRefused(f"{folder}: holds neither model.safetensors nor model.safetensors.index.json")


def _weight_map(index: Path) -> dict[str, str]:
    try:
        entries = json.loads(index.read_text(encoding="utf-8")).get("weight_map")
    except (ValueError, AttributeError) as error:
        raise ModelRefused(f"{index}: not an index of safetensors files") from error
    if not isinstance(entries, dict) or not entries:
        raise ModelRefused(f"{index}: weight_map is missing or empty")
    for name, file in entries.items():
        # A file beside the index, and nothing else: the index is not ours.
        if not isinstance(file, str) or not re.fullmatch(r"[\w-][\w.-]*\.safetensors", file):
            raise ModelRefused(f"{index}: weight_map puts {name} into {file!r}, not a .safetensors file of the folder")
    return entries


class Checkpoint:
    """A folder's tensors. Use as a context: leaving it closes what nobody holds."""

    def __init__(self, folder: Path, on_progress: OnProgress | None = None) -> None:
        self.folder, self._on_progress = folder, on_progress
        self.tensors: dict[str, TensorInfo] = {}
        self._open: dict[str, Any] = {}  # untyped: safetensors says nothing of its handles
        for path in weight_files(folder):
            try:
                handle: Any = safe_open(path, framework="pt")
                names = list(handle.keys())
                infos = [handle.get_slice(name) for name in names]
            except (SafetensorError, OSError) as error:
                raise ModelRefused(f"{path}: not a whole safetensors file ({error}); fetch it again") from error
            for name, info in zip(names, infos, strict=True):
                if name in self.tensors:
                    raise ModelRefused(f"{path}: holds {name}, which {self.tensors[name].file} holds too")
                self.tensors[name] = TensorInfo(path.name, info.get_dtype(), tuple(info.get_shape()))
            self._open[path.name] = handle
        self._left = set(self.tensors)
        self._taken = list[Tensor]()  # since `forget`
        self._check_index()

    def _check_index(self) -> None:
        index = self.folder / "model.safetensors.index.json"
        if not index.is_file():
            return
        for name, file in _weight_map(index).items():
            if name not in self.tensors or self.tensors[name].file != file:
                raise ModelRefused(f"{index}: says that {file} holds {name}, which it does not; fetch the model again")

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._taken.clear()
        self._open.clear()

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def take(self, name: str, *shape: int) -> Tensor:
        """The tensor, a view of its file. Raises ModelRefused if it is absent, taken already or of another shape."""
        info = self._claim(name, shape)
        tensor: Tensor = self._open[info.file].get_tensor(name)
        self._taken.append(tensor)
        return tensor

    def forget(self) -> None:
        """Lets go of the pages of all that was taken. Nothing is lost: whoever reads it again reads the file again."""
        if hasattr(mmap, "MADV_DONTNEED"):
            for tensor in self._taken:
                start = tensor.data_ptr() & -mmap.PAGESIZE
                length = tensor.data_ptr() + tensor.nbytes - start
                # Its answer is of no use: where the advice is not taken, memory stays as it was.
                ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), mmap.MADV_DONTNEED)
        self._taken.clear()

    def apart(self, name: str) -> Tensor:
        """A tensor that was taken, once more, over a mapping of its own: of this one, only what is read through this
        very view becomes resident, and not all that loading has read."""
        handle: Any = safe_open(self.folder / self.tensors[name].file, framework="pt")
        tensor: Tensor = handle.get_tensor(name)
        return tensor

    def _claim(self, name: str, shape: tuple[int, ...]) -> TensorInfo:
        info = self.tensors.get(name)
        if info is None:
            raise ModelRefused(f"{self.folder}: the checkpoint lacks {name}, which its config.json asks for")
        if name not in self._left:
            raise ModelRefused(f"{self.folder}: {name} would be used twice")
        if info.shape != shape:
            raise ModelRefused(
                f"{self.folder}: {name} has the shape {list(info.shape)}, but config.json asks for {list(shape)}"
            )
        if info.dtype not in _FLOATS:
            raise ModelRefused(f"{self.folder}: {name} is {info.dtype}; only {', '.join(sorted(_FLOATS))} are read")
        self._left.discard(name)
        if self._on_progress is not None:
            self._on_progress("loading weights", len(self.tensors) - len(self._left), len(self.tensors))
        return info

    def take_tied(self, name: str, table: Tensor) -> None:
        """Accounts for a second copy of `table` under `name`, if there is one. Raises ModelRefused if it differs."""
        if name in self._left and not torch.equal(self.take(name, *table.shape).to(table.dtype), table):
            raise ModelRefused(
                f"{self.folder}: {name} differs from the embedding that tie_word_embeddings says it is; "
                "set tie_word_embeddings to false in config.json"
            )

    def finish(self, leftovers: Iterable[str]) -> None:
        """Raises ModelRefused unless every tensor was taken or matches a pattern in `leftovers`."""
        patterns = [re.compile(pattern) for pattern in leftovers]
        unused = sorted(name for name in self._left if not any(pattern.fullmatch(name) for pattern in patterns))
        if unused:
            more = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
            raise ModelRefused(
                f"{self.folder}: the checkpoint holds {unused[0]}{more}, which this model has no use for"
            )
