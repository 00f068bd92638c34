"""Statistics computed again from the bytes are those of plain arithmetic, and wrong ones are found."""

import dataclasses
import math

import images
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from images import make_table, seal_image, true_stats
from outputs import make_output

from ray_extract.capture.fp8 import decode, encode
from ray_extract.shards import stats as stats_module
from ray_extract.shards.image import FP8, lay_out, state_columns, write_table
from ray_extract.shards.raw import image_shard
from ray_extract.shards.stats import StateStats
from ray_extract.verify import verify

TYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def stored(values: torch.Tensor, dtype: str) -> np.ndarray:
    """Bytes of values in a type; u8 [n, bytes per token]."""
    made = encode(values) if dtype == FP8 else values.to(TYPES[dtype])
    return made.view(torch.uint8).numpy().reshape(len(values), -1)


def plain(values: torch.Tensor) -> StateStats:
    """Statistics by PyTorch, in fp64."""
    wide = values.double()
    zero = int((wide == 0).all(dim=1).sum())
    return StateStats(float(wide.square().sum()), float(wide.abs().max()), int((~wide.isfinite()).sum()), zero)


def found(raw: np.ndarray, dtype: str, cut: int = 0) -> StateStats:
    """Statistics by the module, of two parts."""
    sums = StateStats()
    for part in (raw[:cut], raw[cut:]):
        sums.add(part, dtype)
    return sums


@pytest.mark.parametrize("dtype", [*TYPES, FP8])
@given(seed=st.integers(0, 2**32), power=st.integers(-40, 40), tokens=st.integers(1, 70), hidden=st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_they_are_those_of_plain_arithmetic(dtype, seed, power, tokens, hidden):
    rng = torch.Generator().manual_seed(seed)
    values = torch.randn((tokens, 8 * hidden), generator=rng) * 2.0 ** (power // (4 if dtype == "F16" else 1))
    values[torch.rand((tokens, 1), generator=rng).expand_as(values) < 0.2] = 0.0
    values[:, 0] *= -0.0 if seed % 2 else 1.0
    values = values.to(torch.bfloat16 if dtype == FP8 else TYPES[dtype])
    raw = stored(values, dtype)
    got, wanted = found(raw, dtype, seed % tokens), plain(values)
    assert got.differences(wanted, dtype) == []
    if dtype != FP8:
        assert (got.amax, got.nonfinite, got.zero) == (wanted.amax, wanted.nonfinite, wanted.zero)
        assert got.sumsq == pytest.approx(wanted.sumsq, rel=1e-5)
    else:
        exact = plain(decode(torch.from_numpy(raw), torch.float32))
        assert got.sumsq == pytest.approx(exact.sumsq, rel=1e-5) and got.amax == pytest.approx(exact.amax, rel=1e-6)


@pytest.mark.parametrize("dtype", TYPES)
def test_every_finite_value_of_a_type_is_read_as_it_is(dtype):
    bits = np.arange(1 << 16, dtype=np.uint16) if dtype != "F32" else np.arange(0, 1 << 32, 65521, dtype=np.uint32)
    values = torch.from_numpy(bits.view(np.int16 if dtype != "F32" else np.int32).copy()).view(TYPES[dtype])
    values = values[values.isfinite()]
    for part in values.split(997):
        token = part.reshape(1, -1)
        got, wanted = found(stored(token, dtype), dtype), plain(token)
        assert (got.amax, got.nonfinite, got.zero) == (wanted.amax, 0, wanted.zero)
        assert got.sumsq == pytest.approx(wanted.sumsq, rel=1e-5, abs=1e-35)


def test_every_code_of_fp8_is_read_as_it_is():
    codes = torch.arange(256, dtype=torch.uint8)[torch.arange(256) % 128 != 127].reshape(-1, 1)
    records = torch.zeros((254, 16), dtype=torch.uint8)
    records[:, :1] = codes
    records[:, 8:12] = torch.full((254, 1), 0.5).view(torch.uint8)
    for record in records.split(1):
        value = abs(float(decode(record, torch.float32)[0, 0]))
        got = found(record.numpy(), FP8)
        assert (got.amax, got.sumsq, got.zero) == (value, value**2, int(value == 0))


@pytest.mark.parametrize("dtype", [*TYPES, FP8])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_counted(dtype, value):
    values = torch.ones((9, 16))
    values[3, 5] = values[7, 0] = values[7, 15] = value
    got = found(stored(values, dtype), dtype, 5)
    assert got.nonfinite == 3
    assert "nonfinite" in got.differences(StateStats(141.0, 1.0, 0, 0), dtype)


def test_sums_that_leave_fp32_are_infinite_on_a_gpu_alone():
    got = found(stored(torch.full((2, 8), 1e25), "F32"), "F32")
    assert got.sumsq == pytest.approx(16e50, rel=1e-5)
    for sumsq in (math.inf, got.sumsq):
        assert got.differences(dataclasses.replace(got, sumsq=sumsq), "F32") == []
    small = found(stored(torch.ones((2, 8)), "F32"), "F32")
    assert small.differences(dataclasses.replace(small, sumsq=math.inf), "F32") == ["sumsq"]


@pytest.mark.parametrize(
    ("dtype", "name", "by", "wrong"),
    [
        ("BF16", "sumsq", 1 + 2e-4, True),
        ("BF16", "sumsq", 1 + 5e-5, False),
        ("BF16", "amax", 1 + 2**-23, True),
        (FP8, "sumsq", 1.3, True),
        (FP8, "sumsq", 1.1, False),
        (FP8, "amax", 1 + 1e-5, True),
        (FP8, "amax", 1 + 2**-23, False),
    ],
)
def test_the_tolerance_is_that_of_rounding(dtype, name, by, wrong):
    got = found(stored(torch.randn((5, 16), generator=torch.Generator().manual_seed(0)), dtype), dtype)
    stated = dataclasses.replace(got, **{name: getattr(got, name) * by})
    assert got.differences(stated, dtype) == ([name] if wrong else [])


def test_the_worst_order_of_addition_stays_within_the_tolerance():
    """Equal addends round alike in every partial sum."""
    for value in (1.1, 1.3, 0.7):
        state = torch.full((2, 16384), value)
        got = found(stored(state, "F32"), "F32")
        assert got.sumsq == pytest.approx(plain(state).sumsq, rel=stats_module.SUMSQ_RTOL / 2)


@pytest.mark.parametrize("format", ["raw", "parquet"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16", "float8_e4m3"])
@pytest.mark.parametrize("name", ["sumsq", "amax", "zero"])
def test_verify_finds_statistics_that_were_computed_wrong(tmp_path, monkeypatch, format, dtype, name):
    def wrong(*args):
        stats = true_stats(*args)
        values = getattr(stats, name)
        values[-1, 1] = 2 * values[-1, 1] + 1
        return stats

    assert verify(make_output(tmp_path / "right", format=format, dtype=dtype, failed=[4]).url).ok
    monkeypatch.setattr(images, "true_stats", wrong)
    output = make_output(tmp_path / "wrong", format=format, dtype=dtype, failed=[5])
    assert [problem.partition(": ")[2] for problem in verify(output.url).problems] == [
        f"row {row}: {name} of state.3 differ from what was captured" for row in (1, 4)
    ]


def test_statistics_of_a_failed_row_that_are_not_zero_are_found():
    table, columns = make_table([3, 4]), state_columns([1], False, "BF16", 16)
    layout = lay_out(table, columns, {})
    buffer = memoryview(bytearray(layout.nbytes))
    write_table(layout, table, buffer)
    seal_image(table, columns, buffer, layout, failed=[1])
    assert image_shard(layout, buffer).differences([0, 1], stats=True) == {}
    layout.small(buffer, "amax")[1, 0] = 1
    assert image_shard(layout, buffer).differences([0, 1], stats=True) == {1: ["amax of state.1"]}
    assert image_shard(layout, buffer).differences([0, 1]) == {}
