"""Token counts: those of the rows that are ok, whatever else happened, and again when that changes."""

import numpy as np
import pytest
from outputs import make_output, write_views

from ray_extract import layout
from ray_extract.counts import TokenCounts, read_counts, write_counts
from ray_extract.dataset.prepared import PreparedRows
from ray_extract.errors import NotFound, ShardError
from ray_extract.readers.head import load_token_counts
from ray_extract.readers.vocab import vocab_maps
from ray_extract.tensors import WRITTEN_AGAIN
from ray_extract.verify import verify


def expected(output, ok, vocab=1000):
    """Counts by another road: (all, supervised)."""
    rows = [row for row in PreparedRows(output.store, output.index).read(0, output.index.rows) if row.index in ok]
    ids = np.concatenate([row.input_ids for row in rows])
    mask = np.concatenate([row.loss_mask for row in rows]).astype(bool)
    return np.bincount(ids, minlength=vocab), np.bincount(ids[mask], minlength=vocab)


@pytest.mark.parametrize("url", [None, "memory://counts/out"])
@pytest.mark.parametrize("failed", [[], [4], [0, 1, 5]])
def test_rows_that_failed_or_were_skipped_do_not_count(tmp_path, url, failed):
    output = make_output(tmp_path, url=url and f"{url}/{len(failed)}", failed=failed)
    counts = load_token_counts(output.url)
    everything, supervised = expected(output, {0, 1, 3, 4, 5} - {*failed})
    assert counts.rows == 5 - len(failed)
    assert counts.all.dtype == counts.supervised.dtype == np.int64
    assert np.array_equal(counts.all, everything) and np.array_equal(counts.supervised, supervised)
    assert verify(output.url).ok


def test_they_choose_a_drafts_vocabulary(tmp_path):
    counts = load_token_counts(make_output(tmp_path).url)
    d2t, t2d = vocab_maps(counts.supervised, 10)
    chosen = np.arange(10) + d2t
    assert t2d.sum() == 10 and t2d[chosen].all()
    assert counts.supervised[chosen].min() >= np.sort(counts.supervised)[-10]


def test_a_resumed_run_leaves_them_alone_and_one_that_mended_a_row_replaces_them(tmp_path):
    output = make_output(tmp_path / "a", failed=[4])
    file = tmp_path / "a/out" / layout.COUNTS_KEY
    before = file.stat().st_ino
    write_views(output)
    assert file.stat().st_ino == before
    mended = make_output(tmp_path / "b")
    for folder in ("commits", "shards"):
        for path in (tmp_path / "b/out" / folder).iterdir():
            (tmp_path / "a/out" / folder / path.name).write_bytes(path.read_bytes())
    write_views(output)
    counts, manifest = read_counts(output.store)
    assert counts.equal(load_token_counts(mended.url)) and manifest == "manifest-000001.parquet"
    assert verify(output.url).ok


def test_verify_finds_counts_of_other_rows_and_of_an_earlier_manifest(tmp_path):
    output = make_output(tmp_path)
    counts, manifest = read_counts(output.store)
    counts.all[7] += 1
    write_counts(output.store, counts, manifest)
    assert verify(output.url).problems == [
        f"{layout.COUNTS_KEY}: not the counts of the rows that are ok; {WRITTEN_AGAIN}"
    ]
    counts.all[7] -= 1
    write_counts(output.store, counts, "manifest-000007.parquet")
    (problem,) = verify(output.url).problems
    assert problem.startswith(
        f"{layout.COUNTS_KEY}: of manifest-000007.parquet, and manifest-000000.parquet is the latest"
    )
    short = TokenCounts(counts.all[:10], counts.supervised[:10], counts.rows)
    write_counts(output.store, short, manifest)
    assert verify(output.url).problems == [
        f"{layout.COUNTS_KEY}: not the counts of the rows that are ok; {WRITTEN_AGAIN}"
    ]


def test_an_older_output_without_them_is_right_and_says_what_it_lacks(tmp_path):
    output = make_output(tmp_path)
    output.store.delete(layout.COUNTS_KEY)
    assert verify(output.url).ok
    with pytest.raises(NotFound, match=r"out: no token-counts\.safetensors: the run has not finished"):
        load_token_counts(output.url)


def test_a_damaged_file_is_named(tmp_path):
    output = make_output(tmp_path)
    data = output.store.get(layout.COUNTS_KEY)
    for wrong in (
        data[:-1],
        b"",
        data.replace(b'"supervised"', b'"sup3rvised"'),
    ):
        output.store.put(layout.COUNTS_KEY, wrong, create=False)
        with pytest.raises(ShardError, match=r"out/token-counts\.safetensors: damaged: .*; delete it and run the same"):
            load_token_counts(output.url)
        assert not verify(output.url).ok
    output.store.put(layout.COUNTS_KEY, data.replace(b"token counts", b"token c0unts"), create=False)
    with pytest.raises(ShardError, match=r"token-counts\.safetensors: format 'ray_extract token c0unts' version '1'"):
        load_token_counts(output.url)
