"""The folder of compiled kernels: found again, compiled anew where a file is damaged, done without where there is none.

All by the one kernel that takes least to compile, the one that moves blocks.
"""

import shutil
from pathlib import Path

import pytest
import torch

from kilburn.kernels.contract import Shapes
from kilburn.kernels.cpu.kernels import KERNELS, KINDS, CpuKernels
from kilburn.kernels.cpu.objects import Objects, default_folder
from kilburn.kernels.cpu.team import torch_openmp

KERNEL = ("move_blocks", 0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that holds the kernel already."""
    warm, mine = Objects(), tmp_path / "kernels"
    warm.address(*KERNEL)
    mine.mkdir()
    (name,) = [path.name for path in warm.folder.glob("move_blocks-*") if warm._digest in path.name]
    shutil.copy(warm.folder / name, mine / name)
    return mine


def said_by(folder: Path) -> list[str]:
    """What a process that starts with this folder says, while its kernel does what it should."""
    kernels, said = CpuKernels(torch_openmp(), folder), list[str]()
    kernels._address(*KERNEL, said.append)
    pool = torch.arange(12.0).view(4, 3)
    kernels.copy_blocks(pool, torch.tensor([[1, 3]]))
    assert pool[3].tolist() == [3.0, 4.0, 5.0]
    return said


def test_what_was_compiled_is_found_again(folder: Path) -> None:
    assert said_by(folder) == []


def test_an_empty_folder_is_filled_and_found_again(tmp_path: Path) -> None:
    deep = tmp_path / "not" / "yet" / "there"
    assert said_by(deep) == ["compiling the CPU kernel move_blocks for float32"]
    assert said_by(deep) == []
    (file,) = deep.iterdir()  # and nothing was left beside it
    assert file.suffix == ".o"
    assert deep.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("damage", ["a bit", "the end", "all"])
def test_a_damaged_file_is_compiled_anew(folder: Path, damage: str) -> None:
    (file,) = folder.iterdir()
    whole = file.read_bytes()
    at = len(whole) // 2
    flipped = whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]
    file.write_bytes({"a bit": flipped, "the end": whole[:-100], "all": b""}[damage])
    assert said_by(folder) == ["compiling the CPU kernel move_blocks for float32"]
    assert list(folder.iterdir()) == [file]
    assert said_by(folder) == []


def test_a_folder_that_cannot_be_written_is_done_without_and_that_is_said(tmp_path: Path) -> None:
    (tmp_path / "a file").write_text("in the way")
    first, second = said_by(tmp_path / "a file" / "kernels")
    assert first.startswith("compiling the CPU kernel")
    assert "cannot be written" in second
    assert "KILBURN_CACHE" in second


def test_the_environment_names_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KILBURN_CACHE", str(tmp_path))
    assert default_folder() == tmp_path / "kernels"
    monkeypatch.delenv("KILBURN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_folder() == tmp_path / "xdg" / "kilburn" / "kernels"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert default_folder() == tmp_path / "home" / ".cache" / "kilburn" / "kernels"


@pytest.mark.parametrize("dtype", [*KINDS, torch.float64], ids=str)
def test_after_warm_up_nothing_is_compiled(dtype: torch.dtype) -> None:
    shapes, said = Shapes(64, 128, 4, 2, 16, 16, dtype), list[str]()
    CpuKernels(torch_openmp()).warm_up(shapes)
    again = CpuKernels(torch_openmp())
    again.warm_up(shapes, said.append)
    assert said == []
    assert {name for name, _ in again._addresses} == (set() if dtype == torch.float64 else set(KERNELS))


def test_no_thread_of_torch_is_left_out() -> None:
    """This machine's torch brings its OpenMP library, so that there is one pool of threads and not two."""
    assert torch_openmp() is not None
    assert "OpenMP" in CpuKernels(torch_openmp()).name
