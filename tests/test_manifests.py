"""Jobs as Kubernetes objects: in step with k8s/, valid for KubeRay v1.7.0, and every mistake in them noticed."""

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import manifest_checks as checks
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_extract import cli, manifests, prestop, run
from ray_extract.capture.boundaries import resolve_boundaries
from ray_extract.config import Job, load_job
from ray_extract.dataset.prepare import token_limit
from ray_extract.dataset.prepared import Lengths, RowLength
from ray_extract.errors import ConfigError
from ray_extract.layout import SHM_PREFIX
from ray_extract.model import ModelShape
from ray_extract.plan import plan_units

ROOT = Path(__file__).parents[1]
K8S = ROOT / "k8s"
MODELS = Path(__file__).parent / "model_configs"
# What k8s/README.md says to make the folder with.
COMMAND = [
    *("manifests", "--config", "deploy/jobs/qwen3-8b_8xh100.yaml", "--model-config", "tests/model_configs/qwen3-8b"),
    *("engine.count=32", "kubernetes.name=ray-extract"),
]
VARIANTS = ("one-node", "spot", "autoscaler", "gcs-fault-tolerance")

Objects = dict[str, Any]


def checked(*overrides: str) -> tuple[Job, ModelShape]:
    """The job of k8s/, with other values."""
    job = load_job(ROOT / COMMAND[2], [*COMMAND[5:], *overrides])
    return manifests.checked(job, str(MODELS / "qwen3-8b"))


def by_kind(objects: list[Objects]) -> Objects:
    return {item["kind"]: item for item in copy.deepcopy(objects)}


# Everything that the command can make: what stays in k8s/, and what is set together.
EVERY: dict[str, tuple[str, tuple[str, ...]]] = {
    "job": ("job", ()),
    "cluster": ("cluster", ()),
    "bare": ("job", ("kubernetes.monitoring=false", "kubernetes.credentials_secret=null", "engine.count=1")),
    "everything": (
        "job",
        (
            "kubernetes.spot=gke",
            "kubernetes.autoscaler=true",
            "kubernetes.service_account=extractor",
            "kubernetes.env={AWS_REGION: eu-central-1}",
            "kubernetes.volumes=[{mount: /models, host_path: /mnt/models},"
            " {mount: /cache, claim: cache, read_only: false}]",
        ),
    ),
    "redis": ("cluster", ("kubernetes.redis_address=redis:6379", "kubernetes.redis_secret=redis")),
    "fp8": ("job", ("capture.dtype=float8_e4m3", "capture.keep=supervised", "run.arena_bytes=4GiB")),
}


def made(name: str) -> list[Objects]:
    base, overrides = EVERY[name]
    return (manifests.job_objects if base == "job" else manifests.cluster_objects)(*checked(*overrides))


def rays(objects: list[Objects]) -> list[Objects]:
    return [item for item in objects if item["kind"].startswith("Ray")]


# Step


def test_the_files_in_k8s_are_what_the_command_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert cli.main([*COMMAND[:5], "--output", str(tmp_path), *COMMAND[5:]]) == 0
    written = {str(path.relative_to(tmp_path)): path.read_text() for path in tmp_path.rglob("*.yaml")}
    kept = {str(path.relative_to(K8S)): path.read_text() for path in K8S.rglob("*.yaml")}
    assert written == kept, f"make them again: ray-extract {' '.join(COMMAND)} --output k8s"


def test_the_readme_of_k8s_has_the_command_that_made_it() -> None:
    text = (K8S / "README.md").read_text().replace("\\\n", " ")
    assert " ".join(["ray-extract", *COMMAND[:5], "--output", "k8s", *COMMAND[5:]]) in " ".join(text.split())


def _built(folder: Path) -> dict[str, Any]:
    done = subprocess.run(
        [checks.tool("kubectl"), "kustomize", str(folder)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return {item["kind"]: item for item in yaml.safe_load_all(done.stdout)}


@pytest.mark.parametrize("name", VARIANTS)
def test_kustomize_makes_of_an_overlay_what_the_command_makes_of_its_job(name: str) -> None:
    base, variant = manifests.variants(checked()[0])[name]
    make = manifests.job_objects if base == "job" else manifests.cluster_objects
    built = _built(K8S / "overlays" / name)
    assert built == by_kind(make(variant, checked()[1]))
    assert built != by_kind(make(*checked()))


@pytest.mark.parametrize("name", ["job", "cluster"])
def test_kustomize_builds_the_base(name: str) -> None:
    assert _built(K8S / name) == by_kind(made(name))


def test_every_overlay_is_tested() -> None:
    assert sorted(path.name for path in (K8S / "overlays").iterdir()) == sorted(VARIANTS)


_TREES = st.recursive(
    st.integers(0, 2),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "/", "~1"]), inner),
)


def _apply(tree: Any, patch: list[Objects]) -> Any:
    """RFC 6902, as far as json_patch uses it."""
    root = {"": copy.deepcopy(tree)}
    for step in patch:
        keys = ["", *(key.replace("~1", "/").replace("~0", "~") for key in step["path"].split("/")[1:])]
        at: Any = root
        for key in keys[:-1]:
            at = at[int(key) if isinstance(at, list) else key]
        last: Any = int(keys[-1]) if isinstance(at, list) else keys[-1]
        if step["op"] == "remove":
            del at[last]
        else:
            at[last] = step["value"]
    return root[""]


@given(_TREES, _TREES)
@settings(max_examples=200, deadline=None)
def test_a_patch_makes_the_new_of_the_old(old: Any, new: Any) -> None:
    assert _apply(old, list(manifests.json_patch(old, new))) == new


# Validity


@pytest.mark.parametrize("name", EVERY)
def test_what_is_made_is_what_kuberay_takes(name: str) -> None:
    for item in rays(made(name)):
        assert checks.schema_faults(item) == []


@pytest.mark.parametrize("name", EVERY)
def test_what_is_made_keeps_the_rules_of_the_definitions(name: str) -> None:
    for item in rays(made(name)):
        assert checks.cel_faults(item) == []


@pytest.mark.parametrize("name", EVERY)
def test_what_is_made_keeps_the_rules_of_the_operator_and_ours(name: str) -> None:
    objects = made(name)
    assert [fault for item in rays(objects) for fault in checks.operator_faults(item)] == []
    assert checks.our_faults(objects) == []


@pytest.mark.parametrize("name", EVERY)
def test_what_is_made_is_what_kubernetes_takes(name: str) -> None:
    for item in made(name):
        if item["kind"] not in ("PodMonitor", "PrometheusRule"):
            assert checks.builtin_faults(item) == []


def test_what_the_api_server_fills_in_may_be_left_out() -> None:
    item = by_kind(made("job"))["RayJob"]
    del item["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["minReplicas"]
    assert checks.schema_faults(item) == []


def _pods(*overrides: str) -> tuple[Objects, Objects]:
    """Specs of the pods of head and worker."""
    spec = by_kind(manifests.job_objects(*checked(*overrides)))["RayJob"]["spec"]["rayClusterSpec"]
    return spec["headGroupSpec"]["template"]["spec"], spec["workerGroupSpecs"][0]["template"]["spec"]


def _needs(pod: Objects) -> dict[str, str]:
    """Labels that the nodes of a pod must have (In) or not have (NotIn)."""
    required = pod["affinity"]["nodeAffinity"].get("requiredDuringSchedulingIgnoredDuringExecution")
    terms = required["nodeSelectorTerms"][0]["matchExpressions"] if required else []
    return {term["key"]: f"{term['operator']} {','.join(term['values'])}" for term in terms}


@pytest.mark.parametrize(
    ("provider", "label", "value", "tainted"),
    [
        ("aks", "kubernetes.azure.com/scalesetpriority", "spot", True),
        ("eks", "eks.amazonaws.com/capacityType", "SPOT", False),
        ("gke", "cloud.google.com/gke-spot", "true", True),
        ("karpenter", "karpenter.sh/capacity-type", "spot", False),
    ],
)
def test_workers_are_on_spot_nodes_and_the_head_is_not(provider: str, label: str, value: str, tainted: bool) -> None:
    head, worker = _pods(f"kubernetes.spot={provider}")
    assert _needs(worker)[label] == f"In {value}"
    assert _needs(head)[label] == f"NotIn {value}"
    assert (label in {toleration["key"] for toleration in worker["tolerations"]}) == tainted
    assert "tolerations" not in head


def test_a_head_keeps_off_gpu_nodes_unless_the_model_is_there() -> None:
    head, _ = _pods()
    [preferred] = head["affinity"]["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert preferred["preference"]["matchExpressions"][0]["operator"] == "DoesNotExist"
    head, worker = _pods("kubernetes.volumes=[{mount: /models, host_path: /mnt/models}]")
    assert _needs(head) == _needs(worker) == {"nvidia.com/gpu.product": "In NVIDIA-H100-80GB-HBM3"}
    assert head["tolerations"] == worker["tolerations"]


def test_head_and_workers_have_the_credentials_the_identity_and_the_volumes() -> None:
    volumes = "kubernetes.volumes=[{mount: /models, claim: models}, {mount: /scratch}]"
    for pod in _pods("kubernetes.service_account=extractor", "kubernetes.env={AWS_REGION: eu-central-1}", volumes):
        [container] = pod["containers"]
        assert container["envFrom"] == [{"secretRef": {"name": "ray-extract-store"}}]
        assert {"name": "AWS_REGION", "value": "eu-central-1"} in container["env"]
        assert pod["serviceAccountName"] == "extractor"
        mounts = {mount["mountPath"]: mount.get("readOnly", False) for mount in container["volumeMounts"]}
        assert mounts.items() >= {"/models": True, "/scratch": False, "/cache": False, "/dev/shm": False}.items()


# Mistakes: where, what is put there, who notices and what it says

_GONE = object()
_JOB = ("RayJob", "spec")
_CLUSTER = (*_JOB, "rayClusterSpec")
_HEAD = (*_CLUSTER, "headGroupSpec")
_GROUP = (*_CLUSTER, "workerGroupSpecs", 0)
_HEAD_POD = (*_HEAD, "template", "spec")
_POD = (*_GROUP, "template", "spec")
_HEAD_BOX = (*_HEAD_POD, "containers", 0)
_BOX = (*_POD, "containers", 0)
_SHM = (*_POD, "volumes", 0, "emptyDir")

Mistake = tuple[tuple[Any, ...], Any, str, str]
MISTAKES: dict[str, Mistake] = {
    "a misspelt field of the job": ((*_JOB, "shutdownAfterJobFinish"), True, "schema", "shutdownAfterJobFinish"),
    "a misspelt field of a pod": ((*_BOX, "resourcess"), {}, "schema", "resourcess"),
    "a misspelt field of a volume": ((*_SHM, "sizelimit"), "1Gi", "schema", "sizelimit"),
    "a misspelt field of metadata": ((*_GROUP, "template", "metadata", "label"), {}, "schema", "label"),
    "a ttl that is text": ((*_JOB, "ttlSecondsAfterFinished"), "300", "schema", "ttlSecondsAfterFinished"),
    "a start parameter that is a number": ((*_HEAD, "rayStartParams", "num-cpus"), 0, "schema", "num-cpus"),
    "a quantity that is none": ((*_BOX, "resources", "limits", "cpu"), "1x", "schema", "cpu"),
    "a group without a name": ((*_GROUP, "groupName"), _GONE, "schema", "groupName"),
    "a head without a template": ((*_HEAD, "template"), _GONE, "schema", "template"),
    "a backoff below none": ((*_JOB, "backoffLimit"), -1, "operator", "backoffLimit"),
    "an autoscaler of no version": ((*_CLUSTER, "autoscalerOptions"), {"version": "v3"}, "schema", "version"),
    "a manager that is none": ((*_JOB, "managedBy"), "someone", "cel", "managedBy"),
    "a deletion strategy of half": (
        (*_JOB, "deletionStrategy"),
        {"onSuccess": {"policy": "DeleteCluster"}},
        "cel",
        "deletionStrategy",
    ),
    "a toleration of no operator": ((*_POD, "tolerations", 0, "value"), 5, "builtin", "tolerations"),
    "a port that is text": ((*_BOX, "ports", 0, "containerPort"), "8080", "builtin", "containerPort"),
    "a mount without a path": ((*_BOX, "volumeMounts", 0, "mountPath"), _GONE, "builtin", "mountPath"),
    "a misspelt field of the ConfigMap": (("ConfigMap", "binarydata"), {}, "builtin", "binarydata"),
    "a ConfigMap of numbers": (("ConfigMap", "data", "job.yaml"), 5, "builtin", "job.yaml"),
    "a name too long": (("RayJob", "metadata", "name"), "x" * 48, "operator", "47 characters"),
    "a name with capitals": (("RayJob", "metadata", "name"), "Extract", "operator", "DNS-1035"),
    "a name that begins with a digit": (("RayJob", "metadata", "name"), "8b", "operator", "DNS-1035"),
    "a ttl without shutdown": ((*_JOB, "shutdownAfterJobFinishes"), False, "operator", "ttlSecondsAfterFinished"),
    "a mode that is none": ((*_JOB, "submissionMode"), "Bogus", "operator", "submissionMode"),
    "a cluster and a selector": ((*_JOB, "clusterSelector"), {"a": "b"}, "operator", "clusterSelector"),
    "a sidecar with a submitter": ((*_JOB, "submissionMode"), "SidecarMode", "operator", "submitterPodTemplate"),
    "a backoff of an interactive job": ((*_JOB, "submissionMode"), "InteractiveMode", "operator", "backoffLimit"),
    "an environment that is no YAML": ((*_JOB, "runtimeEnvYAML"), "a: [", "operator", "runtimeEnvYAML"),
    "more replicas than the most": ((*_GROUP, "replicas"), 9, "operator", "replicas"),
    "fewest above most": ((*_GROUP, "minReplicas"), 9, "operator", "minReplicas above"),
    "labels among the start parameters": ((*_GROUP, "rayStartParams", "labels"), "a=b", "operator", "labels"),
    "CPUs said twice": ((*_HEAD, "resources"), {"CPU": "0"}, "operator", "num-cpus"),
    "an autoscaled pod that restarts": ((*_POD, "restartPolicy"), "Always", "operator autoscaled", "restartPolicy"),
    "an autoscaler said twice": (
        (*_HEAD_BOX, "env", 0, "name"),
        "RAY_enable_autoscaler_v2",
        "operator autoscaled",
        "RAY_enable_autoscaler_v2",
    ),
    "no shared memory": (_SHM, {}, "ours", "/dev/shm"),
    "shared memory on disk": ((*_SHM, "medium"), "", "ours", "/dev/shm"),
    "shared memory without a limit": ((*_SHM, "sizeLimit"), _GONE, "ours", "/dev/shm"),
    "shared memory mounted elsewhere": ((*_BOX, "volumeMounts", 0, "mountPath"), "/shm", "ours", "/dev/shm"),
    "shared memory larger than the pod": ((*_SHM, "sizeLimit"), "2Ti", "ours", "larger than the pod"),
    "shared memory for fewer arenas": ((*_SHM, "sizeLimit"), "20Gi", "ours", "too small for 8 arenas"),
    "an object store as large as Ray likes": (
        (*_GROUP, "rayStartParams", "object-store-memory"),
        _GONE,
        "ours",
        "object store",
    ),
    "a head that takes actors": ((*_HEAD, "rayStartParams", "num-cpus"), _GONE, "ours", "num-cpus"),
    "a head with GPUs": ((*_HEAD_BOX, "resources", "limits", "nvidia.com/gpu"), "1", "ours", "head: asks for GPUs"),
    "workers without GPUs": ((*_BOX, "resources", "limits", "nvidia.com/gpu"), _GONE, "ours", "no GPUs"),
    "too few workers": ((*_GROUP, "maxReplicas"), 3, "ours", "room for 24 of 32 engines"),
    "GPU nodes that are not tolerated": ((*_POD, "tolerations"), [], "ours", "taint"),
    "a grace shorter than a drain": ((*_POD, "terminationGracePeriodSeconds"), 30, "ours", "does not outlast"),
    "a grace shorter than the hook": ((*_HEAD_POD, "terminationGracePeriodSeconds"), 90, "ours", "preStop hook may"),
    "a head that does not drain": ((*_HEAD_BOX, "lifecycle"), _GONE, "ours", "no preStop"),
    "a stop that kills": ((*_JOB, "runtimeEnvYAML"), "", "ours", "RAY_JOB_STOP_WAIT_TIME_S"),
    "an entrypoint that reads another file": ((*_JOB, "entrypoint"), "python -m ray_extract.run", "ours", "entrypoint"),
    "a job file that is not mounted": ((*_HEAD_BOX, "volumeMounts", -1, "name"), "shm", "ours", "job files"),
    "another ConfigMap": (("ConfigMap", "metadata", "name"), "other", "ours", "job files"),
    "another image": ((*_BOX, "image"), "ray-extract:0.0.9", "ours", "in one cluster"),
    "metrics at another port": ((*_BOX, "ports", 0, "containerPort"), 9090, "ours", "the port metrics"),
    "a monitor of a port that is not there": (
        ("PodMonitor", "spec", "podMetricsEndpoints", 0, "port"),
        "metric",
        "ours",
        "no port metric",
    ),
    "a monitor of other pods": (
        ("PodMonitor", "spec", "selector", "matchLabels", "app.kubernetes.io/name"),
        "ray",
        "ours",
        "does not select",
    ),
    "pods that run as root": ((*_POD, "securityContext", "runAsNonRoot"), False, "ours", "root"),
    "a job that stays": ((*_JOB, "shutdownAfterJobFinishes"), _GONE, "ours", "keeps its GPUs"),
}


def _put(objects: Objects, path: tuple[Any, ...], value: Any) -> None:
    at: Any = objects
    for key in path[:-1]:
        at = at[key]
    if value is _GONE:
        del at[path[-1]]
    else:
        at[path[-1]] = value


def _faults(objects: Objects, who: str) -> list[str]:
    if who == "ours":
        return checks.our_faults(list(objects.values()))
    if who == "builtin":
        return [*checks.builtin_faults(objects["ConfigMap"]), *checks.builtin_faults(objects["RayJob"])]
    look: Callable[[Objects], list[str]] = getattr(checks, f"{who}_faults")
    return look(objects["RayJob"])


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_noticed(name: str) -> None:
    path, value, who, text = MISTAKES[name]
    who, _, autoscaled = who.partition(" ")
    objects = by_kind(manifests.job_objects(*checked(*(["kubernetes.autoscaler=true"] if autoscaled else []))))
    assert _faults(objects, who) == []
    _put(objects, path, value)
    assert [fault for fault in _faults(objects, who) if text in fault] != []


def test_thirty_mistakes_at_least_are_tried() -> None:
    assert len(MISTAKES) >= 30


# Sizes


@pytest.mark.parametrize(
    ("keep", "shard", "max_rows", "rows"),
    [
        ("all", 1 << 20, 8192, [(8192, 8192)] * 4),  # each row larger than a shard
        ("all", 2 << 30, 8192, [(8192, 8192)] * 40),
        ("all", 2 << 30, 8192, [(3, 3)] * 30000),  # the tables of the most rows
        ("supervised", 1 << 20, 8192, [(8192, 0)] * 25000),  # ids and masks of tokens whose states are not stored
    ],
)
def test_no_plan_needs_a_larger_arena(keep: str, shard: int, max_rows: int, rows: list[tuple[int, int]]) -> None:
    job, shape = checked(f"output.shard_bytes={shard}", f"capture.keep={keep}", f"output.max_rows={max_rows}")
    assert token_limit(job, shape) == 8192
    boundaries = resolve_boundaries(job.capture.boundaries, shape.num_layers)
    lengths = Lengths.of(RowLength(row, tokens, kept, True) for row, (tokens, kept) in enumerate(rows))
    token_bytes = run.token_bytes(job, shape, boundaries)
    units = list(plan_units([lengths], token_bytes=token_bytes, shard_bytes=shard, max_rows=max_rows))
    assert len(units) > job.run.units_in_flight
    assert run.arena_size(units, job.run.units_in_flight) <= manifests.arena_bound(job, shape)


@pytest.mark.parametrize(
    ("count", "tp", "nodes", "engines", "gpus"),
    [(32, 1, 4, 8, 8), (1, 1, 1, 1, 1), (9, 1, 2, 5, 5), (3, 8, 3, 1, 8), (5, 4, 3, 2, 8), (3, 3, 2, 2, 6)],
)
def test_engines_are_spread_over_as_few_nodes_as_hold_them(
    count: int, tp: int, nodes: int, engines: int, gpus: int
) -> None:
    size = manifests.sizes(*checked(f"engine.count={count}", f"engine.tp_size={tp}"))
    assert (size.nodes, size.engines, size.gpus) == (nodes, engines, gpus)
    assert size.shm >= engines * size.arena


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["engine.tp_size=16"], "engine.tp_size"),
        (["kubernetes.node_memory=100GiB"], "kubernetes.node_memory"),
        (["kubernetes.node_cpus=7"], "kubernetes.node_cpus"),
        (["engine.gpus=0"], "engine.gpus"),
        (["run.address=10.0.0.1:6379"], "run.address"),
        (["model.path=/elsewhere/model"], "model.path"),
        (["model.tokenizer=./tokenizer/here"], "model.tokenizer"),
        (["dataset.paths=rows.jsonl"], "dataset.paths"),
        (["dataset.chat_template=/tmp/template.jinja"], "dataset.chat_template"),
        (["output.url=states"], "output.url"),
        (["output.url=/models/states"], "read_only = false"),
        (["output.storage_options={secret_access_key: abc}"], "output.storage_options.secret_access_key"),
        (["dataset.storage_options={client_kwargs: {aws_session_token: abc}}"], "dataset.storage_options"),
        (["output.url=s3://key:abc@bucket/states"], "output.url"),
        (["dataset.paths=s3://key:abc@bucket/rows.jsonl"], "dataset.paths"),
        (["kubernetes.env={HF_TOKEN: abc}"], "kubernetes.env.HF_TOKEN"),
        (["kubernetes.volumes=[{mount: /models, claim: a, host_path: /b}]"], "kubernetes.volumes"),
        (["kubernetes.volumes=[{mount: /models}, {mount: /models}]"], "kubernetes.volumes"),
        (["kubernetes.name=Extract"], "kubernetes.name"),
        ([f"kubernetes.name={'x' * 48}"], "kubernetes.name"),
        (["kubernetes.nmae=x"], "did you mean name"),
        (["kubernetes.credentials_secret=My_Secret"], "kubernetes.credentials_secret = 'My_Secret': no object"),
        (["kubernetes.credentials_secret=-store"], "kubernetes.credentials_secret = '-store': no object"),
        (["kubernetes.credentials_secret=a..b"], "kubernetes.credentials_secret"),
        (["kubernetes.credentials_secret=''"], "kubernetes.credentials_secret"),
        ([f"kubernetes.credentials_secret={'x' * 254}"], "kubernetes.credentials_secret"),
        (["kubernetes.service_account=Extractor"], "kubernetes.service_account = 'Extractor': no object"),
        (["kubernetes.redis_secret=redis/password"], "kubernetes.redis_secret = 'redis/password': no object"),
        (["kubernetes.volumes=[{mount: /models, claim: Models}]"], "kubernetes.volumes.0.claim = 'Models': no object"),
        (["kubernetes.volumes=[{mount: /models, host_path: models}]"], "kubernetes.volumes.0.host_path = 'models'"),
        (["kubernetes.volumes=[{mount: /models, host_path: /mnt/../etc}]"], "kubernetes.volumes.0.host_path"),
        (["kubernetes.node_labels={a b: c}"], "'a b' is no label"),
        (["kubernetes.node_labels={Nvidia.com/gpu: c}"], "'Nvidia.com/gpu' is no label"),
        (["kubernetes.node_labels={/gpu: c}"], "'/gpu' is no label"),
        (["kubernetes.node_labels={gpu: NVIDIA H200}"], "gpu: 'NVIDIA H200' is no label's value"),
        ([f"kubernetes.node_labels={{gpu: {'x' * 64}}}"], "is no label's value"),
        (["kubernetes.redis_address=redis"], "kubernetes.redis_address = 'redis': give host:port"),
        (["kubernetes.redis_address=redis:70000"], "kubernetes.redis_address = 'redis:70000'"),
        (["kubernetes.redis_address=http://redis:6379"], "kubernetes.redis_address"),
        (["kubernetes.redis_address=':6379'"], "kubernetes.redis_address"),
    ],
)
def test_a_job_that_pods_cannot_run_is_refused_by_name(overrides: list[str], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        manifests.sizes(*checked(*overrides))
    assert named in str(caught.value)
    assert "abc" not in str(caught.value)


@pytest.mark.parametrize(
    "override",
    [
        "output.storage_options={aws_sse_kms_key_id: abc}",
        "engine.env={TOKENIZERS_PARALLELISM: 'false'}",
        "model.path=Qwen/Qwen3-8B",
        "model.path=s3://models/Qwen3-8B",
        "kubernetes.credentials_secret=store.2-a",
        "kubernetes.node_labels={cloud.google.com/gke-accelerator: nvidia-h100-80gb, a_b.c: '', gpu: 'true'}",
        "kubernetes.redis_address=rediss://redis.ray.svc.cluster.local:6379",
        "kubernetes.redis_address='[fd00::1]:6379'",
        "kubernetes.volumes=[{mount: /models, host_path: /mnt/models..v2}]",
    ],
)
def test_what_is_no_secret_and_no_place_is_let_in(override: str) -> None:
    manifests.sizes(*checked(override))


def test_a_model_that_is_elsewhere_is_asked_for_by_its_config() -> None:
    with pytest.raises(ConfigError, match="--model-config"):
        manifests.checked(load_job(ROOT / COMMAND[2]), None)


def test_the_job_file_is_the_job_without_what_is_for_kubernetes(tmp_path: Path) -> None:
    job, _ = checked("capture.dtype=float8_e4m3", "run.drain_s=90")
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(manifests.job_file(job)))
    there = load_job(path)
    assert there == job.model_copy(update={"kubernetes": there.kubernetes})
    assert "kubernetes" not in manifests.job_file(job)


def test_weights_from_a_store_are_copied_to_the_cache_and_not_into_a_pods_image() -> None:
    def cached(*overrides: str) -> str | None:
        found: str | None = manifests.job_file(checked(*overrides)[0])["model"].get("cache_dir")
        return found

    assert cached("model.path=s3://models/Qwen3-8B") == "/cache/models"
    assert cached("model.path=s3://models/Qwen3-8B", "model.cache_dir=/models") == "/models"
    assert cached() is None


def test_a_preset_is_carried_out_before_the_pods_read_the_job() -> None:
    job, _ = checked("capture={preset: specforge-eagle3}")
    capture = manifests.job_file(job)["capture"]
    assert "preset" not in capture
    assert capture["boundaries"] == [2, 18, 33]


def test_without_a_folder_the_command_prints_the_objects(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert cli.main(COMMAND) == 0
    assert [item["kind"] for item in yaml.safe_load_all(capsys.readouterr().out)] == [
        "ConfigMap",
        "RayJob",
        "PodMonitor",
        "PrometheusRule",
    ]
    assert cli.main([*COMMAND, "--cluster"]) == 0
    assert "kind: RayCluster" in capsys.readouterr().out


def test_a_folder_that_cannot_be_written_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    (tmp_path / "file").write_text("")
    assert cli.main([*COMMAND, "--output", str(tmp_path / "file")]) == 2
    assert "--output" in capsys.readouterr().err


# Before a pod ends


class _Status:
    def __init__(self, over: bool) -> None:
        self.over = over

    def is_terminal(self) -> bool:
        return self.over


class _Submitted:
    def __init__(self, submission_id: str | None, over: bool) -> None:
        self.submission_id, self.status = submission_id, _Status(over)


class _Client:
    """Jobs by id, which are over at the second look after they were told to stop."""

    def __init__(self, **jobs: bool) -> None:
        self.jobs, self.stopped, self.looks = jobs, list[str](), 0

    def list_jobs(self) -> list[_Submitted]:
        return [_Submitted(None, False), *(_Submitted(*job) for job in self.jobs.items())]

    def stop_job(self, job: str) -> None:
        self.stopped.append(job)

    def get_job_status(self, job: str) -> _Status:
        self.looks += 1
        return _Status(self.looks > 1)


def test_a_head_stops_what_runs_and_waits_until_it_has_stopped() -> None:
    client, slept = _Client(running=False, done=True), list[float]()
    assert prestop.wait(prestop.stop_jobs(client), 60, slept.append)
    assert client.stopped == ["running"]
    assert slept == [1]


def test_a_worker_goes_on_while_there_is_an_arena(tmp_path: Path) -> None:
    arena = tmp_path / f"{SHM_PREFIX}0123456789ab"
    arena.mkdir()
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            arena.rmdir()

    assert prestop.wait(lambda: prestop.no_arena(tmp_path), 60, sleep)
    assert len(slept) == 3


def test_a_pod_does_not_wait_for_longer_than_it_may() -> None:
    slept: list[float] = []
    assert not prestop.wait(lambda: False, 5, slept.append)
    assert len(slept) == 5


def test_the_hook_of_a_worker_does_not_load_ray() -> None:
    code = "import sys; from ray_extract import prestop; prestop.main(['worker', '0']); print('ray' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"


def test_the_patches_are_json() -> None:
    for name in VARIANTS:
        overlay = yaml.safe_load((K8S / "overlays" / name / "kustomization.yaml").read_text())
        assert overlay["patches"]
        for patch in overlay["patches"]:
            assert {step["op"] for step in json.loads(patch["patch"])} <= {"add", "remove", "replace"}
