"""What a fresh installation needs before its first start, made once: a model that is ready, and every key.

    models/      the prepared model, and `current`, a link to it
    controller/  CURVE keys and allow-list, api.keys, the server's key, controller.toml                 the controller's
    worker/      worker.key                                                                               the workers'
    redis/  prometheus/  grafana/       what each of these is to know, and nothing else
    client/api.key                      for whoever asks; where it lies is printed, and never the key: output is logged

Each folder is one volume that only its owner mounts, read-only: that is what keeps one service's secrets from the
others. So files of services that run as other users may be readable to all.

Running this again draws no secret anew and keeps every line of api.keys: operators write theirs there. A secret that is
missing is drawn, and its line in api.keys takes the place of the old one. Derived, and so written each time: `current`,
controller.toml and redis.conf, which follow from the settings and the secrets.

What this file does not know: containers, save how the key is read where compose.yaml runs it.
"""

import hashlib
import os
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path

from kilburn.controller.link import new_keys
from kilburn.controller.prepared import prepared_folder, public_name
from kilburn.shared.config import ProvisionSettings
from kilburn.shared.keys import ALLOW_FILE, CONTROLLER_FILE, SettingError

WORKER = "worker"
FOR_OWNER, FOR_OTHERS = 0o600, 0o644
SERVER_KEY_BYTES = 32
DERIVED = "# written anew by each kilburn provision"


def run_provision(settings: ProvisionSettings) -> int:
    """Makes what is missing. Raises SettingError, ModelRefused."""
    root = Path(settings.into)
    for name in ("models", "controller", WORKER, "redis", "prometheus", "grafana", "client"):
        try:
            (root / name).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SettingError(f"--into {root}: {error.strerror}; name a folder that may be written") from error
    os.environ["KILBURN_CACHE"] = str(root / "models")  # where conversions go
    model = _model(settings, root / "models")
    print(f"model       {settings.model}: {model}")
    _curve_keys(root)
    print(f"keys        {root / 'controller'}, {root / WORKER}")
    key = _secrets(root, settings)
    print(f"API key     in {key}; of compose.yaml: docker compose run --rm prepare cat {key}")
    return 0


def _model(settings: ProvisionSettings, models: Path) -> Path:
    """The prepared model, under a name that does not depend on which it is."""
    folder = prepared_folder(settings.model, settings.revision)
    if not folder.resolve().is_relative_to(models.resolve()):
        ours = models / "given" / folder.name  # it lies where the services cannot see it
        if not ours.exists():
            part = ours.with_name(f"{ours.name}.part")
            shutil.rmtree(part, ignore_errors=True)
            shutil.copytree(folder, part)
            part.rename(ours)
        folder = ours
    current, fresh = models / "current", models / "current.new"
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(folder.resolve().relative_to(models.resolve()))
    fresh.replace(current)
    return folder


def _curve_keys(root: Path) -> None:
    """Workers share one key, so that there may be any number of them; their names tell them apart."""
    controller, worker = root / "controller", root / WORKER
    made = worker / f"{WORKER}.key"
    if all(path.exists() for path in (controller / CONTROLLER_FILE, controller / ALLOW_FILE, made)):
        return
    for stale in (controller / CONTROLLER_FILE, controller / ALLOW_FILE, controller / made.name, made):
        stale.unlink(missing_ok=True)
    new_keys(controller, [WORKER])
    _write(made, (controller / made.name).read_text(), FOR_OWNER)
    (controller / made.name).unlink()


def _secrets(root: Path, settings: ProvisionSettings) -> Path:
    """API keys, passwords, and the settings that carry them. Returns where the client's key lies."""
    controller, client = root / "controller", root / "client" / "api.key"
    scraper = root / "prometheus" / "scrape.key"
    ours = ((client, FOR_OWNER, "operator", "admin"), (scraper, FOR_OTHERS, "prometheus", "metrics"))
    _api_keys(controller / "api.keys", ours)
    _drawn(root / "grafana" / "admin.password", FOR_OTHERS)
    password = _drawn(root / "redis" / "password", FOR_OTHERS)
    _write(root / "redis" / "redis.conf", f'{DERIVED}\nrequirepass {password}\nsave ""\nappendonly no\n', FOR_OTHERS)
    if not (controller / "server.key").exists():
        _write(controller / "server.key", secrets.token_hex(SERVER_KEY_BYTES), FOR_OWNER)
    name = settings.served_model_name or public_name(settings.model)
    redis = f'redis = "redis://:{password}@{settings.redis_host}:{settings.redis_port}/0"'
    _write(controller / "controller.toml", f'{DERIVED}\nserved_model_name = "{name}"\n{redis}\n', FOR_OWNER)
    return client


def _api_keys(keys: Path, ours: Sequence[tuple[Path, int, str, str]]) -> None:
    """Keys in their files, (file, mode, name, role), and their digests among `keys`, whose other lines stay.

    Where both are there nothing is done: a line that somebody took out or changed is not put back.
    """
    is_new = not keys.exists()
    lines = [] if is_new else keys.read_text(encoding="utf-8").splitlines()
    missing = [each for each in ours if is_new or not each[0].exists()]
    if not missing:
        return
    for file, mode, name, role in missing:
        digest = hashlib.sha256(_drawn(file, mode).encode()).hexdigest()
        lines = [line for line in lines if not line.strip().startswith(f"{name}:")]
        lines.append(f"{name}:sha256${digest}:{role}")
    _write(keys, "\n".join([*lines, ""]), FOR_OWNER)


def _drawn(path: Path, mode: int) -> str:
    """A secret that is kept in a file, drawn the first time."""
    if not path.exists():
        _write(path, f"sk-{secrets.token_urlsafe(32)}", mode)
    return path.read_text().strip()


def _write(path: Path, text: str, mode: int) -> None:
    """Whole or not at all, and never readable to more than `mode` says."""
    fresh = path.with_name(f"{path.name}.new")
    fresh.unlink(missing_ok=True)
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        os.fchmod(file.fileno(), mode)
        file.write(text)
    fresh.replace(path)
