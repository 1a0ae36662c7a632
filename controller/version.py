"""Which Kilburn this is, as its package says."""

from importlib import metadata


def version() -> str:
    try:
        return metadata.version("kilburn")
    except metadata.PackageNotFoundError:  # run from a tree that was never installed
        return "(not installed)"
