"""What pyproject.toml and constraints.txt say is what there is."""

import re
import tomllib

from tests.architecture.source import PARTS, ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def plain(name: str) -> str:
    """A distribution's name as the registry compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_folder_of_code_is_a_package_and_every_package_a_folder() -> None:
    folders = {
        ".".join(("kilburn", *path.parent.relative_to(ROOT).parts))
        for part in PARTS
        for path in (ROOT / part).rglob("*.py")
    }
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == folders
    for package in folders:
        assert (ROOT.joinpath(*package.split(".")[1:]) / "__init__.py").exists(), package


def test_what_is_served_as_it_lies_is_packed_with_the_code() -> None:
    for package, patterns in PROJECT["tool"]["setuptools"]["package-data"].items():
        folder = ROOT.joinpath(*package.split(".")[1:])
        packed = {file for pattern in patterns for file in folder.glob(pattern)}
        assert packed == {file for file in folder.iterdir() if file.is_file() and file.suffix not in (".py", ".pyc")}


def test_every_dependency_is_pinned() -> None:
    wanted = [*PROJECT["project"]["dependencies"], *PROJECT["build-system"]["requires"]]
    for extra in PROJECT["project"]["optional-dependencies"].values():
        wanted += extra
    names = {plain(re.split(r"[^A-Za-z0-9._-]", line)[0]) for line in wanted}
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").split("\n")
    pinned = {plain(line.split("==")[0]) for line in lines if "==" in line}
    assert names - pinned == set()
    assert len(pinned) == len([line for line in lines if line.strip()]), "a line of constraints.txt is no pin"
