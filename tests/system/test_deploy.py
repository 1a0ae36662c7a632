"""The manifests of deploy/: each is what Kubernetes' own schema says, and all of them fit together and the product."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from kilburn.shared.config import ControllerSettings, GatewaySettings, ProvisionSettings, WorkerSettings, load

DEPLOY = Path(__file__).parents[2] / "deploy"
VERSION = "1.32"
SETTINGS = {
    "controller": ControllerSettings,
    "gateway": GatewaySettings,
    "worker": WorkerSettings,
    "provision": ProvisionSettings,
}
Manifest = dict[str, Any]


def read(path: Path) -> list[Manifest]:
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


FILES = sorted(path for path in DEPLOY.rglob("*.yaml") if path.name != "kustomization.yaml")
KUSTOMIZATIONS = sorted(DEPLOY.rglob("kustomization.yaml"))
ALL = [(path, manifest) for path in FILES for manifest in read(path)]
NAMES = [f"{path.relative_to(DEPLOY)}: {manifest['kind']} {manifest['metadata']['name']}" for path, manifest in ALL]


def templates() -> Iterator[tuple[Manifest, Manifest]]:
    """(what makes pods, their template)."""
    for _, manifest in ALL:
        if manifest["kind"] in ("Deployment", "StatefulSet", "Job"):
            yield manifest, manifest["spec"]["template"]


def containers() -> Iterator[tuple[Manifest, Manifest]]:
    """(pod spec, container)."""
    for _, template in templates():
        for container in template["spec"]["containers"]:
            yield template["spec"], container


def of_kind(kind: str) -> list[Manifest]:
    return [manifest for _, manifest in ALL if manifest["kind"] == kind]


@pytest.mark.parametrize("manifest", [manifest for _, manifest in ALL], ids=NAMES)
def test_kubernetes_schema_takes_it(manifest: Manifest) -> None:
    kubernetes_validate.validate(manifest, VERSION, strict=True)


def test_the_schema_is_strict() -> None:
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(of_kind("Service")[0] | {"specs": {}}, VERSION, strict=True)


def test_every_file_is_part_of_the_whole() -> None:
    used: set[Path] = set()
    for path in KUSTOMIZATIONS:
        (wanted,) = read(path)
        for name in [*wanted.get("resources", ()), *wanted.get("components", ())]:
            found = (path.parent / name).resolve()
            assert found.exists(), f"{path}: {name}"
            used.add(found / "kustomization.yaml" if found.is_dir() else found)
    assert used == {*map(Path.resolve, FILES), *(p.resolve() for p in KUSTOMIZATIONS)} - {
        (DEPLOY / "kustomization.yaml").resolve()
    }


def test_each_cell_has_a_letter_of_its_own_everywhere() -> None:
    for path in (DEPLOY / "cells").rglob("kustomization.yaml"):
        (cell,), letter = read(path), path.parent.name
        assert cell["nameSuffix"] == f"-{letter}"
        assert cell["labels"][0] == {"pairs": {"cell": letter}, "includeSelectors": True, "includeTemplates": True}
        values = [yaml.safe_load(patch["patch"])[0]["value"] for patch in cell.get("patches", ())]
        assert values == [letter] * len(values)
        assert len(values) == ("../../workers" in cell["components"])  # the metric that its workers are scaled by


def as_given(value: str) -> str:
    """A variable's value with what Kubernetes puts into it."""
    return value.replace("$(POD_IP)", "10.0.0.7").replace("$(CELL)", "a")


def test_every_variable_is_a_setting_that_its_command_takes() -> None:
    for _, container in containers():
        match container.get("command"):
            case ["kilburn", command, model, *words]:
                pass
            case _:
                continue
        given = {entry["name"]: as_given(entry.get("value", "0")) for entry in container.get("env", ())}
        given.pop("KILBURN_CONFIG", None)  # a file that is not here
        if command == "gateway":
            given["KILBURN_REDIS"] = "redis://redis"  # which is in it
        settings = load(SETTINGS[command], [model, *words], given, "model")
        assert getattr(settings, "host", "0.0.0.0") == "0.0.0.0"
        assert getattr(settings, "advertise", "http://10.0.0.7:8000") == "http://10.0.0.7:8000"


def test_ports_volumes_and_labels_fit_together() -> None:
    ports = {port["name"] for _, container in containers() for port in container.get("ports", ())}
    labels = [template["metadata"]["labels"] for _, template in templates()]
    apps = {label["app"] for label in labels}
    for manifest, template in templates():
        if manifest["kind"] != "Job":
            assert manifest["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    for service in of_kind("Service"):
        assert any(service["spec"]["selector"].items() <= label.items() for label in labels)
        assert all(port["targetPort"] in ports for port in service["spec"].get("ports", ()))
    for spec, container in containers():
        own = {port["name"] for port in container.get("ports", ())}
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            asked = container.get(probe, {})
            assert asked.get("httpGet", asked.get("tcpSocket", {"port": None}))["port"] in {*own, None}
        mounted = {mount["name"] for mount in container.get("volumeMounts", ())}
        assert mounted == {volume["name"] for volume in spec["volumes"]}
    for policy in of_kind("NetworkPolicy"):
        for rule in policy["spec"].get("ingress", ()):
            assert all(port["port"] in ports for port in rule.get("ports", ()))
        named = re.findall(r"'app': '(\w+)'|'values': \[([^]]*)\]", str(policy["spec"]))
        assert {word for pair in named for word in re.findall(r"\w+", " ".join(pair))} <= apps


def test_pods_may_do_nothing_that_they_need_not() -> None:
    for spec, container in containers():
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is False
        assert spec["enableServiceLinks"] is False  # no variables but ours
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert "memory" in container["resources"]["limits"]


def test_a_group_has_a_pod_for_each_rank() -> None:
    (group,) = [m for m in of_kind("StatefulSet") if m["metadata"]["name"] == "group"]
    (container,) = group["spec"]["template"]["spec"]["containers"]
    values = {entry["name"]: entry for entry in container["env"]}
    assert int(values["KILBURN_TP"]["value"]) == group["spec"]["replicas"]
    assert "pod-index" in values["KILBURN_RANK"]["valueFrom"]["fieldRef"]["fieldPath"]
    assert group["spec"]["podManagementPolicy"] == "Parallel"
    (service,) = [m for m in of_kind("Service") if m["metadata"]["name"] == group["spec"]["serviceName"]]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True


def test_secrets_are_named_and_never_written_here() -> None:
    guide = (DEPLOY / "README.md").read_text(encoding="utf-8")
    made = set(re.findall(r"create secret generic (\S+)", guide))
    wanted = {
        volume["secret"]["secretName"]
        for _, template in templates()
        for volume in template["spec"]["volumes"]
        if "secret" in volume
    }
    assert wanted == made
    assert of_kind("Secret") == []


def test_images_are_those_of_the_dockerfile() -> None:
    stages = set(re.findall(r"^FROM runtime AS (\w+)$", (DEPLOY.parent / "Dockerfile").read_text(), re.MULTILINE))
    (whole,) = read(DEPLOY / "kustomization.yaml")
    images = {container["image"] for _, container in containers() if container["image"].startswith("kilburn-")}
    assert images == {f"kilburn-{stage}" for stage in stages} == {image["name"] for image in whole["images"]}
