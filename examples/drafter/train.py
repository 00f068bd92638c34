"""Train small EAGLE-3 drafters on states captured by SGLang, and say how often they foretell the target.

    python examples/drafter/train.py [--rows 164] [--tokens 256] [--seeds 3] [--epochs 3] [--folder .cache/drafter]

One run of ray_extract stores the states. Each drafter is then trained on states of one source, under the names that one
case gives them, and is tried on held-out rows with the states that Transformers computes: those that it would be served
with. So a state that is not what its name says shows as agreement that is lost.
"""

import argparse
import dataclasses
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch: on shared cores, waiting threads that spin cost 4x

import torch
from data import FINAL, Rows, States, examples, own_tokens, stored_rows, transformers_states, unit
from drafter import agreement, train
from probe import KINDS, ProbeResult, kind, probe

from ray_extract.readers.head import load_head, load_token_counts
from ray_extract.readers.vocab import vocab_maps

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
from results import Row, write  # noqa: E402

MODEL, PROMPTS = ".cache/smollm2-135m-instruct", ".cache/humaneval.jsonl"
LAYERS = 30
BOUNDARIES = (2, LAYERS // 2, LAYERS - 3)  # eagle3's
DRAFT_VOCAB = 1024


@dataclasses.dataclass(frozen=True)
class Case:
    """What a drafter is trained on.

    Args:
        name: for people.
        source: `shards` or `transformers`.
        shift: how many boundaries late its states are.
        final: the state taken for what enters the LM head.
    """

    name: str
    source: str
    shift: int = 0
    final: str = FINAL


RIGHT, REFERENCE = Case("states of the shards", "shards"), Case("states by Transformers", "transformers")
WRONG = (
    Case("shards, each boundary one early", "shards", shift=-1),
    Case("shards, each boundary one late", "shards", shift=1),
    Case("shards, state before the final norm as the one after it", "shards", final=f"state.{LAYERS}"),
)


def capture(folder: Path, rows: int, tokens: int) -> str:
    """Run ray_extract over the demo's conversations; a finished run is found finished. Returns the output."""
    python, url = sys.executable, str(folder / f"states-{rows}x{tokens}")
    job = ["--config", "examples/drafter/job.yaml", f"output.url={url}"]
    job += [f"dataset.limit={rows}", f"dataset.max_tokens={tokens}", f"engine.env.OMP_NUM_THREADS='{os.cpu_count()}'"]
    env = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    for command in (
        [python, "deploy/cpu/demo/make_model.py", MODEL],
        [python, "deploy/cpu/demo/make_prompts.py", PROMPTS],
        [python, "-m", "ray_extract.run", *job],
    ):
        subprocess.run(command, cwd=ROOT, env=env, check=True)
    return url


def compare(
    url: str, rows: Rows, reference: States, split: tuple[list[int], list[int]], seeds: int, epochs: int
) -> tuple[dict[str, list[float]], float]:
    """Agreement with the target of each case and seed, and how much of it the draft's vocabulary allows."""
    train_rows, held_out = split
    head = load_head(url, check=True)
    d2t, t2d = (torch.from_numpy(part) for part in vocab_maps(load_token_counts(url).supervised, DRAFT_VOCAB))
    draft_head, whole_head = head.lm_head[t2d].float(), head.lm_head.float()
    own = [own_tokens(reference[i], whole_head)[1:] for i in held_out]
    served = examples(rows, reference, held_out, BOUNDARIES, FINAL, draft_head)
    found: dict[str, list[float]] = {}
    for case in (RIGHT, REFERENCE, *WRONG):
        states = reference if case.source == "transformers" else rows.states
        boundaries = [b + case.shift for b in BOUNDARIES]
        seen = examples(rows, states, train_rows, boundaries, case.final, draft_head)
        drafters = [train(seen, head.embed_tokens, draft_head, seed, epochs) for seed in range(seeds)]
        found[case.name] = [agreement(drafter, served, own, d2t) for drafter in drafters]
        print(f"{case.name:56} {', '.join(f'{value:.1%}' for value in found[case.name])}", flush=True)
    return found, float(t2d[torch.cat(own)].float().mean())


def probed(rows: Rows, split: tuple[list[int], list[int]]) -> ProbeResult:
    """The probe of the middle boundary."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(ROOT / MODEL)
    kinds = torch.tensor([kind(tokenizer.decode([token])) for token in range(len(tokenizer))])
    states = [unit(states[f"state.{BOUNDARIES[1]}"]) for states in rows.states]
    return probe(rows.input_ids, states, kinds, *split)


def figures(found: dict[str, list[float]], covered: float, probe: ProbeResult) -> list[Row]:
    """What is recorded, in percent and percentage points."""
    points = {name: [100 * value for value in values] for name, values in found.items()}
    mean = {name: statistics.fmean(values) for name, values in points.items()}
    rows = []
    for name, values in points.items():
        agrees = f"held-out agreement with the target, mean of {len(values)} seeds"
        rows.append(Row(name, agrees, round(mean[name], 2), "%"))
        rows.append(Row(name, "largest less smallest seed", round(max(values) - min(values), 2), "points"))
    same = [abs(a - b) for a, b in zip(points[RIGHT.name], points[REFERENCE.name], strict=True)]
    difference = abs(mean[RIGHT.name] - mean[REFERENCE.name])
    case = f"{RIGHT.name}, against {REFERENCE.name}"
    rows.append(Row(case, "difference of the means", round(difference, 2), "points", 1.0, "lower"))
    rows.append(Row(case, "largest difference of a seed", round(max(same), 2), "points"))
    for wrong in WRONG:
        lost = mean[REFERENCE.name] - mean[wrong.name]
        rows.append(Row(wrong.name, f"lost against the {REFERENCE.name}", round(lost, 2), "points", 2.0))
    case = f"vocabulary of the {DRAFT_VOCAB} most frequent tokens"
    rows.append(Row(case, "holds of the target's own tokens", round(100 * covered, 2), "%"))
    case = f"linear probe of state.{BOUNDARIES[1]}: the next token's kind, of {len(KINDS)}"
    rows.append(Row(case, "held-out accuracy", round(100 * probe.probe, 2), "%"))
    rows.append(Row(case, "of a guess from the token alone", round(100 * probe.by_token, 2), "%"))
    rows.append(Row(case, "of the most frequent answer", round(100 * probe.majority, 2), "%"))
    return rows


def splits(count: int) -> tuple[list[int], list[int]]:
    """Rows to train on, and a fifth of them to hold out."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).tolist()
    return sorted(order[count // 5 :]), sorted(order[: count // 5])


def main(argv: Sequence[str] | None = None) -> int:
    """Capture, train, compare, record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=164, help="conversations")
    parser.add_argument("--tokens", type=int, default=256, help="longer ones are cut")
    parser.add_argument("--seeds", type=int, default=3, help="drafters of each case")
    parser.add_argument("--epochs", type=int, default=3, help="passes over the rows")
    parser.add_argument("--folder", type=Path, default=ROOT / ".cache/drafter", help="for states; kept")
    args = parser.parse_args(argv)
    folder = args.folder.absolute()
    url = capture(folder, args.rows, args.tokens)
    rows = stored_rows(url)
    cache = folder / f"transformers-{args.rows}x{args.tokens}.safetensors"
    reference = transformers_states(ROOT / MODEL, rows, cache)
    split = splits(len(rows.input_ids))
    found = figures(*compare(url, rows, reference, split, args.seeds, args.epochs), probed(rows, split))
    for row in found:
        print(f"{row.case:64} {row.metric:56} {row.value:8} {row.unit}")
    print(f"written to {write('drafter', found)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
