"""What a trainer needs of the target model beside its states. Needs torch, neither ray nor sglang, nor the model.

head = load_head("/scratch/states")
counts = load_token_counts("/scratch/states")
d2t, t2d = vocab_maps(counts.supervised, 32000)  # of readers.vocab: the 32,000 tokens that the draft model knows
draft_head = head.lm_head[torch.from_numpy(t2d)]  # [32000, H], rows in the order of the draft's ids
"""

import dataclasses
import hashlib
import json
import math
import mmap
from collections.abc import Mapping
from typing import Any

import torch

from ray_extract.counts import TokenCounts, read_counts
from ray_extract.errors import NotFound, ShardError
from ray_extract.head import read_header
from ray_extract.layout import COUNTS_KEY, HEAD_KEY, RUN_KEY
from ray_extract.shards.values import TORCH_DTYPES
from ray_extract.store import Store, open_store
from ray_extract.tensors import WRITTEN_AGAIN, Header, Place

_BLOCK = 32 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class Head:
    """What is before and behind the layers of the target model, in the checkpoint's types.

    Args:
        lm_head: [V, H]; `state.final @ lm_head.T` are the logits, but for what the model's class does to them besides
            (such as `final_logit_softcapping` in its config).
        embed_tokens: [V, H]; the same tensor as lm_head if tied.
        norm: [H], weight of the final norm, as the checkpoint stores it.
        tied: whether the checkpoint has one tensor for both.
        config: the model's config.json.
        model_fingerprint: that of the run, see model.describe_model.
    """

    lm_head: torch.Tensor
    embed_tokens: torch.Tensor
    norm: torch.Tensor
    tied: bool
    config: dict[str, Any]
    model_fingerprint: str


def load_head(url: str, storage_options: Mapping[str, Any] | None = None, *, check: bool = False) -> Head:
    """Load the head of a run's target model.

    From a local folder the tensors are views of a private memory map: read when used, and writing to them does not
    reach the file.

    Args:
        url, storage_options: the output of a run, as in its job.
        check: read all of it, and compare with its digest.

    Raises:
        NotFound: the run stored none (`output.head`, random weights, or a quantized head; its log says why).
        ShardError: it is damaged, or of another release.
        StoreError: the store failed.
    """
    store = open_store(url, storage_options or {})
    try:
        header = read_header(store)
    except NotFound:
        raise _lacks(
            store,
            f"no {HEAD_KEY}: extraction has not begun, or the run stores none (output.head = false, random weights, "
            "simulated states, or a head that the checkpoint does not hold as plain tensors; its log says which); take "
            "it from the checkpoint",
        ) from None
    body = _body(store, header)
    if check and hashlib.sha256(body).hexdigest() != header.metadata["sha256"]:
        raise ShardError(f"{store.url}/{HEAD_KEY}: its bytes are not those that were written; {WRITTEN_AGAIN}")
    try:
        tensors = {name: _tensor(body, place, len(header.text)) for name, place in header.tensors.items()}
        config = json.loads(header.metadata["config"])
    except (ValueError, KeyError) as error:
        raise ShardError(f"{store.url}/{HEAD_KEY}: damaged: {error}; {WRITTEN_AGAIN}") from None
    return Head(
        lm_head=tensors["lm_head"],
        embed_tokens=tensors.get("embed_tokens", tensors["lm_head"]),
        norm=tensors["norm"],
        tied="embed_tokens" not in tensors,
        config=config,
        model_fingerprint=header.metadata["model_fingerprint"],
    )


def load_token_counts(url: str, storage_options: Mapping[str, Any] | None = None) -> TokenCounts:
    """How often each token occurs in the rows that are ok, all and supervised; i64 [V] each, for readers.vocab.

    Raises:
        NotFound: the run has not finished, or is of an older release.
        ShardError: damaged, or of another release.
        StoreError: the store failed.
    """
    store = open_store(url, storage_options or {})
    try:
        return read_counts(store)[0]
    except NotFound:
        raise _lacks(
            store, f"no {COUNTS_KEY}: the run has not finished, or is of an older release; run it again to the end"
        ) from None


def _lacks(store: Store, what: str) -> NotFound:
    """Why something is not in an output."""
    return NotFound(f"{store.url}: {what if store.head(RUN_KEY) else f'no {RUN_KEY}; name the output.url of a run'}")


def _body(store: Store, header: Header) -> memoryview:
    """All bytes behind the header, writable."""
    path = store.local_path(HEAD_KEY)
    if path is None:
        body = bytearray(header.nbytes - len(header.text))
        for at in range(0, len(body), _BLOCK):
            count = min(_BLOCK, len(body) - at)
            body[at : at + count] = store.get_range(HEAD_KEY, len(header.text) + at, count)
        return memoryview(body)
    with path.open("rb") as file:
        # Copy-on-write, as torch wants memory that can be written to.
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))[len(header.text) :]


def _tensor(body: memoryview, place: Place, start: int) -> torch.Tensor:
    count = math.prod(place.shape)
    flat = torch.frombuffer(body, dtype=TORCH_DTYPES[place.dtype], count=count, offset=place.offset - start)
    return flat.reshape(place.shape)
