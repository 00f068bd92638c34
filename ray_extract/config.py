"""The job, as one frozen tree. The only home of defaults; unknown keys are refused.

A job is a YAML file and `key=value` overrides, merged by OmegaConf (so `${oc.env:HOME}` works) and checked by pydantic.
"""

import difflib
import re
import sys
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import pydantic
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import AfterValidator, BeforeValidator, ByteSize, ConfigDict, Field, NonNegativeInt, PositiveInt

import ray_extract
from ray_extract.errors import ConfigError

GIB = 1 << 30

_START_S = 900.0
_LOAD_BYTES_PER_S = 200e6


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _as_keep(value: str) -> str:
    if value not in ("all", "supervised", "last") and not re.fullmatch("random:[1-9][0-9]{0,8}", value):
        raise ValueError("must be all, supervised, last or random:K with a number K")
    return value


_DNS_LABEL = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_SUBDOMAIN = rf"{_DNS_LABEL}(\.{_DNS_LABEL})*"
_LABEL = "[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"


def _as_object_name(value: str) -> str:
    """RFC 1123, as Kubernetes wants the name of a Secret, a ServiceAccount or a claim."""
    if len(value) > 253 or not re.fullmatch(_SUBDOMAIN, value):
        raise ValueError(
            "no object of Kubernetes can have this name: use a-z, 0-9, - and ., and begin and end with one of a-z, 0-9"
        )
    return value


ObjectName = Annotated[str, AfterValidator(_as_object_name)]


def _as_labels(value: dict[str, str]) -> dict[str, str]:
    for key, text in value.items():
        prefix, slash, name = key.rpartition("/")
        if not re.fullmatch(_LABEL, name) or (slash and (len(prefix) > 253 or not re.fullmatch(_SUBDOMAIN, prefix))):
            raise ValueError(
                f"{key!r} is no label: give a name of up to 63 letters, digits, -, _ and ., or domain/name"
            )
        if text and not re.fullmatch(_LABEL, text):
            raise ValueError(f"{key}: {text!r} is no label's value: give up to 63 letters, digits, -, _ and .")
    return value


def _as_address(value: str) -> str:
    host, colon, port = value.removeprefix("rediss://").removeprefix("redis://").rpartition(":")
    known = re.fullmatch(r"[A-Za-z0-9]([-A-Za-z0-9.]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\]", host)
    if not colon or not known or not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < 1 << 16:
        raise ValueError("give host:port, such as redis:6379; its password belongs into kubernetes.redis_secret")
    return value


def _as_node_folder(value: str) -> str:
    if not value.startswith("/") or ".." in value.split("/"):
        raise ValueError("give an absolute path without .., such as /mnt/models")
    return value


class _Section(pydantic.BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)


class ModelConfig(_Section):
    """The target model: where its weights are and how they are read."""

    path: str
    """Folder of a Hugging Face checkpoint, present on every node; or a URL (`s3://bucket/prefix`, `file:///nfs/model`)
    from which each node copies it once to `cache_dir`; or a hub name where a hub can be reached."""
    cache_dir: str = "~/.cache/ray_extract/models"
    """Folder of each node for checkpoints of URLs, best on a local disk; what is there stays until you delete it."""
    storage_options: dict[str, Any] = Field(default_factory=dict, repr=False)
    """Options of the store of such a URL, as output.storage_options; prefer the environment for credentials."""
    tokenizer: str | None = None
    """Folder or hub name of the tokenizer; the model's own when absent. Not needed for `input_ids` data sets."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Type of weights and activations, so of the stored states; `auto` is the checkpoint's own."""
    load_format: Literal["auto", "safetensors", "dummy"] = "auto"
    """`dummy` gives random weights, for measuring speed only."""
    quantization: str | None = None
    """SGLang's quantization method, when the checkpoint does not name it."""
    trust_remote_code: bool = False
    """Run Python code that the checkpoint ships."""


class FieldNames(_Section):
    """Names of the fields in the input records; the first one that a record has decides its kind."""

    messages: Annotated[tuple[str, ...], BeforeValidator(_as_list)] = ("messages", "conversations")
    """Conversations, in OpenAI (`role`, `content`) or ShareGPT (`from`, `value`) spelling."""
    system: str = "system"
    """A conversation's system prompt, where it is no turn of it."""
    tools: str = "tools"
    """A conversation's tools, a list or its JSON, which the template gets."""
    text: str = "text"
    """Plain text; every token is supervised."""
    input_ids: str = "input_ids"
    """Ready token ids."""
    loss_mask: str = "loss_mask"
    """0 or 1 for each ready token id; all 1 when absent."""


class DatasetConfig(_Section):
    """Where the prompts come from and how they become token ids."""

    paths: Annotated[tuple[str, ...], BeforeValidator(_as_list)] = Field(min_length=1)
    """Files or globs, local or fsspec URLs, read in this order (globs sorted), or a folder that `save_to_disk` of
    Hugging Face `datasets` wrote."""
    format: Literal["auto", "jsonl", "json", "parquet", "arrow"] = "auto"
    """`auto` decides by the file's ending; `json` is an array of records, or lines."""
    damaged: Literal["refuse", "keep"] = "refuse"
    """What to do with a file that breaks off or is malformed as a whole: refuse the data set, or keep the records
    before that; the rest then counts as one skipped record. A malformed record is skipped and counted in any case."""
    fields: FieldNames = FieldNames()
    """Field names of the input records."""
    chat_template: str | None = None
    """A Jinja file to use in place of the tokenizer's chat template."""
    tool_arguments: Literal["object", "string"] = "object"
    """As what the template gets the arguments of tool calls: most take objects; DeepSeek's takes their JSON."""
    mask: Literal["assistant", "last_assistant", "all"] = "assistant"
    """Which tokens of a conversation are supervised (loss mask 1)."""
    max_tokens: PositiveInt | None = None
    """Longest row in tokens; the model's own context length when absent."""
    overlong: Literal["skip", "right", "left", "refuse"] = "skip"
    """What to do with longer rows: skip them, cut them after masking at their end or at their beginning, or refuse the
    data set."""
    min_tokens: PositiveInt = 1
    """Skip shorter rows."""
    min_supervised: NonNegativeInt = 0
    """Skip rows with fewer supervised tokens."""
    limit: Annotated[int, Field(gt=0, le=sys.maxsize)] | None = None
    """Read only this many records."""
    sample: float = Field(default=1.0, gt=0, le=1)
    """Use about this part of the records, chosen at random."""
    dedup: bool = False
    """Skip rows that have the token ids and the mask of an earlier one."""
    shuffle: bool = False
    """Put the rows into a random order, so that each shard is a random sample; else they keep that of the input."""
    seed: NonNegativeInt = 0
    """Of what is random here."""
    processes: PositiveInt | Literal["cluster"] | None = None
    """Processes of the driver's node that tokenize, or `cluster`: all CPUs of the Ray cluster do. When absent, these if
    it has more than one node, else the driver alone. The rows are the same in any case."""
    storage_options: dict[str, Any] = Field(default_factory=dict, repr=False)
    """Passed to fsspec; prefer the environment for credentials."""


class EngineConfig(_Section):
    """The engines: how many, on what, with which SGLang options."""

    kind: Literal["sglang", "simulated"] = "sglang"
    """`simulated` writes made-up states without a model; it proves nothing about capture."""
    count: PositiveInt = 1
    """Engines, each in its own Ray actor."""
    device: Literal["cuda", "cpu"] = "cuda"
    """`cpu` is for trying things out and for tests."""
    tp_size: PositiveInt = 1
    """GPUs that share one copy of the model."""
    dp_size: PositiveInt = 1
    """Data-parallel schedulers of one engine."""
    enable_dp_attention: bool = False
    """Data parallelism in the attention only (DeepSeek, Kimi); then dp_size divides tp_size."""
    gpus: NonNegativeInt | None = None
    """GPUs that an actor asks Ray for; tp_size x dp_size when absent (tp_size with DP attention), 0 on the CPU."""
    cpus: float = Field(default=1.0, ge=0)
    """CPUs that an actor asks Ray for."""
    chunked_prefill_size: PositiveInt = 8192
    """Most tokens in one forward pass."""
    context_length: PositiveInt | None = None
    """SGLang's context length; the model's own when absent."""
    args: dict[str, Any] = Field(default_factory=dict)
    """More arguments of sglang.Engine; those that would break capture are refused by name."""
    env: dict[str, str] = Field(default_factory=dict, repr=False)
    """Environment variables of the engine's processes."""
    allow_untested_sglang: bool = False
    """Run on a version of SGLang that the truth tests have not seen."""
    start_timeout_s: float | None = Field(default=None, gt=0)
    """Give up on an engine that is not ready after this many seconds, not counting the copying of its model; when
    absent, see start_timeout."""
    stall_timeout_s: float = Field(default=600, gt=0)
    """Restart an engine of which a data-parallel rank has rows in flight but captures no token for this many seconds,
    and replace a worker that does not answer for as long."""

    def start_timeout(self, weight_bytes: int = 0) -> float:
        """Seconds that an engine gets to be ready: 900, and one for each 200 MB of weights, unless the job says it.

        A cold cache reads weights at the speed of the disk below, and 200 MB/s is that of a cloud's ordinary network
        disk: 600 GB get 65 minutes. The 900 are for what does not depend on size: imports, kernels that are compiled
        on first use, the ranks' meeting, the canary.

        Args:
            weight_bytes: of the checkpoint.
        """
        return self.start_timeout_s or _START_S + weight_bytes / _LOAD_BYTES_PER_S


class CaptureConfig(_Section):
    """Which states are stored. A boundary b is the residual stream that enters layer b."""

    preset: str | None = None
    """A trainer and strategy of presets.py, such as `specforge-eagle3`: sets boundaries, final and keep to fit it."""
    draft_config: str | None = None
    """The draft's config.json for `preset`, whose layer ids give the boundaries; the trainer's default when absent."""

    boundaries: Literal["eagle3"] | tuple[PositiveInt, ...] = "eagle3"
    """Boundaries to store, ascending; `eagle3` is {2, N//2, N-3} for N layers, and N is what the final norm reads."""
    final: bool = True
    """Also store what enters the LM head: the last state after the final norm."""
    dtype: Literal["model", "float8_e4m3"] = "model"
    """How a state is stored: as the engine computes it, or, in half of bf16's bytes, as e4m3 with a scale a token."""
    keep: Annotated[str, AfterValidator(_as_keep)] = "all"
    """Store the states of `all` tokens of a row, of those whose loss mask is 1 (`supervised`), of the `last` one, or of
    K at random (`random:K`), which the row's ids and mask decide."""
    check: Literal["all", "sample", "off"] = "all"
    """Recompute the digests of every row, of one row in sixteen, or of none, before a shard is uploaded."""

    def stored_dtype(self, model_dtype: str) -> str:
        """Torch's name of what states are stored as, which `model_dtype` is if `dtype` says nothing else."""
        return model_dtype if self.dtype == "model" else self.dtype


class OutputConfig(_Section):
    """Where the shards go and how they look."""

    url: str
    """A folder, or an object-store URL (`s3://bucket/prefix`). One run, one prefix."""
    format: Literal["parquet", "raw"] = "parquet"
    """`raw` is one safetensors file a shard, uploaded as it lies in memory; Parquet is for readers everywhere."""
    shard_bytes: Annotated[ByteSize, Field(gt=0)] = ByteSize(1 * GIB)
    """States in one shard, about; a larger row gets a shard of its own."""
    max_rows: PositiveInt = 8192
    """Most rows in one shard."""
    storage_options: dict[str, Any] = Field(default_factory=dict, repr=False)
    """Options of the store (for S3: endpoint, region ...); prefer the environment for credentials."""
    outage_s: float = Field(default=600, ge=0)
    """How long a finished shard, or a commit, waits for a store that fails in ways that may pass."""
    head: bool = True
    """Also store the model's LM head, embedding and final norm as head.safetensors, for training without the model."""
    accept_weak_create: bool = False
    """Run on a store that ignores create-if-absent, at the risk of two drivers committing the same unit."""


class RunConfig(_Section):
    """How the driver behaves."""

    address: str | None = None
    """Ray's address; absent means the running cluster if there is one, else a local one."""
    units_in_flight: int = Field(default=2, ge=2)
    """Units an engine holds at once, at least: one being extracted, the others flushing or waiting. Of units that take
    it less than a second each it holds more, as many as fit into its arena beside one more."""
    arena_bytes: Annotated[ByteSize, Field(gt=0)] | None = None
    """Shared memory of each engine for shard images; when absent, what units_in_flight + 1 of the largest units need,
    or up to 256 MiB for up to 17 of them if they are small."""
    max_attempts: PositiveInt = 3
    """Attempts at a unit before it is given up; if its worker dies each time, it is split, to find the row at fault.
    The last attempt then, and at least the second, is alone in its worker."""
    max_engine_deaths: PositiveInt = 2
    """Deaths of its engine that a row survives before it is recorded as failed."""
    max_failed_rows: NonNegativeInt = 0
    """Failed rows that still count as success (exit code 0)."""
    drain_s: float = Field(default=60, ge=0)
    """After SIGTERM or SIGINT, wait this long for units in flight to be committed."""
    progress_s: float = Field(default=5, gt=0)
    """Seconds between progress lines."""
    log_format: Literal["text", "json"] = "text"
    """Of the log on standard error: lines for people, or one JSON object a line, with run, unit and attempt."""


class VolumeConfig(_Section):
    """A volume that every pod mounts: an empty folder of the pod if it names neither claim nor host_path."""

    mount: str = Field(pattern=r"^/[\w./-]*\w$")
    """Absolute path in the pods."""
    claim: ObjectName | None = None
    """A PersistentVolumeClaim that all nodes may mount at once (ReadOnlyMany or ReadWriteMany)."""
    host_path: Annotated[str, AfterValidator(_as_node_folder)] | None = None
    """A folder of the nodes, on each of them, the head's node among them."""
    read_only: bool = True
    """Mount a claim or host_path for reading only."""


class KubernetesConfig(_Section):
    """What `ray-extract manifests` cannot take from the other sections. A run does not look at it."""

    name: str = Field(default="ray-extract", max_length=47, pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$")
    """Name of everything; KubeRay takes no longer one for a RayJob."""
    image: str = Field(default=f"ray-extract:{ray_extract.__version__}", min_length=1)
    """Image of all pods, as made by deploy/docker/Dockerfile."""
    gpus_per_node: PositiveInt = 8
    """GPUs of a node; an engine never spans two."""
    node_cpus: PositiveInt = 64
    """CPUs that a GPU node has for its pod."""
    node_memory: Annotated[ByteSize, Field(gt=0)] = ByteSize(1024 * GIB)
    """Memory that a GPU node has for its pod, with what is in /dev/shm."""
    node_labels: Annotated[dict[str, str], AfterValidator(_as_labels)] = Field(default_factory=dict)
    """Labels that a GPU node must have, such as `nvidia.com/gpu.product: NVIDIA-H200`."""
    volumes: tuple[VolumeConfig, ...] = ()
    """Where local paths of the job are, models above all. `/cache` is an empty folder unless it is listed."""
    credentials_secret: ObjectName | None = None
    """A Secret whose keys become environment variables: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, HF_TOKEN ..."""
    service_account: ObjectName | None = None
    """A ServiceAccount whose workload identity may read the data set and write the output."""
    env: dict[str, str] = Field(default_factory=dict, repr=False)
    """Environment variables of all pods that are no secrets: AWS_REGION, AWS_ENDPOINT_URL ..."""
    spot: Literal["aks", "eks", "gke", "karpenter"] | None = None
    """Workers on spot nodes only, by the labels and taints of this provider; the head stays off them."""
    autoscaler: bool = False
    """Ray's autoscaler (v2) makes and ends worker pods, from none to as many as the engines need."""
    redis_address: Annotated[str, AfterValidator(_as_address)] | None = None
    """host:port of a Redis that keeps Ray's state, so that a long-lived cluster outlives its head (RayCluster only)."""
    redis_secret: ObjectName | None = None
    """A Secret whose key `password` is that of Redis."""
    retries: NonNegativeInt = 2
    """Times that a RayJob that failed is begun again, in a new cluster; it goes on where it stopped."""
    keep_s: NonNegativeInt = 300
    """Seconds that the cluster of a finished RayJob is kept."""
    monitoring: bool = True
    """Also make a PodMonitor and a PrometheusRule, which need the Prometheus operator."""


class Job(_Section):
    """A whole job."""

    model: ModelConfig
    dataset: DatasetConfig
    engine: EngineConfig = EngineConfig()
    capture: CaptureConfig = CaptureConfig()
    output: OutputConfig
    run: RunConfig = RunConfig()
    kubernetes: KubernetesConfig = KubernetesConfig()

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> "Job":
        bounds = self.capture.boundaries
        if bounds != "eagle3" and list(bounds) != sorted(set(bounds)):
            raise ValueError(f"capture.boundaries = {list(bounds)}: must ascend without repeats, as they are stored")
        if bounds == () and not self.capture.final:
            raise ValueError("capture: no boundaries and final = false leave nothing to store")
        if self.engine.enable_dp_attention and self.engine.tp_size % self.engine.dp_size:
            raise ValueError(
                f"engine.dp_size = {self.engine.dp_size}: must divide tp_size = {self.engine.tp_size} with DP attention"
            )
        mounts = [volume.mount for volume in self.kubernetes.volumes]
        if len(mounts) != len(set(mounts)):
            raise ValueError(f"kubernetes.volumes: two of {', '.join(mounts)} are mounted in the same place")
        if any(volume.claim is not None and volume.host_path is not None for volume in self.kubernetes.volumes):
            raise ValueError("kubernetes.volumes: one has both claim and host_path; remove one of the two")
        return self

    @property
    def attention_ranks(self) -> int:
        """Schedulers that run each data-parallel rank's passes together."""
        engine = self.engine
        if engine.kind == "simulated":
            return 1
        return engine.tp_size // engine.dp_size if engine.enable_dp_attention else engine.tp_size

    @property
    def num_gpus(self) -> int:
        """GPUs that one engine's actor asks for."""
        engine = self.engine
        if engine.gpus is not None:
            return engine.gpus
        if engine.device == "cpu":
            return 0
        return engine.tp_size if engine.enable_dp_attention else engine.tp_size * engine.dp_size


def load_job(path: str | Path | None, overrides: list[str] | tuple[str, ...] = ()) -> Job:
    """Read a job file, apply `key=value` overrides, and check the result.

    Raises:
        ConfigError: one line for each wrong field: its name, its value and the way out.
    """
    where = str(path) if path else "command line"
    try:
        tree: Any = OmegaConf.load(path) if path else OmegaConf.create({})
    except FileNotFoundError:
        raise ConfigError(f"--config {path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: cannot be read: {error}") from None
    except OmegaConfBaseException as error:
        raise ConfigError(f"{where}: {error.full_key or ''}: a ${{...}} that is not well formed") from None
    except Exception as error:  # the YAML parser's family is not part of OmegaConf's interface
        raise ConfigError(f"{where}: not valid YAML: {_yaml_problem(error)}") from None
    if not OmegaConf.is_dict(tree):
        raise ConfigError(f"{where}: a job is a mapping with the sections {', '.join(Job.model_fields)}")
    for item in overrides:
        key, equals, _ = item.partition("=")
        if not key or not equals:
            raise ConfigError(f"{re.split('[=: ]', item)[0]!r}: an override looks like section.key=value")
        try:
            tree = OmegaConf.merge(tree, OmegaConf.from_dotlist([item]))
        except Exception as error:
            why = "" if _is_secret(key.split(".")) else f": {_yaml_problem(error)}"
            raise ConfigError(f"{key}: this override cannot be applied{why}") from None
    try:
        plain = OmegaConf.to_container(tree, resolve=True)
    except OmegaConfBaseException as error:
        key = str(error.full_key or "")
        # The first line may quote the value.
        why = "its ${...} cannot be resolved" if _is_secret(key.split(".")) else str(error).splitlines()[0]
        raise ConfigError(f"{where}: {key}: {why}") from None
    try:
        return Job.model_validate(plain)
    except pydantic.ValidationError as error:
        errors = error.errors()
        lines = dict.fromkeys(f"{where}: {_explain(e)}" for e in errors if not _is_lesser(e, errors))
        raise ConfigError("\n".join(lines)) from None


def _yaml_problem(error: Exception) -> str:
    """What is wrong and where, without the text around it, which may be a secret."""
    mark = getattr(error, "problem_mark", None)
    place = f" at line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
    return f"{getattr(error, 'problem', None) or str(error).splitlines()[0]}{place}"


def _is_secret(loc: list[str]) -> bool:
    return bool({"storage_options", "env"} & set(loc))


def _is_lesser(error: Any, errors: list[Any]) -> bool:
    """Whether an error is about `eagle3` where another one is about the same field as a list."""
    last = error["loc"][-1:]
    return bool(last and str(last[0]).startswith("literal[")) and any(
        e["loc"][: len(error["loc"]) - 1] == error["loc"][:-1] and e is not error for e in errors
    )


def _explain(error: Any) -> str:
    loc = [str(part) for part in error["loc"]]
    # Union members appear in the location as the type's name; they are no part of the user's key.
    name = ".".join(part for part in loc if not part.startswith(("literal[", "tuple[", "function-")))
    if error["type"] == "missing":
        return f"{name} is missing"
    if error["type"] == "extra_forbidden":
        known = _known_keys(loc[:-1])
        close = difflib.get_close_matches(loc[-1], known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}"
        return f"{name}: no such key; {hint}"
    if error["type"] == "model_type":
        return f"{name}: must be a mapping with the keys {', '.join(_known_keys(loc))}"
    message = str(error["msg"]).removeprefix("Value error, ")
    if error["type"] == "tuple_type":
        message = "must be a list" if len(loc) == len(name.split(".")) else "must be eagle3 or a list of boundaries"
    if not name:
        return message
    shown = "" if _is_secret(loc) else f" = {error['input']!r}"
    return f"{name}{shown}: {message[0].lower()}{message[1:]}"


def _known_keys(loc: list[str]) -> list[str]:
    model: type[pydantic.BaseModel] = Job
    for part in loc:
        annotation = model.model_fields[part].annotation
        candidates = [annotation, *get_args(annotation)]
        model = next(c for c in candidates if isinstance(c, type) and issubclass(c, pydantic.BaseModel))
    return list(model.model_fields)
