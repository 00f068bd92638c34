"""What a trainer needs of the target model beside its states, so that it can do without the model.

head.safetensors, in the checkpoint's types:

    lm_head       [V, H]
    embed_tokens  [V, H]  absent where it is tied to lm_head
    norm          [H]     weight of the final norm, as the checkpoint stores it; how it is applied is the model's

and in its metadata `format` and `version`, `tied` (true or false), `architecture`, `model_fingerprint` (the run's),
`sha256` of all bytes behind the header, and `config`, the text of config.json.
"""

import hashlib
import itertools
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path

from ray_extract.checkpoint import HeadTensors, NotPlain, StoredTensor, find_head, head_files
from ray_extract.config import Job
from ray_extract.errors import AlreadyExists, ConfigError, ShardError
from ray_extract.layout import HEAD_KEY
from ray_extract.model import ModelShape
from ray_extract.staging import WEIGHTS, RemoteCheckpoint, is_url, stage_files
from ray_extract.store import Store
from ray_extract.tensors import ITEMSIZE, WRITTEN_AGAIN, Header, make_header, stored_header

log = logging.getLogger(__name__)

FORMAT, VERSION = "ray_extract head", "1"

_BLOCK = 32 << 20


def write_head(store: Store, job: Job, shape: ModelShape) -> bool:
    """Store the head, once, tensor by tensor in blocks; or log why there is none.

    Returns:
        Whether the output has a head now.

    Raises:
        ConfigError: a file of the checkpoint is missing or damaged.
        ShardError: there is a head already, and it is damaged or another model's.
        StoreError: the store failed.
    """
    if not job.output.head:
        return False
    try:
        reason = why_not(job)
        if reason is not None:
            raise NotPlain(reason)
        if is_url(job.model.path):
            remote = RemoteCheckpoint(job.model)
            names = head_files(Path(shape.path)) or {name for name in remote.names() if name.endswith(WEIGHTS)}
            stage_files(remote, names, job.model, shape.fingerprint)
        found = find_head(Path(shape.path))
    except NotPlain as why:
        log.info("no %s: %s", HEAD_KEY, why)
        return False
    if store.head(HEAD_KEY) is None:
        # The digest is in the header, which comes first; the checkpoint's files are local.
        header = head_header(found, shape, _config_text(shape), _sha256(_blocks(found)))
        try:
            store.put_stream(HEAD_KEY, itertools.chain([header.text], _blocks(found)))
        except AlreadyExists:
            pass  # another driver's, or ours after a lost answer
        else:
            log.info("%s: %.2f GiB", HEAD_KEY, header.nbytes / 2**30)
            return True
    there = read_header(store)
    if there.metadata["model_fingerprint"] != shape.fingerprint:
        raise ShardError(f"{store.url}/{HEAD_KEY}: of another model than the run's; {WRITTEN_AGAIN}")
    return True


def why_not(job: Job) -> str | None:
    """Why the checkpoint's head is not that of the states, or None if it is."""
    if job.model.load_format == "dummy":
        return "the model's weights are random (model.load_format = dummy)"
    if job.engine.kind == "simulated":
        return "the states are made up (engine.kind = simulated)"
    return None


def head_header(found: HeadTensors, shape: ModelShape, config: str, sha256: str) -> Header:
    """Header of the file. Pure.

    Args:
        found: the tensors in the checkpoint.
        shape: the model.
        config: text of its config.json.
        sha256: hex, of the tensors' bytes in the order of `ordered`.
    """
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "tied": str(found.tied).lower(),
        "architecture": shape.architecture,
        "model_fingerprint": shape.fingerprint,
        "sha256": sha256,
        "config": config,
    }
    places = [(name, tensor.place.dtype, tensor.place.shape) for name, tensor in ordered(found)]
    return make_header(places, metadata)


def ordered(found: HeadTensors) -> list[tuple[str, StoredTensor]]:
    """The tensors to store, by their names in the file: wider types first, so that each is aligned."""
    tensors = {"lm_head": found.lm_head, "embed_tokens": found.embed_tokens, "norm": found.norm}
    if found.tied:
        del tensors["embed_tokens"]
    return sorted(tensors.items(), key=lambda item: -ITEMSIZE[item[1].place.dtype])


def read_header(store: Store) -> Header:
    """The header of an output's head.

    Raises:
        NotFound: there is none.
        ShardError: it is damaged, or of another release.
        StoreError: the store failed.
    """
    header = stored_header(store, HEAD_KEY, FORMAT, VERSION)
    wanted = {"lm_head", "norm"} | (set() if header.metadata.get("tied") == "true" else {"embed_tokens"})
    if set(header.tensors) != wanted or not {"model_fingerprint", "sha256", "config"} <= set(header.metadata):
        raise ShardError(
            f"{store.url}/{HEAD_KEY}: damaged: it holds {', '.join(header.tensors)}, not "
            f"{', '.join(sorted(wanted))} and what describes them; {WRITTEN_AGAIN}"
        )
    return header


def head_problems(store: Store, fingerprint: str, hidden: int) -> Iterator[str]:
    """What is wrong with an output's head; reads all of it, in blocks. Nothing if there is none.

    Args:
        store: the output.
        fingerprint, hidden: of the run's model.
    """
    if store.head(HEAD_KEY) is None:
        return
    try:
        header = read_header(store)
    except ShardError as error:
        yield str(error)
        return
    if header.metadata["model_fingerprint"] != fingerprint:
        yield f"{HEAD_KEY}: of another model than the run's; {WRITTEN_AGAIN}"
    if header.tensors["norm"].shape != (hidden,):
        yield f"{HEAD_KEY}: norm has the shape {header.tensors['norm'].shape}, the states have {hidden} elements"
    starts = range(len(header.text), header.nbytes, _BLOCK)
    blocks = (store.get_range(HEAD_KEY, at, min(_BLOCK, header.nbytes - at)) for at in starts)
    if _sha256(blocks) != header.metadata["sha256"]:
        yield f"{HEAD_KEY}: its bytes are not those that were written; {WRITTEN_AGAIN}"


def _blocks(found: HeadTensors) -> Iterator[bytes]:
    for _, tensor in ordered(found):
        yield from tensor.blocks()


def _sha256(blocks: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for block in blocks:
        digest.update(block)
    return digest.hexdigest()


def _config_text(shape: ModelShape) -> str:
    try:
        return (Path(shape.path) / "config.json").read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"model.path = {shape.path!r}: config.json cannot be read ({error.strerror})") from None
