"""Keys, and that no route is open but health."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from kilburn.controller.app import running_controller
from kilburn.controller.auth import KeyFault, Keyring, Role, Tenant, read_keys
from kilburn.controller.page.routes import page_files
from kilburn.shared.config import ControllerSettings
from kilburn.shared.keys import SettingError
from tests.api.vocabularies import write_folder
from tests.api.world import World, served

ALICE, ROOT, SCRAPER = "sk-alice-0001", "sk-root-00002", "sk-scraper-03"


def test_keys_from_file_and_environment(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    digest = hashlib.sha256(b"sk-hashed-key").hexdigest()
    lines = [
        "# ours", "", f"alice:{ALICE}", f"root:{ROOT}:admin", f"  ops:sha256${digest}:admin", f"p:{SCRAPER}:metrics"
    ]  # fmt: skip
    file.write_text("\n".join(lines))
    ring = read_keys(str(file), "sk-inline-key, bob:sk-bob-00003")
    assert ring.tenant_of(ALICE) == Tenant("alice")
    assert ring.tenant_of(ROOT) == Tenant("root", Role.ADMIN)
    assert ring.tenant_of("sk-hashed-key") == Tenant("ops", Role.ADMIN)
    assert ring.tenant_of(SCRAPER) == Tenant("p", Role.METRICS)
    assert ring.tenant_of("sk-inline-key") == Tenant("default")
    assert ring.tenant_of("sk-bob-00003") == Tenant("bob")
    for wrong in ("", ALICE[:-1], ALICE + "x", ALICE.upper(), digest, f"sha256${digest}", "\udcff"):
        assert ring.tenant_of(wrong) is None
    assert ALICE not in repr(ring)
    assert read_keys("", "").is_empty


@pytest.mark.parametrize(
    ("inline", "complaint"),
    [
        ("short", "entry 1: a key has at least 8"),
        ("a:b:c:d", "entry 1 must be"),
        ("good-key-1,a b:good-key-2", "entry 2: a tenant's name"),
        ("alice:good-key-1:root", "entry 1 must be KEY, TENANT:KEY, TENANT:KEY:admin or NAME:KEY:metrics"),
        ("sha256$abc", "64 hexadecimal"),
        ("alice:with blank", "no blanks"),
    ],
)
def test_unreadable_keys_are_named_by_place_and_never_shown(inline: str, complaint: str) -> None:
    with pytest.raises(KeyFault, match=complaint) as caught:
        read_keys("", inline)
    assert "good-key" not in str(caught.value)


def test_a_file_without_keys_is_a_fault(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("# none\n")
    with pytest.raises(KeyFault, match="holds no key"):
        read_keys(str(tmp_path / "keys"), "")
    with pytest.raises(KeyFault, match="cannot be read"):
        read_keys(str(tmp_path / "none"), "")


class Watched(bytes):
    """A digest that may not be compared by ==, which stops at the first difference."""

    __hash__ = bytes.__hash__

    def __eq__(self, other: object) -> bool:
        raise AssertionError("compared by ==")


class Walked(tuple[tuple[bytes, Tenant], ...]):
    """Entries that know how far a search went."""

    num_seen = 0

    def __iter__(self) -> Iterator[tuple[bytes, Tenant]]:
        for entry in super().__iter__():
            self.num_seen += 1
            yield entry


@pytest.mark.parametrize(("key", "name"), [(ALICE, "0"), (ROOT, "1"), ("other", None)])
def test_all_keys_are_always_compared_and_without_leaving_early(key: str, name: str | None) -> None:
    digests = [hashlib.sha256(each.encode()).digest() for each in (ALICE, ROOT)]
    entries = Walked((Watched(digest), Tenant(str(i))) for i, digest in enumerate(digests))
    found = Keyring(entries).tenant_of(key)
    assert (found.name if found is not None else None) == name
    assert entries.num_seen == 2


def every_route(world: World) -> list[tuple[str, str]]:
    app = world.running.app
    return [
        (route.method, route.resource.canonical.replace("{model}", "toy"))
        for route in app.router.routes()
        if route.resource is not None
    ]


async def test_no_route_is_open_but_health(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"alice:{ALICE}\nroot:{ROOT}:admin\n")
    async with served(tmp_path, settings={"api_key_file": str(keys)}) as world:
        routes = every_route(world)
        assert len(routes) >= 8
        open_routes = set()
        for method, path in [*routes, ("GET", "/nowhere"), ("POST", "/v1/nowhere"), ("DELETE", "/v1/completions")]:
            for headers in (
                {},
                {"Authorization": f"Bearer {ALICE}x"},
                {"Authorization": ALICE},
                {"Authorization": f"Basic {ALICE}"},
                {"Host": "/health", "X-Forwarded-For": "127.0.0.1", "X-Original-URL": "/health"},
            ):
                async with world.session.request(method, world.url + path, headers=headers) as response:
                    if response.status != 401:
                        open_routes.add((method, path, response.status))
                    elif method != "HEAD":
                        told = (await response.json())["error"]
                        is_anthropics = path.startswith("/v1/messages")
                        assert told.get("code") == (None if is_anthropics else "invalid_api_key")
                        assert (told["type"] == "authentication_error") is is_anthropics
        probes = {"/health", "/ready", "/live", "/openapi.json", "/docs"}
        page = set(page_files())  # the block map's files hold no figures; its feed is not among them
        assert open_routes == {(method, path, 200) for method, path in routes if path in probes | page}
        assert "/map/events" not in page
        for key in (ALICE, ROOT):
            headers = {"Authorization": f"Bearer {key}"}
            body = {"prompt": "x", "max_tokens": 1}
            assert (await world.post("/v1/completions", body, headers=headers))[0] == 200
            async with world.session.get(world.url + "/nowhere", headers=headers) as response:
                assert response.status == 404
        for path in (
            "//health",
            "/health/../v1/models",
            "/health/%2e%2e/v1/models",
            "/v1/models?x=/health",
            "/v1/models#/health",
        ):
            async with world.session.get(world.url + path) as response:
                assert response.status in (401, 200)
                assert "object" not in await response.json()


async def test_figures_of_everybody_are_for_operators_and_for_keys_that_open_nothing_else(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"alice:{ALICE}\nroot:{ROOT}:admin\nprometheus:{SCRAPER}:metrics\n")
    async with served(tmp_path, settings={"api_key_file": str(keys)}) as world:

        async def asked(key: str, method: str, path: str) -> tuple[int, str]:
            headers = {"Authorization": f"Bearer {key}"}
            async with world.session.request(method, world.url + path, headers=headers) as response:
                return response.status, await response.text()

        assert (await asked(ROOT, "GET", "/metrics"))[0] == 200
        status, text = await asked(SCRAPER, "GET", "/metrics")
        assert (status, "kilburn_blocks" in text) == (200, True)
        status, text = await asked(ALICE, "GET", "/metrics")
        assert (status, "NAME:KEY:metrics" in text, "kilburn_blocks" in text) == (403, True, False)
        opened = {"/health", "/ready", "/live", "/openapi.json", "/docs", "/metrics", *page_files()}
        for method, path in [route for route in every_route(world) if route[1] not in opened and route[0] != "HEAD"]:
            status, text = await asked(SCRAPER, method, path.replace("{name}", "tone").replace("{id}", "cmpl-1"))
            assert (status, "/metrics and nothing else" in text) == (403, True), path
        assert (await asked(SCRAPER, "GET", "/nowhere"))[0] == 404


async def test_beyond_loopback_keys_are_needed(tmp_path: Path) -> None:
    write_folder(tmp_path)
    settings = ControllerSettings(model=str(tmp_path), host="0.0.0.0", port=0, bind="tcp://127.0.0.1:0")
    with pytest.raises(SettingError, match="--api-key-file"):
        async with running_controller(settings):
            pass


def test_a_key_may_have_a_weight() -> None:
    ring = read_keys("", "alice:sk-alice-0001:weight=3,root:sk-root-00001:admin:weight=0.5,bob:sk-bob-000001")
    assert ring.tenant_of("sk-alice-0001") == Tenant("alice", weight=3.0)
    assert ring.tenant_of("sk-root-00001") == Tenant("root", Role.ADMIN, weight=0.5)
    assert ring.tenant_of("sk-bob-000001") == Tenant("bob")
    for wrong in ("weight=0", "weight=-1", "weight=much", "weight=1e9", "weight="):
        with pytest.raises(KeyFault, match="entry 1: a weight is a number above 0"):
            read_keys("", f"alice:sk-alice-0001:{wrong}")


@pytest.mark.parametrize(
    ("host", "is_ours"),
    [
        ("127.0.0.1", True),
        ("127.0.0.1:8000", True),
        ("localhost:8000", True),
        ("LOCALHOST", True),
        ("kilburn.localhost:1", True),
        ("[::1]:8000", True),
        ("evil.example", False),
        ("localhost.evil.example:8000", False),
        ("127.0.0.1.evil.example", False),
        ("user@evil.example", False),
        ("localhost@evil.example", False),
        ("192.168.0.7:8000", False),
        ("[::1", False),
        ("", False),
    ],
)
async def test_without_keys_no_other_name_may_point_here(tmp_path: Path, host: str, is_ours: bool) -> None:
    """A page elsewhere may have its name resolved to 127.0.0.1; the browser then sends that name."""
    async with served(tmp_path) as world:
        for path in ("/v1/models", "/metrics", "/map/events", "/nowhere"):
            async with world.session.get(world.url + path, headers={"Host": host}) as response:
                assert (response.status == 403) is not is_ours, path
        async with world.session.get(world.url + "/health", headers={"Host": host}) as response:
            assert response.status == 200


@pytest.mark.parametrize(
    ("origin", "is_ours"),
    [
        ("http://127.0.0.1:8000", True),
        ("http://localhost:3000", True),
        ("https://evil.example", False),
        ("https://localhost.evil.example", False),
        ("null", False),
        ("", False),
        ("http://[::1", False),
    ],
)
async def test_without_keys_no_page_of_elsewhere_may_ask(tmp_path: Path, origin: str, is_ours: bool) -> None:
    """A browser sends a form of any page anywhere, and says of which page it was."""
    async with served(tmp_path) as world:
        headers = {"Origin": origin, "Content-Type": "text/plain"}
        body = b'{"prompt": "x", "max_tokens": 1}'
        async with world.session.post(world.url + "/v1/completions", data=body, headers=headers) as response:
            assert (response.status == 403) is not is_ours
            assert "Access-Control-Allow-Origin" not in response.headers


async def test_with_keys_any_name_may(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"alice:{ALICE}\n")
    async with served(tmp_path, settings={"api_key_file": str(tmp_path / "keys")}) as world:
        headers = {"Host": "models.example", "Authorization": f"Bearer {ALICE}"}
        async with world.session.get(world.url + "/v1/models", headers=headers) as response:
            assert response.status == 200
