"""From what the user calls a model to a folder that can be served.

A conversion or a download is the work of another program (`python -m kilburn.worker.prepare`), which knows tensors and
shows its progress; here is only known whether it is needed, and where its result lies.
"""

import subprocess
import sys
from pathlib import Path

from kilburn.shared import model_files
from kilburn.shared.model_files import ModelRefused


def prepared_folder(model: str, revision: str) -> Path:
    """The folder to serve `model` from; prepares it first where that was never done. Raises ModelRefused."""
    folder = model_files.prepared_folder(model, revision or None)
    if folder is not None:
        return folder
    command = [sys.executable, "-m", "kilburn.worker.prepare", model, *(["--revision", revision] if revision else [])]
    # Its progress is on stderr; the folder that it prints is looked up anew, by the same rule as the next time.
    status = subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode
    folder = model_files.prepared_folder(model, revision or None) if status == 0 else None
    if folder is None:
        raise ModelRefused(f"MODEL {model}: could not be prepared (status {status}); the reason is above")
    return folder


def public_name(model: str) -> str:
    """What clients call it unless told otherwise: the end of its path or id."""
    return Path(model).name.removesuffix(".gguf")
