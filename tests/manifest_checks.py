"""Checks of Kubernetes objects without a cluster: each function returns what is wrong, one line a fault.

`schema_faults` and `cel_faults` are what an API server does with KubeRay's custom resource definitions,
`operator_faults` what the operator refuses by itself (ray-operator/controllers/ray/utils/validation.go, v1.7.0),
`builtin_faults` the schemas of Kubernetes itself, and `our_faults` what a run of ours needs.
"""

import copy
import functools
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from ray_extract.config import load_job

ROOT = Path(__file__).parents[1]
Object = dict[str, Any]

_META = {
    "type": "object",
    "properties": {
        **{key: {"type": "string"} for key in ("name", "generateName", "namespace")},
        **{key: {"type": "object", "additionalProperties": {"type": "string"}} for key in ("labels", "annotations")},
        "finalizers": {"type": "array", "items": {"type": "string"}},
    },
}
_DNS1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_UNITS = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_GPU = "nvidia.com/gpu"


def crd_folder() -> Path:
    """KubeRay's definitions, from RAY_EXTRACT_KUBERAY_CRDS or ../shared/kuberay; skips the test where neither is."""
    folder = Path(os.environ.get("RAY_EXTRACT_KUBERAY_CRDS") or ROOT.parent / "shared/kuberay")
    if not (folder / "ray.io_rayjobs.yaml").is_file():
        pytest.skip(
            f"KubeRay v1.7.0's custom resource definitions are not in {folder}; "
            "RAY_EXTRACT_KUBERAY_CRDS names a folder that has them"
        )
    return folder


def tool(name: str) -> str:
    """A command beside this Python or on PATH; skips the test where it is absent."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed; it is in the extra `dev`")
    return found


@functools.cache
def _definition(folder: Path, kind: str) -> Object:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    tree = yaml.load((folder / f"ray.io_{kind.lower()}s.yaml").read_text(), Loader=loader)
    [version] = [v for v in tree["spec"]["versions"] if v["name"] == "v1"]
    schema: Object = version["schema"]["openAPIV3Schema"]
    return schema


@functools.cache
def _validator(folder: Path, kind: str) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(_strict(_definition(folder, kind)))


def _strict(schema: Any) -> Any:
    """The same, but a property that is not listed is an error, as kubectl's --validate=strict has it."""
    if isinstance(schema, list):
        return [_strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: _strict(value) for key, value in schema.items()}
    properties = found.get("properties")
    if isinstance(properties, dict):
        if properties.get("metadata") == {"type": "object"}:
            properties["metadata"] = {**_META, "additionalProperties": False}
        if "type" in found and not found.get("x-kubernetes-preserve-unknown-fields"):
            found.setdefault("additionalProperties", False)
    if found.get("nullable") is True and isinstance(found.get("type"), str):
        found["type"] = [found["type"], "null"]
    return found


def with_defaults(instance: Any, schema: Object) -> Any:
    """A copy with the schema's defaults filled in, as the API server does before it validates."""
    if isinstance(instance, dict):
        properties = schema.get("properties", {})
        rest = schema.get("additionalProperties")
        filled = {
            key: with_defaults(value, properties.get(key) or (rest if isinstance(rest, dict) else {}))
            for key, value in instance.items()
        }
        return filled | {
            key: copy.deepcopy(part["default"])
            for key, part in properties.items()
            if key not in instance and isinstance(part, dict) and "default" in part
        }
    if isinstance(instance, list):
        return [with_defaults(item, schema.get("items", {})) for item in instance]
    return instance


def schema_faults(item: Object) -> list[str]:
    """Against the strict schema of its kind, RayJob or RayCluster."""
    folder = crd_folder()
    filled = with_defaults(item, _definition(folder, item["kind"]))
    found = _validator(folder, item["kind"]).iter_errors(filled)
    return [f"{'.'.join(map(str, error.absolute_path))}: {error.message}" for error in found]


def cel_faults(item: Object) -> list[str]:
    """Against the CEL rules of its kind that are not about a change."""
    cel = pytest.importorskip("cel", reason="common-expression-language is not installed; it is in the extra `dev`")
    schema = _definition(crd_folder(), item["kind"])
    return [
        f"{path}: {rule.get('message', rule['rule'])}"
        for path, rule, value in _rules(with_defaults(item, schema), schema, "")
        if cel.evaluate(rule["rule"], {"self": value}) is not True
    ]


def _rules(instance: Any, schema: Any, path: str) -> Iterator[tuple[str, Object, Any]]:
    if not isinstance(schema, dict):
        return
    for rule in schema.get("x-kubernetes-validations", []):
        if "oldSelf" not in rule["rule"]:
            yield path, rule, instance
    if isinstance(instance, dict):
        rest = schema.get("additionalProperties")
        for key, value in instance.items():
            yield from _rules(value, schema.get("properties", {}).get(key, rest), f"{path}.{key}")
    elif isinstance(instance, list):
        for index, value in enumerate(instance):
            yield from _rules(value, schema.get("items"), f"{path}.{index}")


def builtin_faults(item: Object) -> list[str]:
    """A ConfigMap, or the pods of a RayJob or RayCluster, against the schemas of Kubernetes, strictly."""
    validate = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate is not installed; it is in the extra `dev`"
    )
    if item["kind"] in ("RayJob", "RayCluster"):
        pods = {role: {"apiVersion": "v1", "kind": "Pod", **template} for role, template in _templates(item)}
    else:
        pods = {item["kind"]: item}
    found = []
    for name, pod in pods.items():
        try:
            validate.validate(pod, "1.37", strict=True)
        except validate.ValidationError as error:
            found.append(f"{name}: {'.'.join(map(str, error.path))}: {error.message}")
    return found


def cluster_spec(item: Object) -> Object:
    """The cluster of a RayJob, or a RayCluster's own."""
    spec: Object = item["spec"]
    return spec.get("rayClusterSpec", {}) if item["kind"] == "RayJob" else spec


def _groups(item: Object) -> list[tuple[str, Object]]:
    spec = cluster_spec(item)
    named = [(f"group {group.get('groupName')}", group) for group in spec.get("workerGroupSpecs", [])]
    return [("head", spec["headGroupSpec"]), *named] if "headGroupSpec" in spec else named


def _templates(item: Object) -> list[tuple[str, Object]]:
    found = [(name, group["template"]) for name, group in _groups(item)]
    submitter = item["spec"].get("submitterPodTemplate")
    return [*found, ("submitter", submitter)] if submitter is not None else found


def operator_faults(item: Object) -> list[str]:
    """What KubeRay's operator refuses although the schema lets it in."""
    spec, name = item["spec"], item["metadata"]["name"]
    longest = 47 if item["kind"] == "RayJob" else 53
    found = []
    if len(name) > longest:
        found.append(f"metadata.name: at most {longest} characters")
    if not _DNS1035.fullmatch(name):
        found.append("metadata.name: not a DNS-1035 label")
    if item["kind"] == "RayJob":
        found += _ray_job_faults(spec)
    return found + _ray_cluster_faults(item)


def _ray_job_faults(spec: Object) -> list[str]:
    mode, shuts = spec.get("submissionMode", "K8sJobMode"), spec.get("shutdownAfterJobFinishes", False)
    selects = bool(spec.get("clusterSelector"))
    found = []
    if mode not in ("K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"):
        found.append(f"submissionMode: {mode} is none")
    if spec.get("ttlSecondsAfterFinished", 0) < 0:
        found.append("ttlSecondsAfterFinished: negative")
    if spec.get("ttlSecondsAfterFinished", 0) > 0 and not shuts:
        found.append("ttlSecondsAfterFinished: needs shutdownAfterJobFinishes")
    if spec.get("suspend") and not shuts:
        found.append("suspend: needs shutdownAfterJobFinishes")
    if selects and spec.get("suspend"):
        found.append("suspend: not with clusterSelector")
    if selects == ("rayClusterSpec" in spec):
        found.append("rayClusterSpec, clusterSelector: exactly one of them")
    if spec.get("backoffLimit", 0) < 0:
        found.append("backoffLimit: negative")
    if spec.get("backoffLimit", 0) > 0 and (selects or mode == "InteractiveMode"):
        found.append("backoffLimit: not with clusterSelector or InteractiveMode")
    for field in ("activeDeadlineSeconds", "preRunningDeadlineSeconds"):
        if spec.get(field, 1) <= 0:
            found.append(f"{field}: must be positive")
    if mode == "SidecarMode":
        found += [
            f"{field}: not in SidecarMode" for field in ("submitterPodTemplate", "submitterConfig") if field in spec
        ]
        head = spec.get("rayClusterSpec", {}).get("headGroupSpec", {}).get("template", {}).get("spec", {})
        if head.get("restartPolicy") != "Never":
            found.append("SidecarMode: the head's restartPolicy must be Never")
    try:
        yaml.safe_load(spec.get("runtimeEnvYAML", ""))
    except yaml.YAMLError:
        found.append("runtimeEnvYAML: not YAML")
    return found


def _ray_cluster_faults(item: Object) -> list[str]:
    spec, groups, found = cluster_spec(item), _groups(item), []
    options = spec.get("autoscalerOptions", {})
    names = [group.get("groupName") for _, group in groups[1:]]
    if len(names) != len(set(names)):
        found.append("workerGroupSpecs: a groupName twice")
    for name, group in groups:
        containers = group["template"]["spec"].get("containers")
        if not containers:
            found.append(f"{name}: no container")
            continue
        env = {entry["name"] for entry in containers[0].get("env", [])}
        start = group.get("rayStartParams", {})
        both = {"num-cpus": "CPU", "num-gpus": "GPU", "memory": "memory"}
        found += [
            f"{name}: {key} in rayStartParams and resources"
            for key, resource in both.items()
            if key in start and resource in group.get("resources", {})
        ]
        if "resources" in start and group.get("resources"):
            found.append(f"{name}: resources in rayStartParams and resources")
        if "labels" in start:
            found.append(f"{name}: labels belong to the group, not into rayStartParams")
        if spec.get("enableInTreeAutoscaling"):
            if options.get("version") == "v2" and group["template"]["spec"].get("restartPolicy", "Never") != "Never":
                found.append(f"{name}: restartPolicy must be Never with autoscaler v2")
            if "version" in options and "RAY_enable_autoscaler_v2" in env:
                found.append(f"{name}: autoscalerOptions.version and RAY_enable_autoscaler_v2, one is enough")
        if "gcsFaultToleranceOptions" in spec and "RAY_REDIS_ADDRESS" in env:
            found.append(f"{name}: gcsFaultToleranceOptions and RAY_REDIS_ADDRESS, one is enough")
        if "gcsFaultToleranceOptions" in spec and "redis-password" in start:
            found.append(f"{name}: gcsFaultToleranceOptions and redis-password, one is enough")
    for name, group in groups[1:]:
        low, high = group.get("minReplicas", 0), group.get("maxReplicas", 0)
        if low > high:
            found.append(f"{name}: minReplicas above maxReplicas")
        elif not low <= group.get("replicas", low) <= high:
            found.append(f"{name}: replicas outside minReplicas and maxReplicas")
    if spec.get("gcsFaultToleranceOptions", {}).get("backend") == "rocksdb":
        found.append("gcsFaultToleranceOptions.backend: rocksdb is behind a gate that is off")
    return found


def our_faults(objects: list[Object]) -> list[str]:
    """What would let a run of ours fail, or run worse, in pods that are otherwise well."""
    by_kind = {item["kind"]: item for item in objects}
    item = by_kind.get("RayJob") or by_kind["RayCluster"]
    found = _pods_faults(item)
    head, workers = _groups(item)[0][1], _groups(item)[1:]
    if any(head.get("rayStartParams", {}).get(key) != "0" for key in ("num-cpus", "num-gpus")):
        found.append("head: num-cpus and num-gpus must be 0")
    if _GPU in _limits(head["template"]):
        found.append("head: asks for GPUs")
    for name, group in workers:
        if _GPU not in _limits(group["template"]):
            found.append(f"{name}: asks for no GPUs")
        tolerated = {entry.get("key") for entry in group["template"]["spec"].get("tolerations", [])}
        if _GPU not in tolerated:
            found.append(f"{name}: does not tolerate the taint of GPU nodes")
    found += _job_file_faults(item, by_kind.get("ConfigMap"))
    if "PodMonitor" in by_kind:
        found += _monitor_faults(item, by_kind["PodMonitor"])
    return found


def _pods_faults(item: Object) -> list[str]:
    found = []
    images = {container["image"] for _, template in _templates(item) for container in template["spec"]["containers"]}
    if len(images) != 1:
        found.append(f"images: {', '.join(sorted(images))} in one cluster")
    for image in images:
        if ":" not in image.rpartition("/")[2] or image.endswith(":latest"):
            found.append(f"image {image}: not pinned")
    for name, template in _templates(item):
        spec, container = template["spec"], template["spec"]["containers"][0]
        if spec.get("securityContext", {}).get("runAsNonRoot") is not True:
            found.append(f"{name}: may run as root")
        volumes = [volume["name"] for volume in spec.get("volumes", [])]
        mounts = {mount["mountPath"]: mount["name"] for mount in container.get("volumeMounts", [])}
        if len(volumes) != len(set(volumes)) or set(mounts.values()) != set(volumes):
            found.append(f"{name}: volumes and volumeMounts do not name the same")
        limits = _limits(template)
        if limits != container.get("resources", {}).get("requests"):
            found.append(f"{name}: requests are not the limits")
    for name, group in _groups(item):
        spec, container = group["template"]["spec"], group["template"]["spec"]["containers"][0]
        start = group.get("rayStartParams", {})
        shm = _shm(spec)
        size = quantity(shm.get("sizeLimit", "0"))
        if shm.get("medium") != "Memory" or not size:
            found.append(f"{name}: /dev/shm is no emptyDir in memory with a limit")
        elif size > quantity(_limits(group["template"]).get("memory", "0")):
            found.append(f"{name}: /dev/shm is larger than the pod's memory")
        if int(start.get("object-store-memory", 1 << 62)) > size:
            found.append(f"{name}: Ray's object store does not fit /dev/shm")
        ports = {port["name"]: port["containerPort"] for port in container.get("ports", [])}
        if start.get("metrics-export-port") != str(ports.get("metrics")):
            found.append(f"{name}: the port metrics is not where Ray exports them")
        hook = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [""])[-1]
        waits = re.search(r"ray_extract\.prestop (?:head|worker) (\d+)", hook)
        if waits is None:
            found.append(f"{name}: no preStop hook drains it")
        elif spec.get("terminationGracePeriodSeconds", 30) <= int(waits[1]):
            found.append(f"{name}: terminationGracePeriodSeconds ends before the preStop hook may")
    return found


def _job_file_faults(item: Object, config_map: Object | None) -> list[str]:
    """The job in the ConfigMap is one, it is where the entrypoint looks, and the cluster is large enough for it."""
    if config_map is None:
        return ["ConfigMap: none"]
    spec = _groups(item)[0][1]["template"]["spec"]
    places = [
        f"{mount['mountPath']}/{key}"
        for mount in spec["containers"][0].get("volumeMounts", [])
        for volume in spec.get("volumes", [])
        for key in config_map["data"]
        if mount["name"] == volume["name"] and volume.get("configMap", {}).get("name") == config_map["metadata"]["name"]
    ]
    if len(places) != 1:
        return [f"head: mounts {len(places)} job files of the ConfigMap"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.yaml"
        path.write_text(config_map["data"]["job.yaml"])
        job = load_job(path)
    found = []
    for name, group in _groups(item):
        if group["template"]["spec"].get("terminationGracePeriodSeconds", 30) <= job.run.drain_s:
            found.append(f"{name}: terminationGracePeriodSeconds does not outlast run.drain_s")
    engines = 0
    for name, group in _groups(item)[1:]:
        gpus = int(_limits(group["template"]).get(_GPU, 0))
        each = gpus // job.num_gpus
        engines += group["maxReplicas"] * each
        size = quantity(_shm(group["template"]["spec"]).get("sizeLimit", "0"))
        arenas = each * (job.run.units_in_flight + 1) * int(job.output.shard_bytes)
        if job.run.arena_bytes is None and size < arenas:
            found.append(f"{name}: /dev/shm is too small for {each} arenas")
    if engines < job.engine.count:
        found.append(f"workers: room for {engines} of {job.engine.count} engines")
    if item["kind"] == "RayJob":
        if not item["spec"].get("entrypoint", "").endswith(f"--config {places[0]}"):
            found.append(f"entrypoint: does not read {places[0]}")
        environment = (yaml.safe_load(item["spec"].get("runtimeEnvYAML", "")) or {}).get("env_vars", {})
        if float(environment.get("RAY_JOB_STOP_WAIT_TIME_S", 3)) <= job.run.drain_s:
            found.append("runtimeEnvYAML: RAY_JOB_STOP_WAIT_TIME_S does not outlast run.drain_s")
        if not item["spec"].get("shutdownAfterJobFinishes"):
            found.append("shutdownAfterJobFinishes: else a finished job keeps its GPUs")
    return found


def _monitor_faults(item: Object, monitor: Object) -> list[str]:
    wanted = monitor["spec"]["selector"]["matchLabels"].items()
    found = []
    for name, group in _groups(item):
        if not wanted <= group["template"].get("metadata", {}).get("labels", {}).items():
            found.append(f"PodMonitor: does not select {name}")
        ports = {port["name"] for port in group["template"]["spec"]["containers"][0].get("ports", [])}
        for endpoint in monitor["spec"]["podMetricsEndpoints"]:
            if endpoint.get("port") not in ports:
                found.append(f"PodMonitor: {name} has no port {endpoint.get('port')}")
    return found


def _shm(spec: Object) -> Object:
    """The emptyDir that the first container of a pod has as /dev/shm; empty if it has none."""
    names = [m["name"] for m in spec["containers"][0].get("volumeMounts", []) if m["mountPath"] == "/dev/shm"]
    found = [volume.get("emptyDir", {}) for volume in spec.get("volumes", []) if volume["name"] in names]
    return found[0] if found else {}


def _limits(template: Object) -> Object:
    found: Object = template["spec"]["containers"][0].get("resources", {}).get("limits", {})
    return found


def quantity(text: str) -> int:
    """Bytes of a Kubernetes quantity; 0 if it is none."""
    match = re.fullmatch(r"(\d+)(Ki|Mi|Gi|Ti|k|M|G|T)?", text)
    return int(match[1]) * _UNITS.get(match[2], 1) if match else 0
