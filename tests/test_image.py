"""The image: any rows, spans and columns give a safetensors file with the same tensors, and its layout reads back."""

import numpy as np
import pytest
import safetensors
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_extract.shards.image import (
    FP8,
    PAGE,
    Column,
    lay_out,
    mask_spans,
    parse_layout,
    row_table,
    state_columns,
    write_table,
)

# Widths keep a token's bytes divisible by 8 in every dtype.
COLUMNS = st.lists(
    st.tuples(st.sampled_from(["BF16", "F16", "F32"]), st.sampled_from([4, 8, 60, 1024]))
    | st.tuples(st.just(FP8), st.sampled_from([8, 64, 1024])),
    min_size=1,
    max_size=5,
).map(lambda kinds: tuple(Column(f"state.{i + 1}", dtype, width) for i, (dtype, width) in enumerate(kinds)))
MASKS = st.lists(
    st.lists(st.integers(0, 1), min_size=1, max_size=40).map(lambda m: np.array(m, np.uint8)), min_size=1, max_size=12
)


@settings(max_examples=60, deadline=None)
@given(
    masks=MASKS,
    columns=COLUMNS,
    keep=st.sampled_from(["all", "supervised", "last", "random:3"]),
    note=st.text(max_size=20),
)
def test_any_image_is_a_safetensors_file_with_equal_tensors(tmp_path_factory, masks, columns, keep, note):
    rng = np.random.default_rng(0)
    ids = [rng.integers(0, 1000, len(m), dtype=np.int32) for m in masks]
    table = row_table(range(10, 10 + len(masks)), ids, masks, keep)
    layout = lay_out(table, columns, {"note": note})
    buffer = memoryview(bytearray(b"\xaa" * layout.nbytes))
    write_table(layout, table, buffer)
    for column in columns:
        state = layout.state_bytes(buffer, column)
        state[:] = rng.integers(0, 256, state.shape, dtype=np.uint8)

    path = tmp_path_factory.mktemp("image") / "a.safetensors"
    path.write_bytes(buffer)
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "ray_extract", "version": "1", "note": note}
        for name in ("row", "cu_seqlens", "cu_kept", "cu_spans", "spans", "input_ids", "loss_mask"):
            assert np.array_equal(file.get_tensor(name).numpy(), getattr(table, name)), name
        for column in columns:
            tensor = file.get_tensor(column.name)
            assert tuple(tensor.shape) == (table.num_kept, column.width + 8 * (column.dtype == FP8))
            expected = layout.state_bytes(buffer, column).tobytes()
            got = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
            assert got == expected
        for name in ("digest", "sumsq", "amax", "nonfinite", "zero", "status"):
            assert not file.get_tensor(name).numpy().any(), f"{name} must start as zero"
    assert all(layout.tensors[c.name].offset % PAGE == 0 for c in columns)
    back = parse_layout(bytes(buffer[: len(layout.header)]))
    assert back == layout
    assert back.columns == columns


@given(mask=st.lists(st.integers(0, 1), max_size=60).map(lambda m: np.array(m, np.uint8)))
def test_spans_of_a_mask_are_its_runs_of_ones(mask):
    spans = mask_spans(mask)
    rebuilt = np.zeros_like(mask)
    for start, end in spans:
        assert start < end
        assert not rebuilt[max(0, start - 1) : end].any(), "runs must be maximal and disjoint"
        rebuilt[start:end] = 1
    assert np.array_equal(rebuilt, mask)


def test_other_bytes_and_states_make_up_the_whole_image():
    table = row_table([0], [np.arange(5, dtype=np.int32)], [np.ones(5, np.uint8)])
    layout = lay_out(table, state_columns((2, 4), True, "BF16", 12), {})
    buffer = memoryview(bytearray(layout.nbytes))
    states = sum(layout.tensors[c.name].nbytes for c in layout.columns)
    assert sum(part.nbytes for part in layout.other_bytes(buffer)) + states == layout.nbytes


def test_a_token_of_odd_size_is_refused():
    table = row_table([0], [np.arange(5, dtype=np.int32)], [np.ones(5, np.uint8)])
    with pytest.raises(ValueError, match=r"state\.1: 6 bytes a token"):
        lay_out(table, (Column("state.1", "BF16", 3),), {})


@pytest.mark.parametrize("head", [b"", b"\0" * 8, b"\x02\0\0\0\0\0\0\0[]", (40).to_bytes(8, "little") + b"x" * 40])
def test_the_head_of_another_file_is_refused(head):
    with pytest.raises(ValueError, match="not a safetensors file"):
        parse_layout(head)


def test_an_image_of_another_version_is_refused():
    text = b'{"__metadata__":{"format":"ray_extract","version":"99"}}'
    with pytest.raises(ValueError, match="'99'"):
        parse_layout(len(text).to_bytes(8, "little") + text)
