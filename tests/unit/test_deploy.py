"""compose.yaml and the Kubernetes manifests: names, ports, labels and settings agree."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from headwater.config import Config, TlsConfig, load_config
from headwater.gateway import gateway_command
from headwater.gateway_protection import Protection
from headwater.rpc.tls import check_listen

ROOT = Path(__file__).parents[2]
BASE = ROOT / "deploy" / "kubernetes" / "base"
GPU = ROOT / "deploy" / "kubernetes" / "gpu"
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))
DECODES = ("decode", "decode-gpu", "decode-gpu2", "decode-gpus")
PREFILLS = ("prefill", "prefill-gpu", "prefill-gpu2", "prefill-gpus")
OURS = (*DECODES, *PREFILLS, "router", "gateway", "model")


def documents(folder: Path) -> dict[str, dict[str, Any]]:
    """By kind and name."""
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text(encoding="utf-8"))
    found = {}
    for file in kustomization["resources"]:
        for each in yaml.safe_load_all((folder / file).read_text(encoding="utf-8")):
            found[f"{each['kind']}/{each['metadata']['name']}"] = each
    return found


def pod_of(name: str) -> dict[str, Any]:
    template: dict[str, Any] = documents(BASE)[name]["spec"]["template"]
    return template


def with_defaults(text: str) -> str:
    """Fills in the defaults of compose's variables."""
    return re.sub(r"\$\{\w+:?-([^}]*)\}", r"\1", text)


def settings_of(service: str) -> Config:
    environment = COMPOSE["services"][service]["environment"]
    return load_config(
        config_file=None, environ={key: with_defaults(value) for key, value in environment.items()}
    )


@pytest.mark.parametrize("service", OURS)
def test_compose_sets_what_there_is_to_set(service: str) -> None:
    settings_of(service)


def test_compose_leads_every_process_to_the_next() -> None:
    services = COMPOSE["services"]

    def leads_to(address: str, listen: str) -> None:
        host, _, port = with_defaults(address).rpartition(":")
        assert host in services
        assert listen == f"0.0.0.0:{port}"

    router = settings_of("router").router
    leads_to(router.prefill_address, settings_of("prefill").prefill.listen)
    leads_to(router.decode_address, settings_of("decode").decode.listen)
    leads_to(settings_of("gateway").gateway.routers, router.listen)
    for name, variants in (("decode", DECODES), ("prefill", PREFILLS)):
        for service in variants:
            config = settings_of(service)
            if name == "prefill":
                leads_to(config.prefill.decode_address, settings_of("decode").decode.listen)
            assert getattr(config, name).listen == getattr(settings_of(name), name).listen
            # Whichever profile it is of, others find it under the same name.
            assert services[service]["networks"]["default"]["aliases"] == [name]
            assert (getattr(config.gpu, name) == "off") == (service == name)


@pytest.mark.parametrize("service", [*DECODES, *PREFILLS, "router", "gateway"])
def test_compose_lets_its_containers_talk_to_each_other(service: str) -> None:
    config = settings_of(service)
    listen = getattr(config, service.partition("-")[0]).listen
    check_listen("listen", listen, config.tls, is_encrypted=False)


def test_compose_publishes_on_loopback_only() -> None:
    published = {
        name: [with_defaults(port) for port in each["ports"]]
        for name, each in COMPOSE["services"].items()
        if "ports" in each
    }
    assert published["router"] == ["127.0.0.1:50050:50050"]
    assert published["gateway"] == ["127.0.0.1:8000:8000"]
    assert all(port.startswith("127.0.0.1:") for ports in published.values() for port in ports)
    assert not {"decode", "prefill", "memory"} & published.keys()


def test_compose_shares_memory_and_nothing_else() -> None:
    services = COMPOSE["services"]
    assert services["memory"]["ipc"] == "shareable"
    joined = {name for name, each in services.items() if each.get("ipc") == "service:memory"}
    assert joined == {*DECODES, *PREFILLS}
    for name in OURS:
        each = services[name]
        assert each["read_only"]
        assert each["cap_drop"] == ["ALL"]
        assert each["init"]
        assert with_defaults(each["user"]) == "10001:10001"
        assert each.get("cap_add", []) == (["SYS_NICE"] if name in joined else [])
        for volume in each.get("volumes", []):
            if ":/models" in volume:
                assert volume.endswith(":ro") or name == "model"


def test_profiles_differ_in_the_engines() -> None:
    services = COMPOSE["services"]
    assert (ROOT / ".env").read_text(encoding="utf-8").splitlines()[-1] == "COMPOSE_PROFILES=cpu"
    always = {name for name, each in services.items() if "profiles" not in each}
    assert always == {"memory", "model", "router", "gateway"}
    for variants in (DECODES, PREFILLS):
        profiles = [services[name]["profiles"] for name in variants]
        assert profiles == [["cpu"], ["gpu"], ["gpu2"], ["gpus"]]
    devices = {
        name: each["deploy"]["resources"]["reservations"]["devices"][0]
        for name, each in services.items()
        if "deploy" in each
    }
    nvidia = {"driver": "nvidia", "capabilities": ["gpu"]}
    assert devices == {
        "decode-gpu": {**nvidia, "count": 1},
        "prefill-gpu": {**nvidia, "count": 1},
        "decode-gpu2": {**nvidia, "device_ids": ["1"]},
        "prefill-gpu2": {**nvidia, "device_ids": ["0"]},
        "decode-gpus": {**nvidia, "count": "all"},
        "prefill-gpus": {**nvidia, "count": "all"},
    }


def test_who_shares_a_gpu_leaves_the_other_its_part() -> None:
    """Without gpu.decode_vram_gib decode takes half of a GPU that prefill uses, or all of one."""
    shared = {name: settings_of(name).gpu.prefill != "off" for name in DECODES[1:]}
    assert shared == {"decode-gpu": True, "decode-gpu2": False, "decode-gpus": True}
    assert settings_of("prefill-gpus").gpu.prefill_devices == "auto"


def test_every_variable_is_explained() -> None:
    used = set(re.findall(r"\$\{(\w+)", (ROOT / "compose.yaml").read_text(encoding="utf-8")))
    example = (ROOT / ".env.example").read_text(encoding="utf-8")
    explained = set(re.findall(r"^#(\w+)=", example, re.MULTILINE))
    assert explained == used | {"COMPOSE_PROFILES"}


def test_images_have_the_same_names_everywhere() -> None:
    dockerfile = (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^FROM \S+ AS (\S+)$", dockerfile, re.MULTILINE))
    composed = {}
    for name in (*OURS, "memory"):
        each = COMPOSE["services"][name]
        image, _, version = with_defaults(each["image"]).partition(":")
        assert image == f"headwater-{each['build']['target']}"
        assert each["build"]["target"] in targets
        composed[image] = version
    for folder in (BASE, GPU):
        kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text(encoding="utf-8"))
        for image in kustomization["images"]:
            assert composed[image["name"]] == image["newTag"]
    named = {
        container["image"]
        for kind in ("DaemonSet/headwater-node", "Deployment/headwater-gateway")
        for container in pod_of(kind)["spec"]["containers"]
        + pod_of(kind)["spec"].get("initContainers", [])
    }
    assert named <= composed.keys()


def test_images_install_nothing_but_python() -> None:
    dockerfile = (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8")
    found = re.findall(r"^FROM (\S+) AS (\S+)\n(.*?)(?=^FROM|\Z)", dockerfile, re.M | re.S)
    stages = {name: (base, text) for base, name, text in found}
    for image in ("router", "gateway", "engine-cpu", "engine-gpu"):
        packages, stage = [], image
        while stage in stages:
            stage, text = stages[stage]
            packages += re.findall(r"apt-get install -y --no-install-recommends ([^\\\n]+)", text)
            assert "pip install" not in text
        assert [each.strip() for each in packages] == ["python3"], image


def test_the_nodes_containers_share_memory_and_settings() -> None:
    spec = pod_of("DaemonSet/headwater-node")["spec"]
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
    # With them, names of services would turn up as settings.
    assert spec["enableServiceLinks"] is False
    config = load_config(config_file=str(BASE / "config.toml"), environ={})
    ports = {}
    for container in [*spec["containers"], *spec["initContainers"]]:
        mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
        assert {mount["name"] for mount in mounts.values()} <= volumes.keys()
        assert ("/dev/shm" in mounts) == (container["name"] in ("decode", "prefill"))
        [variable] = container["env"]
        path = Path(variable["value"])
        assert variable["name"] == "HEADWATER_CONFIG"
        assert mounts[str(path.parent)]["name"] == "config"
        assert (BASE / path.name).is_file()
        for probe in ("startupProbe", "livenessProbe"):
            if "exec" in container.get(probe, {}):
                command = container[probe]["exec"]["command"]
                assert command == ["headwater", "health", container["name"]]
        ports.update({port["name"]: port["containerPort"] for port in container.get("ports", [])})
    first = int(config.telemetry.prometheus_listen.rpartition(":")[2])
    assert config.router.listen == f"0.0.0.0:{ports['grpc']}"
    assert [ports[f"metrics-{name}"] for name in ("router", "prefill", "decode")] == [
        *range(first, first + 3)
    ]
    # Engines stay on the pod's loopback.
    assert config.decode.listen.startswith("127.0.0.1:")
    assert config.prefill.listen.startswith("127.0.0.1:")
    allowed = documents(BASE)["NetworkPolicy/headwater-node"]["spec"]["ingress"]
    assert [port["port"] for rule in allowed for port in rule["ports"]] == [*ports.values()]


def test_the_gateways_options_are_those_for_several_nodes() -> None:
    [container] = pod_of("Deployment/headwater-gateway")["spec"]["containers"]
    options = {
        argument.partition("=")[0]: argument.partition("=")[2]
        for argument in container["args"]
        if argument.startswith("--")
    }
    ours = gateway_command(
        listen="0.0.0.0:8000",
        metrics_listen="0.0.0.0:29000",
        router_addresses=["a:1", "b:1"],
        grace_seconds=30,
        protection=Protection(tls=TlsConfig(plaintext="anywhere")),
    )
    for index, name in enumerate(ours):
        if name.startswith("--") and name != "--worker-urls":
            value = "" if ours[index + 1 : index + 2] == [] else ours[index + 1]
            assert options[name] == ("" if value.startswith("--") else value), name
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert (options["--port"], options["--prometheus-port"]) == (
        str(ports["http"]),
        str(ports["metrics"]),
    )
    kustomization = yaml.safe_load((BASE / "kustomization.yaml").read_text(encoding="utf-8"))
    assert options["--service-discovery-namespace"] == kustomization["namespace"]
    labels = {
        **kustomization["labels"][0]["pairs"],
        **pod_of("DaemonSet/headwater-node")["metadata"]["labels"],
    }
    selectors = [argument for argument in container["args"] if not argument.startswith("--")]
    assert dict(each.split("=") for each in selectors) == labels


def test_services_select_pods_that_there_are() -> None:
    found = documents(BASE)
    pods = [pod_of("DaemonSet/headwater-node"), pod_of("Deployment/headwater-gateway")]
    for name in ("Service/routers", "Service/gateway"):
        spec = found[name]["spec"]
        [pod] = [
            each for each in pods if spec["selector"].items() <= each["metadata"]["labels"].items()
        ]
        names = {
            port["name"] for each in pod["spec"]["containers"] for port in each.get("ports", [])
        }
        assert {port["targetPort"] for port in spec["ports"]} <= names
    account = pod_of("Deployment/headwater-gateway")["spec"]["serviceAccountName"]
    binding = found["RoleBinding/headwater-gateway"]
    assert [subject["name"] for subject in binding["subjects"]] == [account]
    assert f"ServiceAccount/{account}" in found
    assert f"Role/{binding['roleRef']['name']}" in found


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl, for kustomize")
@pytest.mark.parametrize("folder", [BASE, GPU])
def test_kustomize_builds_them(folder: Path) -> None:
    result = subprocess.run(
        ["kubectl", "kustomize", str(folder)], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    built = [each for each in yaml.safe_load_all(result.stdout) if each["kind"] == "DaemonSet"]
    containers = {each["name"]: each for each in built[0]["spec"]["template"]["spec"]["containers"]}
    is_gpu = folder == GPU
    assert containers["prefill"]["image"].startswith(
        "headwater-engine-gpu:" if is_gpu else "headwater-engine-cpu:"
    )
    assert ("limits" in containers["prefill"]["resources"]) == is_gpu
    assert containers["decode"]["image"].startswith("headwater-engine-cpu:")
