"""Conversations under the templates of real models: what the model said is supervised, and nothing else.

The templates in templates/ are small ones of ours, written from the formats that the models document. SmolLM2's is its
own, from the package of the demo's model.
"""

import json
import runpy
from pathlib import Path

import numpy as np
import pytest
import tiny_tokenizer as tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_extract.config import DatasetConfig, ModelConfig
from ray_extract.dataset import chat
from ray_extract.dataset.chat import Encoder, Unusable

FOLDER = Path(__file__).parent / "templates"
DEMO = Path(__file__).parents[1] / "deploy/cpu/demo/make_model.py"
CALL_ID = "functions.weather:0"
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Of a town.", "parameters": {}}}]
SYSTEM = {"role": "system", "content": "Be brief."}
QUESTION = {"role": "user", "content": "Is it wet in Bern?"}
CALL = {
    "role": "assistant",
    "tool_calls": [
        {"id": CALL_ID, "type": "function", "function": {"name": "weather", "arguments": '{"town": "Bern"}'}}
    ],
}
RESULT = {"role": "tool", "tool_call_id": CALL_ID, "content": "rain"}
ANSWER = {"role": "assistant", "content": "Yes, it rains."}
THANKS = {"role": "user", "content": "Thanks!"}
WELCOME = {"role": "assistant", "content": "Welcome."}

BAR = "\N{FULLWIDTH VERTICAL LINE}"  # of DeepSeek's marks
END = {
    "llama3": "<|eot_id|>",
    "qwen3": "<|im_end|>",
    "deepseek_v3": f"<{BAR}end▁of▁sentence{BAR}>",
    "kimi_k2": "<|im_end|>",
}
CALLED = {
    "llama3": '{"name": "weather", "parameters": {"town": "Bern"}}',
    "qwen3": '<tool_call>\n{"name": "weather", "arguments": {"town": "Bern"}}\n</tool_call>',
    "deepseek_v3": (
        "<|tool▁calls▁begin|><|tool▁call▁begin|>function<|tool▁sep|>weather\n"
        '```json\n{"town": "Bern"}\n```<|tool▁call▁end|><|tool▁calls▁end|>'
    ).replace("|", BAR),
    "kimi_k2": (
        f"<|tool_calls_section_begin|><|tool_call_begin|>{CALL_ID}<|tool_call_argument_begin|>"
        '{"town": "Bern"}<|tool_call_end|><|tool_calls_section_end|>'
    ),
}
THOUGHT = {"qwen3": "<think>\n\n</think>\n\n"}  # before an answer to the last question
FAMILIES = pytest.mark.parametrize("family", END)


def encoder(tokenizer, **dataset):
    made = Encoder(ModelConfig(path="m"), "m", DatasetConfig(paths=("-",), **dataset), 1 << 20)
    made._load = lambda: tokenizer
    return made


def rendered(family, record, **options):
    """The text of a record, and that of each run of supervised tokens."""
    tokenizer = tiny.byte_level((FOLDER / f"{family}.jinja").read_text())
    arguments = "string" if family == "deepseek_v3" else "object"
    tokens = encoder(tokenizer, tool_arguments=arguments, **options).encode(record)
    return tokenizer.decode(tokens.input_ids), runs(tokenizer, tokens)


def runs(tokenizer, tokens):
    edges = np.flatnonzero(np.diff(np.concatenate(([0], tokens.loss_mask, [0])).astype(int))).reshape(-1, 2)
    return [tokenizer.decode(tokens.input_ids[start:end]) for start, end in edges]


@FAMILIES
def test_every_answer_with_its_end_mark_is_supervised(family):
    text, spans = rendered(family, {"messages": [SYSTEM, QUESTION, ANSWER, THANKS, WELCOME]})
    end, thought = END[family], THOUGHT.get(family, "")
    assert spans == [f"Yes, it rains.{end}", f"{thought}Welcome.{end}"]
    assert text.count("Be brief.") == 1


@FAMILIES
def test_tool_calls_are_supervised_and_what_tools_answer_is_not(family):
    record = {"messages": [SYSTEM, QUESTION, CALL, RESULT, ANSWER, THANKS, WELCOME]}
    if family != "deepseek_v3":
        record["tools"] = TOOLS
    text, spans = rendered(family, record)
    end, thought = END[family], THOUGHT.get(family, "")
    assert spans == [f"{CALLED[family]}{end}", f"Yes, it rains.{end}", f"{thought}Welcome.{end}"]
    assert "rain" in text
    if family != "deepseek_v3":
        assert "Of a town." in text
        assert rendered(family, record | {"tools": json.dumps(TOOLS)})[0] == text
        assert rendered(family, record | {"tools": [TOOLS[0]["function"]]})[0] == text


@FAMILIES
def test_spellings_of_one_tool_call_are_one_row(family):
    openai = [QUESTION, CALL | {"content": ""}, RESULT, ANSWER]
    call = CALL["tool_calls"][0]
    parsed = call | {"function": {"name": "weather", "arguments": {"town": "Bern"}}}
    as_object = [QUESTION, {"role": "assistant", "content": None, "tool_calls": [parsed]}, RESULT, ANSWER]
    assert rendered(family, {"messages": as_object}) == rendered(family, {"messages": openai})


@pytest.mark.parametrize("family", ["llama3", "qwen3", "deepseek_v3"])  # Kimi's needs the call's id
def test_sharegpt_calls_and_a_system_prompt_beside_the_turns_are_understood(family):
    sharegpt = {
        "system": "Be brief.",
        "conversations": [
            {"from": "human", "value": "Is it wet in Bern?"},
            {"from": "function_call", "value": '{"name": "weather", "arguments": {"town": "Bern"}}'},
            {"from": "observation", "value": "rain"},
            {"from": "gpt", "value": "Yes, it rains."},
        ],
    }
    assert rendered(family, sharegpt) == rendered(family, {"messages": [SYSTEM, QUESTION, CALL, RESULT, ANSWER]})


def test_reasoning_of_the_last_question_is_supervised_and_earlier_one_is_left_out():
    reasoning = {"reasoning_content": "Look it up."}
    record = {"messages": [QUESTION, CALL | reasoning, RESULT, ANSWER | reasoning]}
    _, spans = rendered("qwen3", record)
    thought = "<think>\nLook it up.\n</think>\n\n"
    assert spans == [f"{thought}{CALLED['qwen3']}<|im_end|>", f"{thought}Yes, it rains.<|im_end|>"]
    _, spans = rendered("qwen3", {"messages": [*record["messages"], THANKS, WELCOME]})
    assert spans == [
        f"{CALLED['qwen3']}<|im_end|>",
        "Yes, it rains.<|im_end|>",
        "<think>\n\n</think>\n\nWelcome.<|im_end|>",
    ]


def test_tools_that_a_template_leaves_out_are_a_reason_with_the_rendering():
    with pytest.raises(Unusable, match=r"^chat template: it leaves out the tools of the conversation$") as caught:
        rendered("deepseek_v3", {"messages": [QUESTION, ANSWER], "tools": TOOLS})
    assert f"<{BAR}User{BAR}>Is it wet in Bern?" in caught.value.rendered
    tokenizer = tiny.byte_level("{% for m in messages %}{{ m.content or '' }}{% endfor %}")
    with pytest.raises(Unusable, match="leaves out the tool calls"):
        encoder(tokenizer, mask="all").encode({"messages": [QUESTION, CALL, RESULT, ANSWER]})


def test_name_that_is_in_the_text_for_another_reason_does_not_hide_what_is_left_out():
    bare = "{% for m in messages %}{{ m.content or '' }}{% endfor %}"
    called = [QUESTION, CALL, RESULT, ANSWER]
    asked = [{"role": "user", "content": "How is the weather?"}, *called]
    for template, record, what in (
        (bare, {"messages": asked}, "tool calls"),
        (bare, {"messages": [asked[0], ANSWER], "tools": TOOLS}, "tools"),
        ("{{ tools | tojson }}" + bare, {"messages": called, "tools": TOOLS}, "tool calls"),
    ):
        with pytest.raises(Unusable, match=f"leaves out the {what} of"):
            encoder(tiny.byte_level(template), mask="all").encode(record)


def test_arguments_of_another_kind_than_the_template_takes_are_a_reason():
    tokenizer = tiny.byte_level((FOLDER / "deepseek_v3.jinja").read_text())
    with pytest.raises(Unusable, match=r"^chat template: "):
        encoder(tokenizer).encode({"messages": [QUESTION, CALL, RESULT, ANSWER]})


WORDS = st.text(alphabet="ab é\N{SNOWMAN}.", max_size=8).map(str.strip)


@settings(max_examples=80, deadline=None)
@given(
    family=st.sampled_from(sorted(END)),
    turns=st.lists(st.tuples(WORDS, WORDS, st.none() | WORDS), min_size=1, max_size=4),
    system=st.none() | WORDS,
    last=st.booleans(),
)
def test_any_conversation_has_one_run_for_each_turn_of_the_assistant(family, turns, system, last):
    messages = [] if system is None else [{"role": "system", "content": system}]
    expected = []
    for number, (question, answer, reasoning) in enumerate(turns, start=1):
        messages.append({"role": "user", "content": question})
        if reasoning is not None:
            shown = reasoning and family == "qwen3" and number == len(turns)
            expected.append((f"<think>\n{reasoning}\n</think>\n\n" if shown else "") + CALLED[family])
            messages += [CALL | {"reasoning_content": reasoning}, RESULT]
        messages.append({"role": "assistant", "content": answer})
        expected.append(answer)
    expected[-1] = THOUGHT.get(family, "") + expected[-1]
    text, spans = rendered(family, {"messages": messages}, mask="last_assistant" if last else "assistant")
    assert spans == [f"{turn}{END[family]}" for turn in (expected[-1:] if last else expected)]
    assert text.endswith((spans[-1], spans[-1] + "\n"))


def test_smollm2_supervises_its_answers(tmp_path):
    demo = runpy.run_path(str(DEMO))
    demo["load_tokenizer"](demo["packaged_gguf"]()).save_pretrained(tmp_path)
    tokenizer = chat.load_tokenizer(ModelConfig(path=str(tmp_path)), str(tmp_path))
    tokens = encoder(tokenizer).encode({"messages": [QUESTION, ANSWER, THANKS, WELCOME]})
    assert runs(tokenizer, tokens) == ["Yes, it rains.<|im_end|>", "Welcome.<|im_end|>"]
    with pytest.raises(Unusable, match="leaves out the tools"):
        encoder(tokenizer).encode({"messages": [QUESTION, ANSWER], "tools": TOOLS})
