"""The job file: each mistake gives one line that names the field, the value and the way out, and no line a secret."""

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pydantic
import pytest
import yaml

from ray_extract.config import GIB, Job, load_job
from ray_extract.errors import ConfigError

GOOD = "model: {path: m}\ndataset: {paths: a.jsonl}\noutput: {url: out}\n"


def write(folder: Path, text: str) -> Path:
    path = folder / "job.yaml"
    path.write_text(text)
    return path


def refuse(folder: Path, text: str, *overrides: str) -> str:
    """The error's text, without the file's name."""
    path = write(folder, text)
    with pytest.raises(ConfigError) as caught:
        load_job(path, overrides)
    return str(caught.value).replace(f"{path}: ", "")


def test_the_smallest_job_has_the_documented_defaults(tmp_path: Path) -> None:
    job = load_job(write(tmp_path, GOOD))
    assert job.dataset.paths == ("a.jsonl",)
    assert job.capture.boundaries == "eagle3" and job.capture.final and job.capture.check == "all"
    assert job.output.shard_bytes == GIB and job.run.arena_bytes is None and job.run.max_failed_rows == 0


MISTAKES = {
    "engine.cuont=3": "engine.cuont: no such key; did you mean count?",
    "modle.path=3": "modle: no such key; did you mean model?",
    "model.zzz=3": (
        "model.zzz: no such key; known: path, cache_dir, storage_options, tokenizer, dtype, load_format, quantization, "
        "trust_remote_code"
    ),
    "dataset.fields.txt=a": "dataset.fields.txt: no such key; did you mean text?",
    "engine.count=zero": "engine.count = 'zero': input should be a valid integer, unable to parse string as an integer",
    "engine.count=0": "engine.count = 0: input should be greater than 0",
    "engine.count=3.5": "engine.count = 3.5: input should be a valid integer, got a number with a fractional part",
    "model.path=null": "model.path = None: input should be a valid string",
    "output.format=csv": "output.format = 'csv': input should be 'parquet' or 'raw'",
    "output.shard_bytes=12 parsecs": "output.shard_bytes = '12 parsecs': could not interpret byte unit: parsecs",
    "run.units_in_flight=1": "run.units_in_flight = 1: input should be greater than or equal to 2",
    "dataset.paths=null": "dataset.paths = None: must be a list",
    "capture.boundaries=all": "capture.boundaries = 'all': must be eagle3 or a list of boundaries",
    "capture.boundaries=3": "capture.boundaries = 3: must be eagle3 or a list of boundaries",
    "capture.boundaries=[2,0]": "capture.boundaries.1 = 0: input should be greater than 0",
    "capture.boundaries=[2,2]": "capture.boundaries = [2, 2]: must ascend without repeats, as they are stored",
    "capture.boundaries=[5,2]": "capture.boundaries = [5, 2]: must ascend without repeats, as they are stored",
    "engine=none": "engine: must be a mapping with the keys kind, count, ",
    "dataset.fields=x": "dataset.fields: must be a mapping with the keys messages, system, tools, text, input_ids, ",
    "dataset.limit=10000000000000000000": "dataset.limit = 10000000000000000000: input should be less than or equal to "
    "9223372036854775807",
    "dataset.sample=0": "dataset.sample = 0: input should be greater than 0",
    "engine.cpus=.inf": "engine.cpus = inf: input should be a finite number",
    "capture.keep=random:0": "capture.keep = 'random:0': must be all, supervised, last or random:K with a number K",
    "output.url=${nowhere}": "output.url: Interpolation key 'nowhere' not found",
    "output.url=${oc.env:RAY_EXTRACT_NOPE}": "output.url: KeyError raised while resolving interpolation: ",
    "model.path=[": "model.path: this override cannot be applied: ",
    "output=[1]": "output: this override cannot be applied: ",
    "nothing": "'nothing': an override looks like section.key=value",
    "=x": "'': an override looks like section.key=value",
}


@pytest.mark.parametrize("override", MISTAKES)
def test_a_mistake_gives_one_line_with_the_field_the_value_and_the_way_out(tmp_path: Path, override: str) -> None:
    text = refuse(tmp_path, GOOD, override)
    assert "\n" not in text
    expected = MISTAKES[override]
    assert text.startswith(expected) if expected.endswith((", ", ": ")) else text == expected


def test_several_mistakes_give_a_line_each(tmp_path: Path) -> None:
    assert refuse(tmp_path, "model: {}\noutput: {url: out, fromat: raw}\n").splitlines() == [
        "model.path is missing",
        "dataset is missing",
        "output.fromat: no such key; did you mean format?",
    ]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["capture.boundaries=[]", "capture.final=false"], "no boundaries and final = false leave nothing to store"),
        (
            ["engine.enable_dp_attention=true", "engine.tp_size=8", "engine.dp_size=3"],
            "engine.dp_size = 3: must divide tp_size = 8 with DP attention",
        ),
    ],
)
def test_fields_that_contradict_each_other_are_named(tmp_path: Path, overrides: list[str], expected: str) -> None:
    assert expected in refuse(tmp_path, GOOD, *overrides)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "model is missing\ndataset is missing\noutput is missing"),
        ("- a\n- b\n", "a job is a mapping with the sections model, dataset, engine, capture, output, run"),
        ("model: {path: m\n", "not valid YAML: "),
        ("a: b: c\n", "not valid YAML: mapping values are not allowed "),
        ("model: {path: m}\nmodel: {path: n}\n", "not valid YAML: found duplicate key model at line 2, column 1"),
        ("\x00", "not valid YAML: "),
    ],
)
def test_a_file_that_is_no_job_says_why(tmp_path: Path, text: str, expected: str) -> None:
    assert refuse(tmp_path, text).startswith(expected)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--config .*/no\.yaml: no such file"):
        load_job(tmp_path / "no.yaml")
    with pytest.raises(ConfigError, match=rf"--config {re.escape(str(tmp_path))}: cannot be read: .*directory"):
        load_job(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ConfigError, match="cannot be read: 'utf-8' codec"):
        load_job(tmp_path / "binary.yaml")


def test_overrides_are_applied_in_order_over_the_file(tmp_path: Path) -> None:
    overrides = [
        *("engine.count=2", "engine.count=3", "capture.boundaries=[1,4]", "output.shard_bytes=256MiB"),
        *("engine.args.mem_fraction_static=0.7", "dataset.paths=[b.jsonl,c.jsonl]", "model.path=a=b"),
    ]
    job = load_job(write(tmp_path, GOOD + "engine: {count: 9, tp_size: 2}\n"), overrides)
    assert (job.engine.count, job.engine.tp_size) == (3, 2)
    assert job.capture.boundaries == (1, 4) and job.output.shard_bytes == 256 << 20
    assert job.engine.args == {"mem_fraction_static": 0.7}
    assert job.dataset.paths == ("b.jsonl", "c.jsonl") and job.model.path == "a=b"


def test_a_job_can_come_from_overrides_alone() -> None:
    job = load_job(None, ["model.path=m", "dataset.paths=a.jsonl", "output.url=out"])
    assert job.output.url == "out"
    with pytest.raises(ConfigError, match="command line: model is missing"):
        load_job(None)


def test_values_are_taken_from_the_environment_and_other_fields(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_EXTRACT_WHERE", "s3://bucket")
    job = load_job(
        write(tmp_path, GOOD),
        ["output.url=${oc.env:RAY_EXTRACT_WHERE}/${model.path}", "engine.env.A=${oc.env:NOPE_,x}"],
    )
    assert job.output.url == "s3://bucket/m" and job.engine.env == {"A": "x"}


# Secrets

SECRET = "hunter2secret"
LEAKS = [
    *(f"{section}={SECRET}" for section in ("output.storage_options", "dataset.storage_options", "engine.env")),
    *(f"{section}=[{SECRET}]" for section in ("output.storage_options", "dataset.storage_options", "engine.env")),
    f"engine.env.A={{B: {SECRET}}}",
    f"engine.env.A=${{{SECRET}",
    f"output.storage_options.key=${{{SECRET}",
    f"output.storage_options.key=${{{SECRET}}}",
    f"output.storage_options.key=[{SECRET}",
    f"output.storage_options.key={SECRET}: a: b",
    f"output.storage_options.key=%{SECRET}",
    f"output.storage_options.key:{SECRET}",
    f"output={SECRET}",
    f"outptu.storage_options.key={SECRET}",
    f"output.storage_option.key={SECRET}",
    f"output.storage_options.key={SECRET} engine.count=0",
]


@pytest.mark.parametrize("pure", [False, True], ids=["libyaml", "pure Python YAML"])
@pytest.mark.parametrize("override", LEAKS)
def test_no_error_shows_a_secret(tmp_path: Path, override: str, pure: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pure parser quotes the text around a mistake."""
    if pure:
        monkeypatch.setattr("omegaconf._yaml.BaseLoader", yaml.SafeLoader)
    text = refuse(tmp_path, GOOD, override, "engine.cuont=1")
    assert SECRET not in text and text


@pytest.mark.parametrize("field", ["storage_options: {key: %s}", "storage_options: [%s", "storage_options: ${%s"])
def test_no_error_about_a_file_shows_a_secret(tmp_path: Path, field: str) -> None:
    for value in (f"[{{{field % SECRET}}}]", f"{{url: out, cuont: 1, {field % SECRET}}}", f"{{{field % SECRET}}}"):
        assert SECRET not in refuse(tmp_path, f"model: {{path: m}}\ndataset: {{paths: a}}\noutput: {value}\n")


@pytest.mark.parametrize("value", [f"${{{SECRET}", f"${{{SECRET}}}", f"[{SECRET}", f"'{SECRET}", f"{SECRET}: a: b"])
def test_no_error_about_a_value_in_a_file_shows_it(tmp_path: Path, value: str) -> None:
    text = refuse(tmp_path, f"{GOOD}engine:\n  env:\n    KEY: {value}\n    B: 1\n")
    assert SECRET not in text and ("engine.env" in text or "line " in text)


def test_no_repr_shows_a_secret(tmp_path: Path) -> None:
    job = load_job(write(tmp_path, GOOD), [f"{s}.key={SECRET}" for s in ("output.storage_options", "engine.env")])
    assert job.output.storage_options == {"key": SECRET}
    for text in (repr(job), str(job), f"{job.output}", repr(job.engine)):
        assert SECRET not in text


# The tree itself


def sections(model: type[pydantic.BaseModel] = Job) -> Iterator[type[pydantic.BaseModel]]:
    yield model
    for field in model.model_fields.values():
        if isinstance(field.annotation, type) and issubclass(field.annotation, pydantic.BaseModel):
            yield from sections(field.annotation)


@pytest.mark.parametrize("section", list(sections()), ids=lambda s: s.__name__)
def test_every_field_is_described_and_every_section_is_frozen_and_closed(section: type[pydantic.BaseModel]) -> None:
    assert section.__doc__
    assert section.model_config["extra"] == "forbid" and section.model_config["frozen"]
    if section is not Job:
        assert [name for name, field in section.model_fields.items() if not field.description] == []


def test_a_job_goes_through_json_to_another_process(tmp_path: Path) -> None:
    job = load_job(write(tmp_path, GOOD), ["capture.boundaries=[1,2]", "engine.args.x=[1]"])
    assert Job.model_validate(job.model_dump(mode="json")) == job


@dataclasses.dataclass(frozen=True)
class Gpus:
    """Engine fields, and the GPUs that an actor must ask for."""

    engine: dict[str, Any]
    expected: int


@pytest.mark.parametrize(
    "case",
    [
        Gpus({}, 1),
        Gpus({"tp_size": 4, "dp_size": 2}, 8),
        Gpus({"tp_size": 8, "dp_size": 2, "enable_dp_attention": True}, 8),
        Gpus({"device": "cpu", "tp_size": 2}, 0),
        Gpus({"tp_size": 4, "gpus": 0}, 0),
    ],
)
def test_an_actor_asks_for_the_gpus_that_its_engine_uses(case: Gpus) -> None:
    job = Job.model_validate(
        {"model": {"path": "m"}, "dataset": {"paths": "a"}, "output": {"url": "o"}, "engine": case.engine}
    )
    assert job.num_gpus == case.expected
