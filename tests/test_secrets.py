"""Whatever fails, no credential is shown: not in an error or its causes, nor in a log, nor by a command."""

import json
import logging
import os
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import servers
from faulty_proxy import Do, FaultyProxy

from ray_extract import cli, run
from ray_extract import s3 as s3_module
from ray_extract import store as store_module
from ray_extract.config import DatasetConfig
from ray_extract.dataset.source import read_records, source_fingerprint
from ray_extract.errors import RayExtractError
from ray_extract.readers.dataset import HiddenStates
from ray_extract.store import Store, open_store

PART = 5 << 20
# The marks of credentials, and what a URL makes of them.
SECRET, TOKEN, PASSWORD = "CANARY/secret+key", "CANARY/session+token==", "CANARY/password"
KEYS = {"access_key_id": "AKTEST", "secret_access_key": SECRET, "session_token": TOKEN}
REFUSALS = [Do.DENY, Do.ECHO, Do.EXPIRE, Do.SKEW, Do.NO_BUCKET, Do.QUOTA]


def shown(text: str) -> list[str]:
    """Lines that hold a credential, as it is or as a URL has it."""
    return [line for line in text.splitlines() if "CANARY" in line]


def told(error: BaseException) -> str:
    """All that an error and what led to it say, as a log would print it and as a program could."""
    parts = ["".join(traceback.format_exception(error))]
    seen: BaseException | None = error
    while seen is not None:
        parts.append(repr(seen))
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
    return "\n".join(parts)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (store_module, s3_module):
        monkeypatch.setattr(module, "PART_BYTES", PART)
    monkeypatch.setattr(s3_module, "_SLICE_BYTES", PART)
    monkeypatch.setattr(s3_module, "SINGLE_PUT_BYTES", 2 * PART)


@pytest.fixture
def proxy() -> Iterator[FaultyProxy]:
    """A server that only refuses."""
    with FaultyProxy("http://127.0.0.1:9") as proxy:
        yield proxy


@pytest.fixture(params=["options", "environment", "profile", "fsspec"])
def options(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Storage options, with the credentials where they may come from."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    if request.param == "options":
        return KEYS
    if request.param == "fsspec":
        return {**KEYS, "client": "fsspec"}
    if request.param == "environment":
        for name, value in KEYS.items():
            monkeypatch.setenv(f"AWS_{name.upper()}", value)
        return {}
    lines = [f"aws_{name} = {value}\n" for name, value in KEYS.items()]
    (tmp_path / "credentials").write_text("[default]\n" + "".join(lines))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    return {}


def operations(store: Store) -> list[Callable[[], object]]:
    data = b"x" * (3 * PART)
    return [
        lambda: store.put("key", b"x"),
        lambda: store.put("key", data, create=False),
        lambda: store.put_stream("key", [data], create=False),
        lambda: store.get("key"),
        lambda: store.get_range("key", 0, 9),
        lambda: store.head("key"),
        lambda: list(store.list("")),
        lambda: store.delete("key"),
    ]


@pytest.mark.parametrize("do", REFUSALS, ids=lambda do: do.name)
def test_no_error_of_a_store_shows_a_credential(
    do: Do, options: dict[str, Any], proxy: FaultyProxy, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    proxy.decide = lambda request: do
    options = {**options, "endpoint": proxy.endpoint}
    store = open_store("s3://bucket/out", options)
    refused = 0
    for act in (*operations(store), lambda: HiddenStates(store.url, storage_options=options)):
        try:
            act()
        except RayExtractError as error:
            refused += 1
            assert shown(told(error)) == []
    assert refused >= 6
    assert shown(caplog.text) == [] and shown(repr(store)) == []


def test_the_server_was_told_the_credentials_and_could_have_shown_them(proxy: FaultyProxy) -> None:
    """Or these tests could not fail."""
    proxy.decide = lambda request: Do.ECHO
    store = open_store("s3://bucket/out", {**KEYS, "endpoint": proxy.endpoint})
    for hidden in ("***", "SignatureDoesNotMatch"):
        with pytest.raises(RayExtractError, match=hidden.replace("*", r"\*")):
            store.get("key")


@pytest.mark.parametrize("client", ["obstore", "fsspec"])
def test_no_error_shows_the_password_of_an_endpoint(client: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    port = servers.free_ports(1)[0]
    for scheme in ("http://", "", "//"):
        endpoint = f"{scheme}user:{quote(PASSWORD, safe='')}@127.0.0.1:{port}"
        with pytest.raises(RayExtractError) as caught:
            open_store("s3://bucket/out", {**KEYS, "endpoint": endpoint, "client": client}).get("key")
        assert shown(told(caught.value)) == [] and shown(caplog.text) == []


@pytest.mark.parametrize(
    "url",
    [
        f"s3://user:{quote(PASSWORD, safe='')}@bucket/out",
        f"https://user:{quote(PASSWORD, safe='')}@127.0.0.1:9/out",
        f"https://127.0.0.1:9/out?X-Amz-Signature={PASSWORD}",
        f"nosuch://user:{quote(PASSWORD, safe='')}@host/out",
    ],
)
@pytest.mark.parametrize("command", ["status", "verify", "sweep", "export"])
def test_no_command_shows_a_credential_in_its_url(
    url: str, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--to", "specforge", "--out", str(tmp_path / "e")] if command == "export" else []
    assert cli.main([command, url, *more]) in (1, 2)
    out, err = capsys.readouterr()
    assert shown(out + err) == [] and err.startswith("error: ")


@pytest.mark.parametrize("do", REFUSALS, ids=lambda do: do.name)
@pytest.mark.parametrize("command", ["status", "verify", "sweep", "run"])
def test_no_command_shows_a_credential_of_its_options(
    do: Do, command: str, tmp_path: Path, proxy: FaultyProxy, capsys: pytest.CaptureFixture[str]
) -> None:
    proxy.decide = lambda request: do
    options = {**KEYS, "endpoint": proxy.endpoint}
    code = 3 if do is Do.EXPIRE else 2  # they may be renewed by the next try
    if command == "run":
        job = job_of(tmp_path, storage_options=options)
        assert run.main(["--config", str(job)]) == code
    else:
        flags = [part for name, value in options.items() for part in ("--option", f"{name}={value}")]
        assert cli.main([command, "s3://bucket/out", *flags]) == code
    out, err = capsys.readouterr()
    assert shown(out + err) == [] and "error: " in err


def job_of(folder: Path, **output: Any) -> Path:
    """A job over one row and a model of random weights."""
    (folder / "rows.jsonl").write_text('{"input_ids": [1, 2, 3]}\n')
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 8,
        "hidden_size": 16,
        "torch_dtype": "bfloat16",
        "max_position_embeddings": 64,
        "vocab_size": 50,
    }
    (folder / "config.json").write_text(json.dumps(config))
    job = {
        "model": {"path": str(folder), "load_format": "dummy"},
        "dataset": {"paths": str(folder / "rows.jsonl")},
        "engine": {"kind": "simulated"},
        "output": {"url": "s3://bucket/out", **output},
    }
    (folder / "job.yaml").write_text(json.dumps(job))
    return folder / "job.yaml"


@pytest.mark.parametrize(
    ("path", "options"),
    [
        ("s3://bucket/rows.jsonl", {"key": "AKTEST", "secret": SECRET, "token": TOKEN}),
        ("s3://bucket/*.jsonl", {"key": "AKTEST", "secret": SECRET, "token": TOKEN}),
        ("s3://bucket/rows.jsonl", {"key": SECRET, "secret": SECRET, "client_kwargs": TOKEN}),
        ("s3://bucket/rows.jsonl", {"key": "AKTEST", "secret": SECRET, "config_kwargs": {"retries": TOKEN}}),
        (f"ftp://user:{quote(PASSWORD, safe='')}@127.0.0.1:9/rows.jsonl", {}),
        (f"http://user:{quote(PASSWORD, safe='')}@127.0.0.1:9/rows.jsonl", {}),
        (f"http://127.0.0.1:9/rows.jsonl?X-Amz-Signature={quote(PASSWORD, safe='')}", {}),
        (f"http://127.0.0.1:9/rows.what?X-Amz-Signature={quote(PASSWORD, safe='')}", {}),
        ("nosuch://bucket/rows.jsonl", {"password": PASSWORD}),
        ("sftp://127.0.0.1/rows.jsonl", {"password": PASSWORD, "port": PASSWORD}),
    ],
)
@pytest.mark.parametrize("do", [Do.DENY, Do.ECHO], ids=lambda do: do.name)
def test_no_error_of_the_data_set_shows_a_credential(
    path: str, options: dict[str, Any], do: Do, proxy: FaultyProxy, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    proxy.decide = lambda request: do
    if path.startswith("s3:"):
        options = {"endpoint_url": proxy.endpoint, **options}
    if path.startswith("http:"):
        path = path.replace("127.0.0.1:9", proxy.endpoint.removeprefix("http://"))
    dataset = DatasetConfig.model_validate({"paths": path, "storage_options": options})
    for act in (lambda: source_fingerprint(dataset), lambda: list(read_records(dataset))):
        with pytest.raises(RayExtractError) as caught:
            act()
        assert shown(told(caught.value)) == []
    assert shown(caplog.text) == []
