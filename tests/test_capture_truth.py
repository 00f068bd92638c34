"""The truth test: every captured state of real SGLang, on the CPU in fp32, equals Hugging Face's."""

import threading
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import torch
from models import hf_states
from rig import BOUNDARIES, CHUNK, TOLERANCE, Rig, nothing_left, prompts, relative_error, rig

from ray_extract.capture.digest import digest_tokens
from ray_extract.capture.fp8 import decode, encode
from ray_extract.errors import CaptureRefused
from ray_extract.layout import RequestId
from ray_extract.records import RowStatus
from ray_extract.shards.image import kept_spans, row_table

pytestmark = pytest.mark.engine

UNEQUAL = (1, 350, CHUNK, CHUNK - 1, 7 * CHUNK // 2, 7, 2 * CHUNK, 30)


@pytest.fixture(scope="module", params=["llama", "qwen3", "qwen3_moe"])
def family(request: pytest.FixtureRequest, checkpoints: Path) -> Iterator[Rig]:
    with rig(request.param, checkpoints, args={"enable_mixed_chunk": True, "max_total_tokens": 8192}) as made:
        yield made


def assert_true(made: Rig, lengths: tuple[int, ...], seed: int = 0) -> None:
    rows = prompts(lengths, seed)
    result = made.run(rows)
    assert not result.failures
    errors = made.errors(rows, result)
    assert errors.max() < TOLERANCE, errors


@pytest.mark.parametrize("length", [1, 5, CHUNK, 7 * CHUNK // 2], ids=["one token", "short", "a chunk", "3.5 chunks"])
def test_one_row_equals_hugging_face(family: Rig, length: int) -> None:
    assert_true(family, (length,), seed=length)


def test_eight_unequal_rows_at_once_equal_hugging_face(family: Rig) -> None:
    assert_true(family, UNEQUAL)


def test_rows_beside_decoding_requests_equal_hugging_face(family: Rig) -> None:
    sides = [family.side_request(ids, 40, i) for i, ids in enumerate(prompts((20, 33), seed=9))]
    while not any(f.done() for f in sides):
        assert_true(family, UNEQUAL, seed=3)
    assert all(f.result(60).ok and len(f.result(60).output_ids) == 40 for f in sides)


@pytest.mark.parametrize("keep", ["supervised", "last", "random:40"])
def test_only_the_tokens_that_are_asked_for_are_stored(family: Rig, keep: str) -> None:
    rows = prompts((200, 90, 30), seed=4)
    masks = [(np.random.default_rng(5).random(len(r)) < 0.4).astype(np.uint8) for r in rows]
    part, whole = family.run(rows, masks, keep=keep), family.run(rows)
    assert not part.failures
    for ids, mask, kept, full in zip(rows, masks, part.states, whole.states, strict=True):
        positions = np.concatenate([np.arange(*span) for span in kept_spans(ids, mask, keep)])
        assert len(positions) == {"supervised": mask.sum(), "last": 1, "random:40": min(40, len(ids))}[keep]
        for a, b in zip(kept, full, strict=True):
            assert a.shape == (len(positions), b.shape[1])
            np.testing.assert_allclose(a, b[positions], rtol=1e-4, atol=1e-5)


def test_an_overlong_row_fails_with_a_reason_and_its_neighbours_do_not(family: Rig) -> None:
    limit = family.info.max_input_tokens
    rows = prompts((10, limit + 1, 20), seed=6)
    result = family.run(rows)
    assert list(result.failures) == [1]
    assert result.failures[1].status is RowStatus.REJECTED and str(limit) in result.failures[1].reason
    assert not any(state.any() for state in result.states[1])
    errors = family.errors([rows[0], rows[2]], type(result)([result.states[0], result.states[2]], {}))
    assert errors.max() < TOLERANCE


def test_a_row_at_the_engines_limit_is_whole(family: Rig) -> None:
    assert not family.run(prompts((family.info.max_input_tokens,), seed=7)).failures


def test_a_prompt_that_sglang_would_replace_is_not_written(family: Rig) -> None:
    """Past the extractor's own check, SGLang runs an over-long prompt as one other token, or rejects it."""
    extractor = family.extractor
    family_limit, extractor._info = (
        extractor._info,
        type(family.info)(family.info.version, 1 << 30, family.info.dp_size, family.info.environment),
    )
    try:
        rows = prompts((30, family.info.max_input_tokens + 1), seed=8)
        result = family.run(rows)
    finally:
        extractor._info = family_limit
    assert list(result.failures) == [1]
    assert not any(state.any() for state in result.states[1])
    assert family.errors(rows[:1], result).max() < TOLERANCE


def test_an_abort_in_mid_chunk_leaves_the_extent_to_other_rows(family: Rig) -> None:
    """The owner gives up on rows under way and reuses their memory at once; nothing of the old rows gets in."""
    extractor = family.extractor
    arena, engine = extractor._arena, extractor._engine
    assert arena is not None and engine is not None
    for attempt in range(3):
        old = prompts((900, 1000), seed=20 + attempt)
        table = row_table(range(2), old, [np.ones(len(r), np.uint8) for r in old])
        from ray_extract.shards.image import lay_out, write_table

        layout = lay_out(table, extractor.columns, {})
        extent = arena.allocate(layout.nbytes)
        write_table(layout, table, extent.buffer)
        extractor._open(extent, layout, table)
        rids, futures = [], []
        for row in range(2):
            rid = str(RequestId(arena.spec.nonce, extent.slot, extent.generation, row, 0))
            rids.append(rid)
            offset = extent.offset + layout.tensors["input_ids"].offset + 4 * int(table.cu_seqlens[row])
            futures.append(engine.submit(rid, offset, len(old[row])))
        deadline = time.monotonic() + 60
        while not 0 < arena.control.covered[extent.slot, 0] < len(old[0]):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        engine.abort(rids)
        arena.retire(extent, lambda: engine.alive)
        arena.free(extent)
        # First fit gives the same place to the next image, while the engine may still run the old rows.
        assert_true(family, UNEQUAL, seed=30 + attempt)
        for future in futures:
            future.result(60)


def test_digests_published_by_the_engine_are_those_of_the_bytes(family: Rig) -> None:
    rows = prompts((100, 3), seed=10)
    table = row_table(range(2), rows, [np.ones(len(r), np.uint8) for r in rows])
    with family.extractor.capture(table, {}) as captured:
        digests = captured.layout.small(captured.buffer, "digest")
        for k, column in enumerate(captured.layout.columns):
            raw = captured.layout.state_bytes(captured.buffer, column)
            for row in range(2):
                low, high = table.cu_kept[row : row + 2]
                assert digest_tokens(np.ascontiguousarray(raw[low:high])) == digests[row, 1 + k]


def test_several_images_at_once_do_not_mix(family: Rig) -> None:
    jobs = [prompts(UNEQUAL, seed=40 + i) for i in range(3)]
    results: list[object] = [None] * 3

    def work(i: int) -> None:
        results[i] = family.run(jobs[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rows, result in zip(jobs, results, strict=True):
        assert family.errors(rows, result).max() < TOLERANCE  # type: ignore[arg-type]


def test_retraction_writes_each_token_once(checkpoints: Path) -> None:
    """SGLANG_TEST_RETRACT makes the scheduler throw requests out and prefill them again."""
    with rig("llama", checkpoints, env={"SGLANG_TEST_RETRACT": "1"}) as made:
        sides = [made.side_request(ids, 60, i) for i, ids in enumerate(prompts((20, 33, 40), seed=9))]
        for seed in range(3):
            assert_true(made, UNEQUAL, seed=seed)
        assert all(f.result(120).ok for f in sides)
        assert "retract" in made.extractor._engine.log.read_text().lower()  # type: ignore[union-attr]


def test_two_tensor_parallel_ranks_equal_hugging_face(checkpoints: Path) -> None:
    with rig("llama", checkpoints, tp_size=2, env={"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}) as made:
        assert_true(made, UNEQUAL)
        assert_true(made, (7 * CHUNK // 2,), seed=1)


def test_two_data_parallel_ranks_write_one_image(checkpoints: Path) -> None:
    # Up to 0.5.18 the ranks share the cores that are named; later each is named its own.
    cores = "0" if version("sglang") in ("0.5.12", "0.5.14", "0.5.16", "0.5.18") else "0|1"
    with rig("llama", checkpoints, dp_size=2, env={"SGLANG_CPU_OMP_THREADS_BIND": cores}) as made:
        assert_true(made, UNEQUAL)
        assert_true(made, UNEQUAL * 4, seed=1)


def test_states_stored_in_fp8_are_hugging_faces_through_fp8(checkpoints: Path) -> None:
    with rig("llama", checkpoints, fp8=True) as made:
        rows = prompts(UNEQUAL)
        result = made.run(rows)
        assert not result.failures
        for row, states in zip(rows, result.states, strict=True):
            reference = hf_states(made.model, row.tolist())
            for boundary, state in zip((*BOUNDARIES, -1), states, strict=True):
                want = decode(encode(torch.from_numpy(reference[boundary]))).float().numpy()
                # Two programs in fp32 differ in the last bits, so here and there a value falls to the other neighbour.
                assert (state != want).mean() < 1e-3
                assert relative_error(state, reference[boundary]) < 0.04


def test_an_engine_that_runs_in_another_type_is_refused_with_the_reason(checkpoints: Path) -> None:
    refused = pytest.raises(CaptureRefused, match=r"the engine runs in torch\.float32, the plan stores BF16")
    with nothing_left(), refused:
        Rig("llama", checkpoints, stored_dtype="BF16")


def test_an_engine_without_the_plugin_serves_nothing(checkpoints: Path) -> None:
    with nothing_left(), pytest.raises(CaptureRefused, match="SGLANG_PLUGINS = another leaves the capture plugin out"):
        Rig("llama", checkpoints, env={"SGLANG_PLUGINS": "another"})
