"""Files of ``deploy/`` and ``compose.yaml``, as far as they can be checked without a cluster."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from gateway import metrics
from workers import devices
from workers.settings import WorkerSettings

ROOT = Path(__file__).parents[2]
MANIFEST = ROOT / "deploy/kubernetes/worker-gpu.yaml"


def _manifest() -> tuple[dict[str, Any], dict[str, Any]]:
    deployment, scaler = yaml.safe_load_all(MANIFEST.read_text())
    return deployment, scaler


def test_every_pod_has_one_gpu_and_time_to_drain() -> None:
    deployment, _ = _manifest()
    pod = deployment["spec"]["template"]["spec"]
    (worker,) = pod["containers"]
    set_here = {one["name"]: one.get("value") for one in worker["env"]}

    assert worker["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert devices.parse(set_here["TOLLGATE_DEVICE"]) == ("cuda:0",)
    assert pod["terminationGracePeriodSeconds"] > float(set_here["TOLLGATE_DRAIN_S"])
    assert deployment["spec"]["strategy"]["rollingUpdate"]["maxSurge"] == 0


def test_names_of_the_manifest_are_those_of_settings_and_metrics() -> None:
    deployment, scaler = _manifest()
    pod = deployment["spec"]["template"]
    (worker,) = pod["spec"]["containers"]
    settings = {f"TOLLGATE_{name.upper()}" for name in WorkerSettings.model_fields}
    exported = {
        sample.name for family in metrics.REGISTRY.collect() for sample in family.samples
    } | {family.name for family in metrics.REGISTRY.collect()}
    (trigger,) = scaler["spec"]["triggers"]

    assert {one["name"] for one in worker["env"]} <= settings
    assert worker["args"][0] == "tollgate-worker"
    assert set(re.findall(r"\btollgate_\w+", trigger["metadata"]["query"])) <= exported
    assert scaler["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    assert deployment["spec"]["selector"]["matchLabels"] == pod["metadata"]["labels"]
    mounted = {one["name"] for one in worker["volumeMounts"]}
    assert mounted == {one["name"] for one in pod["spec"]["volumes"]}


def test_images_copy_what_exists() -> None:
    for file in (ROOT / "deploy").glob("Dockerfile.*"):
        for line in file.read_text().splitlines():
            if line.startswith("COPY "):
                for source in line.split()[1:-1]:
                    assert (ROOT / source).exists(), f"{file.name}: {source}"


def test_workers_of_compose_differ_only_in_their_device() -> None:
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    plain, gpu = services["worker"], services["worker-gpu"]
    (reserved,) = gpu["deploy"]["resources"]["reservations"]["devices"]
    arguments = gpu["build"]["args"]
    dockerfile = (ROOT / gpu["build"]["dockerfile"]).read_text()

    assert gpu["profiles"] == ["gpu"]
    assert (reserved["driver"], reserved["capabilities"]) == ("nvidia", ["gpu"])
    assert all(re.search(rf"^ARG {name}\b", dockerfile, re.MULTILINE) for name in arguments)
    own = {"build", "deploy", "profiles"}
    assert {k: v for k, v in gpu.items() if k not in own} == {
        k: v for k, v in plain.items() if k not in own
    }
