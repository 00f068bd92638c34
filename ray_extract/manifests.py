"""`ray-extract manifests`: a job as Kubernetes objects for the operator KubeRay, from the job's own numbers.

Pure but for reading the model's config.json: a job goes in, plain objects come out. `tree` gives them as the files of a
kustomize tree, `render` as one stream for `kubectl apply`.
"""

import dataclasses
import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from ray_extract import alerts, run
from ray_extract.capture.boundaries import resolve_boundaries
from ray_extract.config import GIB, Job, KubernetesConfig
from ray_extract.dataset.prepare import token_limit
from ray_extract.engine.base import check_engine
from ray_extract.errors import ConfigError
from ray_extract.model import HUB_NAME, ModelShape, describe_model
from ray_extract.plan import show_bytes
from ray_extract.presets import apply_preset
from ray_extract.progress import show_count
from ray_extract.records import Unit
from ray_extract.staging import is_url

Object = dict[str, Any]

RAY_VERSION = "2.60.0"
JOB_FOLDER = "/etc/ray-extract"
CACHE = "/cache"
USER = 1000
OBJECT_STORE_BYTES = 1 * GIB
"""Ray's own object store on each node; no state passes it."""
HEAD_CPUS = 8
HEAD_MEMORY_BYTES = 32 * GIB
ENGINE_SHM_BYTES = 1 * GIB
"""Of /dev/shm, for each engine beside its arena: control file, canary, NCCL's and SGLang's own buffers."""
GPU_MEMORY_BYTES = 8 * GIB
"""Memory of a node for each GPU, beside /dev/shm: the processes of an engine and of its worker."""
STOP_S = 45
"""What a driver that is told to stop may take beside run.drain_s: the last commits, and ending the workers."""
LEAVE_S = 30
"""What a pod may take after that: the end of Ray's own processes."""

METRICS_PORT = 8080
_SECRET_KEY = re.compile(r"secret|passw|(^|[_-])(token|key|keys|sas|credentials?)($|[_-])", re.IGNORECASE)
# Labels of spot nodes, and the taint that providers put on them by themselves.
_SPOT: dict[str, tuple[str, str, bool]] = {
    "aks": ("kubernetes.azure.com/scalesetpriority", "spot", True),
    "eks": ("eks.amazonaws.com/capacityType", "SPOT", False),
    "gke": ("cloud.google.com/gke-spot", "true", True),
    "karpenter": ("karpenter.sh/capacity-type", "spot", False),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Sizes:
    """What a job takes of a cluster.

    Args:
        nodes: GPU nodes.
        engines: on each node, at most.
        gpus: that a node's pod asks for.
        arena: bytes of each engine's arena, at most.
        shm: bytes of a node's /dev/shm.
    """

    nodes: int
    engines: int
    gpus: int
    arena: int
    shm: int


def checked(job: Job, model_folder: str | None) -> tuple[Job, ModelShape]:
    """A job that can run in pods, with its preset carried out, and its model; neither weights nor data set are read.

    Args:
        job: the job; its local paths are paths in the pods.
        model_folder: where the model's config.json is here, if not at `model.path`.

    Raises:
        ConfigError: names the field, its value and the way out.
    """
    elsewhere = is_url(job.model.path) or HUB_NAME.match(job.model.path)
    if model_folder is None and not elsewhere and not Path(job.model.path).is_dir():
        raise ConfigError(
            f"model.path = {job.model.path!r}: not on this machine; name a folder with the model's config.json by "
            "--model-config"
        )
    shape = describe_model(
        job.model.model_copy(update={"path": model_folder or job.model.path, "load_format": "dummy"})
    )
    check_engine(job, shape.context_length)
    job = job.model_copy(update={"capture": apply_preset(job.capture, shape.num_layers)})
    _check_places(job)
    _check_secrets(job)
    if job.run.address is not None:
        raise ConfigError(f"run.address = {job.run.address!r}: in a RayJob Ray says where it is; remove it")
    if job.num_gpus == 0:
        raise ConfigError("engine.device, engine.gpus: these manifests are for engines with GPUs")
    return job, shape


def arena_bound(job: Job, shape: ModelShape) -> int:
    """Bytes of an engine's arena for whatever is in the data set: never less than the plan's run.arena_size.

    Raises:
        ConfigError: boundaries or row lengths do not fit the model.
    """
    if job.run.arena_bytes is not None:
        return int(job.run.arena_bytes)
    boundaries = resolve_boundaries(job.capture.boundaries, shape.num_layers)
    token_bytes = run.token_bytes(job, shape, boundaries)
    longest = token_limit(job, shape)
    nbytes = max(int(job.output.shard_bytes), longest * token_bytes)
    kept = -(-nbytes // token_bytes)
    rows = job.output.max_rows
    tokens = kept if job.capture.keep == "all" else rows * longest
    unit = Unit(unit="", first=0, end=rows, rows=rows, tokens=tokens, kept=kept, nbytes=nbytes)
    bound = run.arena_size([unit] * (job.run.units_in_flight + 1), job.run.units_in_flight)
    return max(bound, run.SMALL_ARENA)


def sizes(job: Job, shape: ModelShape) -> Sizes:
    """How many nodes of what size a job takes; engines are spread evenly over them.

    Raises:
        ConfigError: an engine, or what a node's engines need of memory or CPUs, is more than a node has.
    """
    cfg = job.kubernetes
    if job.num_gpus > cfg.gpus_per_node:
        raise ConfigError(
            f"engine.tp_size, engine.dp_size: an engine takes {job.num_gpus} GPUs and kubernetes.gpus_per_node = "
            f"{cfg.gpus_per_node}; an engine does not span nodes"
        )
    nodes = math.ceil(job.engine.count / (cfg.gpus_per_node // job.num_gpus))
    engines = math.ceil(job.engine.count / nodes)
    gpus = engines * job.num_gpus
    arena = arena_bound(job, shape)
    shm = _round_up(engines * (arena + ENGINE_SHM_BYTES) + 2 * OBJECT_STORE_BYTES, GIB)
    needed = shm + gpus * GPU_MEMORY_BYTES
    if needed > cfg.node_memory:
        raise ConfigError(
            f"kubernetes.node_memory = {show_bytes(cfg.node_memory)}: for {show_count(engines, 'engine')} of a node "
            f"{show_bytes(needed)} are needed, "
            f"{show_bytes(shm)} of it in /dev/shm; lower output.shard_bytes, dataset.max_tokens or "
            "run.units_in_flight, set run.arena_bytes, or take larger nodes"
        )
    if engines * job.engine.cpus > cfg.node_cpus:
        raise ConfigError(
            f"kubernetes.node_cpus = {cfg.node_cpus}: {show_count(engines, 'engine')} of engine.cpus = "
            f"{job.engine.cpus:g} on a node make {engines * job.engine.cpus:g}; lower engine.cpus, or raise it"
        )
    return Sizes(nodes, engines, gpus, arena, shm)


def job_objects(job: Job, shape: ModelShape) -> list[Object]:
    """A RayJob that makes a cluster, runs the job in it and removes it, and what it needs beside it.

    Args:
        job, shape: from `checked`.

    Raises:
        ConfigError: see `sizes`.
    """
    cfg = job.kubernetes
    stop_s = _stop_s(job)
    environment = {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(stop_s)}}
    ray_job = {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": _metadata(cfg),
        "spec": {
            "entrypoint": f"python -m ray_extract.run --config {JOB_FOLDER}/job.yaml",
            "runtimeEnvYAML": _yaml(environment),
            "submissionMode": "K8sJobMode",
            "shutdownAfterJobFinishes": True,
            "ttlSecondsAfterFinished": cfg.keep_s,
            "backoffLimit": cfg.retries,
            "submitterPodTemplate": _submitter(cfg),
            "rayClusterSpec": _cluster_spec(job, shape),
        },
    }
    return [_config_map(job), ray_job, *_monitoring(cfg)]


def cluster_objects(job: Job, shape: ModelShape) -> list[Object]:
    """A RayCluster of the job's size that stays, for `ray job submit`.

    Args:
        job, shape: from `checked`.

    Raises:
        ConfigError: see `sizes`.
    """
    cluster = {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": _metadata(job.kubernetes),
        "spec": {**_cluster_spec(job, shape), **_fault_tolerance(job.kubernetes)},
    }
    return [_config_map(job), cluster, *_monitoring(job.kubernetes)]


def render(objects: list[Object]) -> str:
    """Objects as one stream of YAML documents."""
    return "---\n".join(map(_yaml, objects))


def tree(job: Job, shape: ModelShape) -> dict[str, str]:
    """A kustomize tree: `job` (RayJob), `cluster` (RayCluster), and overlays that differ from them in one thing each.

    Args:
        job, shape: from `checked`.

    Returns:
        Text of each file by its path.

    Raises:
        ConfigError: see `sizes`.
    """
    bases = {"job": job_objects(job, shape), "cluster": cluster_objects(job, shape)}
    files: dict[str, str] = {}
    for name, objects in bases.items():
        names = {f"{item['kind'].lower()}.yaml": item for item in objects}
        files |= {f"{name}/{file}": _yaml(item) for file, item in names.items()}
        files[f"{name}/kustomization.yaml"] = _kustomization(list(names), [])
    for name, (base, variant) in variants(job).items():
        make = job_objects if base == "job" else cluster_objects
        patches = [
            {
                "target": {"kind": old["kind"], "name": old["metadata"]["name"]},
                "patch": json.dumps(patch, indent=2) + "\n",
            }
            for old, new in zip(bases[base], make(variant, shape), strict=True)
            if (patch := list(json_patch(old, new)))
        ]
        files[f"overlays/{name}/kustomization.yaml"] = _kustomization([f"../../{base}"], patches)
    return files


def variants(job: Job) -> dict[str, tuple[str, Job]]:
    """The overlays: name -> what it is laid over, and the job that it stands for."""

    def with_(**changes: Any) -> Job:
        return job.model_copy(update={"kubernetes": job.kubernetes.model_copy(update=changes)})

    one = min(job.engine.count, job.kubernetes.gpus_per_node // job.num_gpus)
    provider = job.kubernetes.spot or "karpenter"
    return {
        "one-node": ("job", job.model_copy(update={"engine": job.engine.model_copy(update={"count": one})})),
        "spot": ("job", with_(spot=provider)),
        "autoscaler": ("job", with_(autoscaler=True)),
        "gcs-fault-tolerance": (
            "cluster",
            with_(redis_address=job.kubernetes.redis_address or "redis:6379"),
        ),
    }


def json_patch(old: Any, new: Any, path: str = "") -> Iterator[Object]:
    """What makes `new` of `old`, as operations of RFC 6902; lists of another length are replaced whole."""
    if old == new:
        return
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(key for key in new if key not in old)]:
            place = f"{path}/{key.replace('~', '~0').replace('/', '~1')}"
            if key not in new:
                yield {"op": "remove", "path": place}
            elif key not in old:
                yield {"op": "add", "path": place, "value": new[key]}
            else:
                yield from json_patch(old[key], new[key], place)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (before, after) in enumerate(zip(old, new, strict=True)):
            yield from json_patch(before, after, f"{path}/{index}")
    else:
        yield {"op": "replace", "path": path, "value": new}


def _cluster_spec(job: Job, shape: ModelShape) -> Object:
    cfg, size = job.kubernetes, sizes(job, shape)
    head = _pod(
        job,
        "head",
        cpus=HEAD_CPUS,
        memory=HEAD_MEMORY_BYTES,
        shm=2 * OBJECT_STORE_BYTES,
        ports={"gcs": 6379, "dashboard": 8265, "client": 10001, "metrics": METRICS_PORT},
    )
    _mount(head["spec"], "job", JOB_FOLDER, {"configMap": {"name": _job_file_name(cfg)}}, read_only=True)
    worker = _pod(
        job,
        "worker",
        cpus=cfg.node_cpus,
        memory=int(cfg.node_memory),
        shm=size.shm,
        gpus=size.gpus,
        ports={"metrics": METRICS_PORT},
    )
    start = {
        "metrics-export-port": str(METRICS_PORT),
        "object-store-memory": str(OBJECT_STORE_BYTES),
    }
    return {
        "rayVersion": RAY_VERSION,
        **_autoscaling(cfg),
        "headGroupSpec": {
            # No CPUs and GPUs for actors; a driver needs none.
            "rayStartParams": {"num-cpus": "0", "num-gpus": "0", "dashboard-host": "0.0.0.0", **start},
            "template": head,
        },
        "workerGroupSpecs": [
            {
                "groupName": "gpu",
                "replicas": 0 if cfg.autoscaler else size.nodes,
                "minReplicas": 0 if cfg.autoscaler else size.nodes,
                "maxReplicas": size.nodes,
                "rayStartParams": dict(start),
                "template": worker,
            }
        ],
    }


def _autoscaling(cfg: KubernetesConfig) -> Object:
    if not cfg.autoscaler:
        return {}
    return {
        "enableInTreeAutoscaling": True,
        "autoscalerOptions": {
            "version": "v2",
            "idleTimeoutSeconds": 300,
            "resources": _resources(1, 1 * GIB, 0),
            "securityContext": _confined(),
        },
    }


def _fault_tolerance(cfg: KubernetesConfig) -> Object:
    if cfg.redis_address is None:
        return {}
    password = {"valueFrom": {"secretKeyRef": {"name": cfg.redis_secret, "key": "password"}}}
    return {
        "gcsFaultToleranceOptions": {
            "redisAddress": cfg.redis_address,
            **({"redisPassword": password} if cfg.redis_secret is not None else {}),
        }
    }


def _pod(
    job: Job,
    role: str,
    *,
    cpus: int,
    memory: int,
    shm: int,
    ports: Mapping[str, int],
    gpus: int = 0,
) -> Object:
    cfg = job.kubernetes
    stop_s = _stop_s(job)
    container: Object = {
        "name": f"ray-{role}",
        "image": cfg.image,
        "ports": [{"name": name, "containerPort": port} for name, port in ports.items()],
        "env": [{"name": name, "value": value} for name, value in {"XDG_CACHE_HOME": CACHE, **cfg.env}.items()],
        **({"envFrom": [{"secretRef": {"name": cfg.credentials_secret}}]} if cfg.credentials_secret else {}),
        "resources": _resources(cpus, memory, gpus),
        "securityContext": _confined(),
        # The container's first process is a shell, which passes no signal on.
        "lifecycle": {
            "preStop": {
                "exec": {"command": ["/bin/sh", "-c", f"python -m ray_extract.prestop {role} {stop_s}; ray stop"]}
            }
        },
        "volumeMounts": [],
    }
    spec: Object = {
        **({"restartPolicy": "Never"} if cfg.autoscaler else {}),
        **({"serviceAccountName": cfg.service_account} if cfg.service_account is not None else {}),
        "terminationGracePeriodSeconds": stop_s + LEAVE_S,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        **_placement(cfg, role),
        "containers": [container],
        "volumes": [],
    }
    _mount(spec, "shm", "/dev/shm", {"emptyDir": {"medium": "Memory", "sizeLimit": _quantity(shm)}})
    if CACHE not in [volume.mount for volume in cfg.volumes]:
        _mount(spec, "cache", CACHE, {"emptyDir": {}})
    for number, volume in enumerate(cfg.volumes):
        source: Object = {"emptyDir": {}}
        if volume.claim is not None:
            source = {"persistentVolumeClaim": {"claimName": volume.claim, "readOnly": volume.read_only}}
        elif volume.host_path is not None:
            source = {"hostPath": {"path": volume.host_path, "type": "Directory"}}
        empty = volume.claim is None and volume.host_path is None
        _mount(spec, f"volume-{number}", volume.mount, source, read_only=volume.read_only and not empty)
    return {"metadata": {"labels": _labels(cfg)}, "spec": spec}


def _mount(spec: Object, name: str, path: str, source: Object, *, read_only: bool = False) -> None:
    spec["volumes"].append({"name": name, **source})
    mount = {"name": name, "mountPath": path, **({"readOnly": True} if read_only else {})}
    spec["containers"][0]["volumeMounts"].append(mount)


def _placement(cfg: KubernetesConfig, role: str) -> Object:
    """On which nodes a pod may be, and which of their taints it tolerates."""
    worker = role == "worker"
    # A head reads the model's config.json and samples of its weights, so it goes to where these are.
    on_gpu_nodes = worker or any(volume.host_path is not None for volume in cfg.volumes)
    tolerations: list[Object] = []
    terms: list[Object] = []
    if on_gpu_nodes:
        tolerations.append({"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"})
        terms += [{"key": key, "operator": "In", "values": [value]} for key, value in cfg.node_labels.items()]
    if cfg.spot is not None:
        label, value, tainted = _SPOT[cfg.spot]
        terms.append({"key": label, "operator": "In" if worker else "NotIn", "values": [value]})
        if worker and tainted:
            tolerations.append({"key": label, "operator": "Equal", "value": value, "effect": "NoSchedule"})
    affinity: Object = {}
    if terms:
        selector = {"nodeSelectorTerms": [{"matchExpressions": terms}]}
        affinity["requiredDuringSchedulingIgnoredDuringExecution"] = selector
    if not on_gpu_nodes:
        off = {"matchExpressions": [{"key": "nvidia.com/gpu.present", "operator": "DoesNotExist"}]}
        affinity["preferredDuringSchedulingIgnoredDuringExecution"] = [{"weight": 100, "preference": off}]
    return {
        **({"tolerations": tolerations} if tolerations else {}),
        **({"affinity": {"nodeAffinity": affinity}} if affinity else {}),
    }


def _submitter(cfg: KubernetesConfig) -> Object:
    """The pod that hands the job to the cluster and follows its log; KubeRay gives it its command."""
    container = {
        "name": "ray-job-submitter",
        "image": cfg.image,
        "resources": _resources(1, 1 * GIB, 0),
        "securityContext": _confined(),
    }
    security = {"runAsNonRoot": True, "runAsUser": USER, "seccompProfile": {"type": "RuntimeDefault"}}
    return {"spec": {"restartPolicy": "Never", "securityContext": security, "containers": [container]}}


def _config_map(job: Job) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": _job_file_name(job.kubernetes), "labels": _labels(job.kubernetes)},
        "data": {"job.yaml": _yaml(job_file(job))},
    }


def job_file(job: Job) -> Object:
    """The job as the pods read it: what was set, with the preset carried out, and nothing about Kubernetes."""
    sections: Object = job.model_dump(mode="json", exclude_unset=True, exclude={"kubernetes"})
    if is_url(job.model.path):
        # A pod's home is in its image, where there is no room for weights.
        sections["model"] = {"cache_dir": f"{CACHE}/models", **sections["model"]}
    capture = {**sections.get("capture", {})}
    if capture.pop("preset", None) is not None:
        capture.pop("draft_config", None)
    return {**sections, "capture": capture} if capture else sections


def _monitoring(cfg: KubernetesConfig) -> list[Object]:
    if not cfg.monitoring:
        return []
    pods = {
        "selector": {"matchLabels": _labels(cfg)},
        "podTargetLabels": ["ray.io/cluster", "ray.io/node-type"],
        "podMetricsEndpoints": [{"port": "metrics", "interval": "15s"}],
    }
    return [
        {"apiVersion": "monitoring.coreos.com/v1", "kind": kind, "metadata": _metadata(cfg), "spec": spec}
        for kind, spec in (("PodMonitor", pods), ("PrometheusRule", {"groups": alerts.groups()}))
    ]


def _check_places(job: Job) -> None:
    """Raises ConfigError for a path that pods do not have."""
    mounts = {volume.mount: volume for volume in job.kubernetes.volumes}

    def mount_of(path: str) -> str | None:
        folders = [str(parent) for parent in (PurePosixPath(path), *PurePosixPath(path).parents)]
        return next((folder for folder in folders if folder in mounts), None)

    local = {
        "model.path": (job.model.path,),
        "model.tokenizer": (job.model.tokenizer,),
        "dataset.paths": job.dataset.paths,
        "dataset.chat_template": (job.dataset.chat_template,),
        "output.url": (job.output.url,),
    }
    for field, paths in local.items():
        for path in paths:
            hub = field in ("model.path", "model.tokenizer") and path is not None and HUB_NAME.match(path)
            if path is None or is_url(path) or hub:
                continue
            if mount_of(path) is None:
                raise ConfigError(
                    f"{field} = {path!r}: no pod has it; name an absolute path below a mount of kubernetes.volumes"
                    + (", or an object store" if field in ("dataset.paths", "output.url") else "")
                )
    if not is_url(job.output.url):
        volume = mounts[mount_of(job.output.url) or ""]
        if volume.claim is None or volume.read_only:
            raise ConfigError(
                f"output.url = {job.output.url!r}: all pods write it, so {volume.mount} of kubernetes.volumes must be "
                "a claim with read_only = false; or name an object store"
            )


_SECRET = "put it into a Secret as an environment variable, and its name into kubernetes.credentials_secret"


def _check_secrets(job: Job) -> None:
    """Raises ConfigError for what looks like a secret, since anybody who sees the manifests would read it."""
    for field, urls in (
        ("model.path", (job.model.path,)),
        ("dataset.paths", job.dataset.paths),
        ("output.url", (job.output.url,)),
    ):
        if any(re.search(r"://[^/]*@", url) for url in urls):
            raise ConfigError(f"{field}: what its URL has before @ would be readable in the manifests; {_SECRET}")
    for field, values in (
        ("model.storage_options", job.model.storage_options),
        ("dataset.storage_options", job.dataset.storage_options),
        ("output.storage_options", job.output.storage_options),
        ("engine.env", job.engine.env),
        ("kubernetes.env", job.kubernetes.env),
    ):
        for key in _keys(values):
            if _SECRET_KEY.search(key) and "kms" not in key.lower():
                raise ConfigError(f"{field}.{key}: would be readable in the manifests; {_SECRET}")


def _keys(tree: Mapping[str, Any]) -> Iterator[str]:
    for key, value in tree.items():
        yield key
        if isinstance(value, Mapping):
            yield from _keys(value)


def _stop_s(job: Job) -> int:
    return math.ceil(job.run.drain_s) + STOP_S


def _labels(cfg: KubernetesConfig) -> dict[str, str]:
    return {"app.kubernetes.io/name": "ray-extract", "app.kubernetes.io/instance": cfg.name}


def _metadata(cfg: KubernetesConfig) -> Object:
    return {"name": cfg.name, "labels": _labels(cfg)}


def _job_file_name(cfg: KubernetesConfig) -> str:
    return f"{cfg.name}-job"


def _confined() -> Object:
    return {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def _resources(cpus: int, memory: int, gpus: int) -> Object:
    amounts = {"cpu": str(cpus), "memory": _quantity(memory), **({"nvidia.com/gpu": str(gpus)} if gpus else {})}
    return {"requests": amounts, "limits": dict(amounts)}


def _quantity(nbytes: int) -> str:
    return f"{nbytes // GIB}Gi" if nbytes % GIB == 0 else f"{-(-nbytes // (1 << 20))}Mi"


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step


class _Dumper(yaml.SafeDumper):
    """Text of several lines as a block; the same object twice is written twice."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def _yaml(item: Any) -> str:
    return yaml.dump(item, Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True)


def _kustomization(resources: list[str], patches: list[Object]) -> str:
    return _yaml(
        {
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
            "resources": resources,
            **({"patches": patches} if patches else {}),
        }
    )
