"""Our exports, read and trained on by SpecForge 0.2.0 and speculators 0.9.0 themselves, on states of real SGLang.

The trainers live in an environment of their own (deploy/trainers/setup.sh); what runs there is in trainer_side/.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import exports
import models
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from ray_extract.errors import ShardError
from ray_extract.exporters.export import Request, export
from ray_extract.exporters.rows import why_left_out
from ray_extract.exporters.speculators_backend import ShardTransfer
from ray_extract.presets import TARGETS

pytestmark = [pytest.mark.acceptance, pytest.mark.engine, pytest.mark.ray]

ROOT = Path(__file__).resolve().parents[2]
SIDE = Path(__file__).parent / "trainer_side"
TOLERANCE = 1e-5
LENGTHS = (40, 7, 64, 100, 33, 21, 80, 5, 50, 60, 30, 20, 2, 130)
ON_A_CPU = [
    "engine.device=cpu",
    "engine.cpus=0.5",
    "engine.chunked_prefill_size=64",
    "engine.args={max_total_tokens: 8192}",
    "engine.env={OMP_NUM_THREADS: '1'}",
    "run.address=local",
    "output.max_rows=5",
]
"""Overrides of a job, for this machine."""


@pytest.fixture(scope="session")
def trainers() -> Path:
    """Python of the trainers' environment, which `make acceptance` makes."""
    setup = ROOT / "deploy/trainers/setup.sh"
    if subprocess.run([setup, "check"], check=False).returncode:
        pytest.skip("the trainers' environment is not there; `make acceptance` makes it, in two minutes")
    return Path(os.environ.get("RAY_EXTRACT_TRAINERS_VENV", ROOT / ".cache/trainers")) / "bin/python"


@pytest.fixture(scope="module")
def model(checkpoints: Path) -> Path:
    """The tiny llama, with the index that SpecForge wants."""
    made = models.tiny_model("llama", checkpoints)
    head = (made / "model.safetensors").read_bytes()
    names = json.loads(head[8 : 8 + int.from_bytes(head[:8], "little")])
    weight_map = {name: "model.safetensors" for name in names if name != "__metadata__"}
    (made / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return made


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts as a data set: random ids, the last two thirds supervised."""
    rng = np.random.default_rng(0)
    file = tmp_path_factory.mktemp("data") / "conversations.jsonl"
    with file.open("w") as out:
        for n in LENGTHS:
            mask = [int(i >= n // 3) for i in range(n)]
            out.write(json.dumps({"input_ids": rng.integers(0, models.VOCAB, n).tolist(), "loss_mask": mask}) + "\n")
    return file


def prompts(rows: Path) -> list[dict[str, list[int]]]:
    return [json.loads(line) for line in rows.read_text().splitlines()]


def run_checked(argv: list[Any], folder: Path, **env: str) -> str:
    done = subprocess.run(
        list(map(str, argv)), cwd=folder, env=os.environ | env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{argv}\n{done.stdout[-4000:]}\n{done.stderr[-6000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def captured(model: Path, rows: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A run by real SGLang in fp32, with what both trainers read."""
    folder = tmp_path_factory.mktemp("captured")
    run_checked(
        [
            *(sys.executable, "-m", "ray_extract.run", "--preset", "speculators-eagle3", "capture.final=true"),
            *(f"model.path={model}", "model.dtype=float32", f"dataset.paths={rows}"),
            *("output.url=out", "output.format=raw", *ON_A_CPU),
        ],
        folder,
    )
    return str(folder / "out")


@pytest.fixture(scope="module")
def oracle(model: Path, rows: Path) -> list[list[np.ndarray]]:
    """By row, Hugging Face's states in fp32: boundaries 0..8 and the final one."""
    return [models.hf_states(model, prompt["input_ids"]) for prompt in prompts(rows)]


def relative_error(got: torch.Tensor, want: np.ndarray) -> float:
    """Largest norm of a token's difference over the reference's; both [n, width]."""
    assert got.shape == want.shape
    difference = np.linalg.norm(got.double().numpy() - want, axis=1)
    return float((difference / np.linalg.norm(want.astype(np.float64), axis=1)).max())


def aux(states: list[np.ndarray], boundaries: tuple[int, ...] = (2, 4, 5)) -> np.ndarray:
    """Boundaries side by side; [n, k hidden]."""
    return np.concatenate([states[b] for b in boundaries], axis=1)


# SpecForge


@pytest.mark.parametrize("strategy", ["eagle3", "dflash", "dspark"])
def test_specforge_reads_the_states_that_hugging_face_computes(
    trainers: Path,
    captured: str,
    rows: Path,
    oracle: list[list[np.ndarray]],
    tmp_path: Path,
    strategy: str,
    record_property: Callable[..., None],
) -> None:
    report = export(Request(captured, f"specforge-{strategy}", str(tmp_path / "e")))
    kept = [
        i
        for i, p in enumerate(prompts(rows))
        if not why_left_out(np.array(p["loss_mask"]), TARGETS[f"specforge-{strategy}"])
    ]
    assert report.exported == len(kept)
    run_checked([trainers, SIDE / "read_specforge.py", strategy, tmp_path / "e", tmp_path / "read"], tmp_path)
    read = load_file(tmp_path / "read")
    names = {
        "eagle3": {"input_ids", "attention_mask", "loss_mask", "hidden_state", "target"},
        "dflash": {"input_ids", "loss_mask", "hidden_states"},
        "dspark": {"input_ids", "loss_mask", "hidden_states", "target_last_hidden_states"},
    }[strategy]
    assert {name.partition(".")[2] for name in read} >= names
    states_name, last_name = {
        "eagle3": ("hidden_state", "target"),
        "dflash": ("hidden_states", None),
        "dspark": ("hidden_states", "target_last_hidden_states"),
    }[strategy]
    errors = []
    for place, row in enumerate(kept):
        batch, line = divmod(place, 3)
        prompt, n = prompts(rows)[row], len(prompts(rows)[row]["input_ids"])
        got = {name: read[f"{batch}.{name}"][line] for name in names}
        assert got["input_ids"].dtype == torch.int64 and got["input_ids"][:n].tolist() == prompt["input_ids"]
        mask = [*prompt["loss_mask"][:-1], 0] if strategy == "eagle3" else prompt["loss_mask"]  # its normalizer's doing
        assert got["loss_mask"][:n].flatten().tolist() == mask and not got["loss_mask"][n:].any()
        if strategy == "eagle3":
            assert got["attention_mask"].tolist() == [1] * n + [0] * (len(got["attention_mask"]) - n)
        errors.append(relative_error(got[states_name][:n], aux(oracle[row])))
        if last_name:
            errors.append(relative_error(got[last_name][:n], oracle[row][-1]))
        assert got[states_name].dtype == torch.float32
    record_property("max_error", max(errors))
    assert max(errors) < TOLERANCE


@pytest.mark.parametrize("strategy", ["eagle3", "dflash", "dspark"])
def test_specforge_refuses_no_row_that_is_exported(trainers: Path, tmp_path: Path, strategy: str) -> None:
    (tmp_path / "masks.json").write_text(json.dumps(exports.MASKS))
    out = run_checked([trainers, SIDE / "read_specforge.py", "refused", strategy, tmp_path / "masks.json"], tmp_path)
    target = TARGETS[f"specforge-{strategy}"]
    ours = [row for row, mask in enumerate(exports.MASKS) if why_left_out(np.array(mask, np.uint8), target)]
    theirs = json.loads(out)
    assert set(theirs) <= set(ours)
    if strategy != "eagle3":  # which refuses none, and learns nothing from those that we leave out
        assert theirs == ours


def test_vocabulary_maps_are_the_ones_that_both_trainers_make(trainers: Path, tmp_path: Path) -> None:
    from ray_extract.readers.vocab import vocab_maps

    counts = np.random.default_rng(0).permutation(
        500
    )  # no two alike, so that SpecForge's order of ties does not matter
    program = (
        "import json, sys, torch, contextlib\n"
        "from collections import Counter\n"
        "from specforge.data.preprocessing import process_token_dict_to_mappings as specforge\n"
        "from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution as speculators\n"
        "counts = dict(enumerate(json.load(open('counts.json'))))\n"
        "with contextlib.redirect_stdout(sys.stderr):\n"
        "    maps = specforge(Counter(counts), 100, 500), speculators(counts, 100, 500)\n"
        "print(json.dumps([[part.tolist() for part in pair] for pair in maps]))\n"
    )
    (tmp_path / "counts.json").write_text(json.dumps(counts.tolist()))
    ours = [part.tolist() for part in vocab_maps(counts, 100)]
    assert json.loads(run_checked([trainers, "-c", program], tmp_path)) == [ours, ours]


# speculators


@pytest.mark.parametrize(
    ("strategy", "boundaries"),
    # DFlash's may be any, in any order; 8 is also its last state.
    [("eagle3", (2, 4, 5)), ("dflash", (5, 2, 8, 4))],
)
def test_speculators_reads_the_states_that_hugging_face_computes_from_files_and_from_our_shards(
    trainers: Path,
    captured: str,
    model: Path,
    rows: Path,
    oracle: list[list[np.ndarray]],
    tmp_path: Path,
    strategy: str,
    boundaries: tuple[int, ...],
    record_property: Callable[..., None],
) -> None:
    hf = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    asked = boundaries if strategy == "dflash" else None  # EAGLE-3's are those of the run
    read = {}
    for backend in ("file", "ray_extract"):
        folder = tmp_path / backend
        report = export(Request(captured, f"speculators-{strategy}", str(folder), asked, link=backend == "ray_extract"))
        assert report.exported == report.rows == len(LENGTHS)
        script = [trainers, SIDE / "read_speculators.py", strategy, backend, folder, tmp_path / f"{backend}.out"]
        run_checked([*script, 1024, models.HIDDEN, len(boundaries)], tmp_path)
        read[backend] = load_file(tmp_path / f"{backend}.out")
    assert read["file"].keys() == read["ray_extract"].keys()
    assert all(read["file"][name].equal(read["ray_extract"][name]) for name in read["file"])
    errors, norm_errors = [], []
    packed: dict[str, list[torch.Tensor]] = {}
    shift = int(strategy == "eagle3")
    for row, prompt in enumerate(prompts(rows)):
        item = {name.partition(".")[2]: value for name, value in read["file"].items() if name.startswith(f"{row}.")}
        assert item["input_ids"].tolist() == prompt["input_ids"] and item["loss_mask"].tolist() == prompt["loss_mask"]
        last = item["verifier_last_hidden_states"]
        errors += [
            relative_error(item["hidden_states"], aux(oracle[row], boundaries)),
            relative_error(last, oracle[row][8]),
        ]
        with torch.inference_mode():  # what the trainer does with it gives the state after the norm
            norm_errors.append(relative_error(hf.model.norm(last), oracle[row][-1]))
        # EAGLE-3's shift: position t has token t+1, its mask and its last state, and the inner states of token t.
        # DFlash's batches are not shifted.
        for name, value in {
            "input_ids": item["input_ids"][shift:],
            "loss_mask": item["loss_mask"][shift:],
            "verifier_last_hidden_states": last[shift:],
            "hidden_states": item["hidden_states"][: len(last) - shift],
        }.items():
            packed.setdefault(name, []).append(value)
    record_property("max_error", max(errors + norm_errors))
    assert max(errors + norm_errors) < TOLERANCE
    for name, parts in packed.items():
        whole = torch.cat(parts)
        got = read["file"][f"batch.{name}"][0]
        assert got[: len(whole)].equal(whole) and not got[len(whole) :].any()
    documents = read["file"]["batch.document_ids"][0]
    assert [int((documents == i).sum()) for i in range(len(LENGTHS))] == [n - shift for n in LENGTHS]


def test_speculators_reads_our_fp8_files_with_its_own_backend(trainers: Path, captured: str, tmp_path: Path) -> None:
    read = {}
    for backend in ("file", "fp8"):
        export(Request(captured, "speculators-eagle3", str(tmp_path / backend), fp8=backend == "fp8"))
        script = [trainers, SIDE / "read_speculators.py", "eagle3", backend, tmp_path / backend, tmp_path / "out"]
        run_checked([*script, 1024, models.HIDDEN, 3], tmp_path)
        read[backend] = load_file(tmp_path / "out")
    assert read["file"].keys() == read["fp8"].keys()
    for name, exact in read["file"].items():
        got = read["fp8"][name]
        if name.startswith("batch.") or not name.endswith("hidden_states"):
            continue
        # One scale for a token's four states: those of fp8 and, of the scale, of bf16.
        error = float((got - exact).norm() / exact.norm())
        assert 0.01 < error < 0.06, (name, error)
    assert all(read["fp8"][name].equal(value) for name, value in read["file"].items() if name.endswith("input_ids"))


# Damage


def test_the_trainers_accept_zeros_and_flipped_bits_and_we_do_not(
    trainers: Path, captured: str, rows: Path, tmp_path: Path
) -> None:
    def harm(path: Path, zero: bool) -> bytes:
        before = path.read_bytes()
        at = len(before) // 3
        path.write_bytes(
            before[:at] + (bytes(4096) if zero else bytes([before[at] ^ 1])) + before[at + (4096 if zero else 1) :]
        )
        assert len(path.read_bytes()) == len(before) and path.read_bytes() != before
        return before

    for target, script in {
        "specforge-eagle3": lambda out: [SIDE / "read_specforge.py", "eagle3", tmp_path / "specforge-eagle3", out],
        "speculators-eagle3": lambda out: [
            *(SIDE / "read_speculators.py", "eagle3", "file", tmp_path / "speculators-eagle3", out),
            *(1024, models.HIDDEN, 3),
        ],
    }.items():
        request = Request(captured, target, str(tmp_path / target))
        export(request)
        files = [
            path for path in sorted((tmp_path / target / "hidden_states").rglob("*")) if path.stat().st_size > 60_000
        ]
        before = [harm(files[0], zero=True), harm(files[1], zero=False)]
        run_checked([trainers, *script(tmp_path / "damaged")], tmp_path)  # reads it all, and says nothing
        report = export(request)
        assert report.outcomes["replaced"] == 2
        assert [files[0].read_bytes(), files[1].read_bytes()] == before

    copy = tmp_path / "copy"
    shutil.copytree(captured, copy)
    shard = sorted((copy / "shards").iterdir())[0]
    for zero in (True, False):
        export(Request(str(copy), "speculators-eagle3", str(tmp_path / f"link-{zero}"), link=True))
        before = [harm(shard, zero)]
        with pytest.raises(ShardError, match="are not what was captured"):
            for line in range(5):
                ShardTransfer(str(tmp_path / f"link-{zero}")).get_cached(line)
        for target in ("specforge-eagle3", "speculators-eagle3"):
            with pytest.raises(ShardError, match="are not what was captured"):
                export(Request(str(copy), target, str(tmp_path / f"{target}-{zero}")))
        shard.write_bytes(before[0])


# The recipes of docs/trainers.md, from capture to training

PAGE = (ROOT / "docs/trainers.md").read_text()
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

DRAFT = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": models.HIDDEN,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 1,
    "vocab_size": models.VOCAB,
    "draft_vocab_size": 256,
    "max_position_embeddings": models.CONTEXT,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4], "use_aux_hidden_state": True},
}
DFLASH = DRAFT | {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "draft_vocab_size": models.VOCAB,
    "num_target_layers": models.LAYERS,
    "num_hidden_layers": 2,
    "layer_types": ["full_attention"] * 2,
    "use_sliding_window": False,
    "sliding_window": None,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "block_size": 4,
    "dflash_config": {"target_layer_ids": [1, 4], "mask_token_id": 0},
}
DSPARK = DFLASH | {
    "architectures": ["DSparkDraftModel"],
    "dflash_config": {
        "target_layer_ids": [4, 1],
        "mask_token_id": 0,
        "projector_type": "dspark",
        "markov_rank": 8,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    },
}

# One batch of all rows a step, and every anchor of DFlash's, so that the loss of each step is of the same tokens.
SPECFORGE = [
    "training.batch_size=14",
    "training.num_epochs=12",
    "training.learning_rate=0.01",
    "training.lr_scheduler=constant",
    "training.attention_backend=sdpa",
    "training.fsdp_sharding=NO_SHARD",
    "training.log_interval=1",
    "data.dataloader_num_workers=0",
]
SPECULATORS = [
    *("--draft-attn-impl", "sdpa", "--loss-implementation", "eager", "--hidden-states-dtype", "float32"),
    *("--epochs", "12", "--lr", "0.01", "--scheduler-type", "none", "--total-seq-len", "640", "--num-workers", "0"),
    *("--mask-token-id", "0", "--target-layer-ids", "2", "4", "5"),
    *("--num-layers", "1", "--block-size", "4", "--max-anchors", "344"),
]


def recipe(title: str) -> list[list[str]]:
    """The commands under a heading of the page, as words."""
    section = PAGE.split(f"## {title}\n")[1].split("\n## ")[0]
    return [shlex.split(line) for kind, text in BLOCK.findall(section) if kind == "bash" for line in text.splitlines()]


@pytest.fixture(scope="module")
def desk(model: Path, rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the page's files, with paths and sizes of this test; what recipes make stays for later ones."""
    folder = tmp_path_factory.mktemp("desk")
    for kind, text in BLOCK.findall(PAGE):
        if kind == "yaml":
            (folder / text.splitlines()[0].removeprefix("# ")).write_text(local(text, folder, model, rows))
    for name, config in {"draft": DRAFT, "dflash": DFLASH, "dspark": DSPARK}.items():
        (folder / f"{name}.json").write_text(json.dumps(config))
    return folder


def local(text: str, folder: Path, model: Path, rows: Path) -> str:
    for there, here in {
        "/models/Qwen3-8B": str(model),
        "/data/conversations.jsonl": str(rows),
        "/scratch/": f"{folder}/",
        "32000": "256",
    }.items():
        text = text.replace(there, here)
    return text


def follow(title: str, desk: Path, model: Path, rows: Path, trainers: Path) -> list[float]:
    """Run a recipe; the losses of its training."""
    losses = desk / f"losses-{len(list(desk.glob('losses-*')))}"
    losses.touch()
    for words in recipe(title):
        argv: list[Any] = [local(word, desk, model, rows) for word in words]
        match words[:3]:
            case ["python", "-m", "ray_extract.run"]:
                argv = [sys.executable, *argv[1:], "model.dtype=bfloat16", *ON_A_CPU]
            case ["python", "-m", _]:
                argv = [trainers, SIDE / "speculators_on_cpu.py", *argv[2:], *SPECULATORS]
            case ["ray-extract", *_]:
                argv = [Path(sys.executable).with_name("ray-extract"), *argv[1:]]
            case ["specforge", *_]:
                argv = [trainers, SIDE / "specforge_on_cpu.py", *argv[1:], *SPECFORGE]
            case _:
                raise AssertionError(f"{title}: no rule for {words}")
        run_checked(argv, desk, LOSSES=str(losses))
    return [json.loads(line) for line in losses.read_text().splitlines()]


@pytest.mark.parametrize(
    "title",
    [
        "SpecForge: EAGLE-3",
        "SpecForge: DFlash",
        "SpecForge: DSpark",
        "speculators: EAGLE-3, straight from the shards",
        "speculators: EAGLE-3, with files of its own",
        "speculators: DFlash, straight from the shards",
    ],
)
def test_a_recipe_of_the_page_trains_a_draft(
    trainers: Path, desk: Path, model: Path, rows: Path, title: str, record_property: Callable[..., None]
) -> None:
    losses = follow(title, desk, model, rows, trainers)
    record_property("losses", [round(loss, 3) for loss in losses])
    assert len(losses) >= 12 and np.isfinite(losses).all()
    assert losses[-1] < 0.97 * losses[0]


def test_every_command_of_the_page_is_in_a_recipe() -> None:
    titles = re.findall(r"^## (.+)$", PAGE, re.MULTILINE)
    with_commands = [title for title in titles if recipe(title)]
    mark = next(m for m in test_a_recipe_of_the_page_trains_a_draft.pytestmark if m.name == "parametrize")  # type: ignore[attr-defined]
    assert with_commands == mark.args[1]
