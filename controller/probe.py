"""`kilburn health URL`: asks a server how it is, for those who have no curl. Status 0 where it is well, 1 where not."""

import json
import sys
import urllib.error
import urllib.request

from kilburn.shared.config import HealthSettings
from kilburn.shared.keys import SettingError

LONGEST_BYTES = 4096


def run_health(settings: HealthSettings) -> int:
    if not settings.url.startswith(("http://", "https://")):
        raise SettingError(f"--url {settings.url}: give the address of the REST API, as http://127.0.0.1:8000")
    url = f"{settings.url.rstrip('/')}/{settings.probe}"
    try:
        with urllib.request.urlopen(url, timeout=settings.timeout_seconds) as response:
            print(response.read(LONGEST_BYTES).decode(errors="replace"))
            return 0
    except urllib.error.HTTPError as error:
        print(_reason(error.read(LONGEST_BYTES)) or f"status {error.code}", file=sys.stderr)
    except OSError as error:
        print(f"{url} does not answer: {error}", file=sys.stderr)
    return 1


def _reason(body: bytes) -> str:
    try:
        return str(json.loads(body)["reason"])
    except (ValueError, KeyError, TypeError):
        return ""
