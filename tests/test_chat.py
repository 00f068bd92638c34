"""Conversations become ids and masks: what is supervised is what the model would have said, or the row says why not."""

import unicodedata

import numpy as np
import pytest
import tiny_tokenizer as tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_extract.config import DatasetConfig, ModelConfig
from ray_extract.dataset import chat
from ray_extract.dataset.chat import Encoder, Overlong, Unusable, check_ids, least_tokens, normalise
from ray_extract.errors import ConfigError

VOCAB = 300
USER = {"role": "user", "content": "2+2?"}
ANSWER = {"role": "assistant", "content": "It is 4."}
LONG = [USER, ANSWER, {"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "\n\nYes — 4."}]


class Slow:
    """A tokenizer without offsets, as those written in Python are."""

    is_fast = False

    def __init__(self, fast):
        self._fast = fast

    def __getattr__(self, name):
        return getattr(self._fast, name)

    def __call__(self, text, *, return_offsets_mapping=False, **options):
        assert not return_offsets_mapping, "slow tokenizers refuse this"
        return self._fast(text, **options)


@pytest.fixture
def encode(monkeypatch):
    def encode(conversation, template=tiny.CHATML, *, slow=False, mask="assistant"):
        tokenizer = tiny.byte_level(template)
        monkeypatch.setattr(chat, "load_tokenizer", lambda *_: Slow(tokenizer) if slow else tokenizer)
        dataset = DatasetConfig(paths=("-",), mask=mask)
        tokens = Encoder(ModelConfig(path="m"), "m", dataset, VOCAB).encode({"messages": conversation})
        assert tokens.input_ids.dtype == np.int32
        assert tokens.loss_mask.dtype == np.uint8
        assert len(tokens.input_ids) == len(tokens.loss_mask)
        return tokenizer.decode(tokens.input_ids), supervised(tokenizer, tokens)

    return encode


def supervised(tokenizer, tokens):
    """The text of each run of supervised tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], tokens.loss_mask, [0])).astype(int))).reshape(-1, 2)
    return [tokenizer.decode(tokens.input_ids[start:end]) for start, end in edges]


TEMPLATES = pytest.mark.parametrize("template", [tiny.CHATML, tiny.CHATML_GENERATION], ids=["plain", "generation"])


@TEMPLATES
@pytest.mark.parametrize("slow", [False, True])
def test_assistant_turns_and_their_end_marks_are_supervised(encode, template, slow):
    conversation = [USER, ANSWER, {"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "Yes — 4."}]
    text, spans = encode(conversation, template, slow=slow)
    assert spans == ["It is 4.<|im_end|>", "Yes — 4.<|im_end|>"]
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n")
    assert text.endswith("Yes — 4.<|im_end|>\n")


@TEMPLATES
def test_last_assistant_supervises_the_last_turn_only(encode, template):
    trailing = [*LONG[:3], {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Thanks"}]
    assert encode(trailing, template, mask="last_assistant")[1] == ["Yes.<|im_end|>"]


def test_last_turn_of_several_generation_blocks_is_supervised_whole(encode):
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}<think>{% endgeneration %}|"
        "{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    for conversation in (LONG, LONG[:2]):
        answer = conversation[-1]["content"]
        assert encode(conversation, template, mask="last_assistant")[1] == ["<think>", answer]


@TEMPLATES
def test_all_supervises_every_token(encode, template):
    text, spans = encode([USER, ANSWER], template, mask="all")
    assert spans == [text]


@TEMPLATES
def test_token_over_the_border_of_a_turn_is_supervised(encode, template):
    # The template's line break and the first of the content's two are one token.
    assert encode(LONG, template)[1] == ["It is 4.<|im_end|>", "\n\n\nYes — 4.<|im_end|>"]


def test_token_over_the_border_of_a_turn_is_a_reason_without_offsets(encode):
    with pytest.raises(Unusable, match="undecidable mask: a token spans the border"):
        encode(LONG, slow=True)


@TEMPLATES
def test_conversation_without_an_answer_has_no_supervised_token(encode, template):
    with pytest.raises(Unusable, match=r"^no supervised token$"):
        encode([USER], template)
    assert encode([USER], template, mask="all")[1]


def test_generation_mask_agrees_with_transformers_own():
    tokenizer = tiny.byte_level(tiny.CHATML_GENERATION)
    theirs = tokenizer.apply_chat_template(LONG, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    ours = chat._Chat(tokenizer, DatasetConfig(paths=("-",))).encode(LONG, "assistant")
    assert ours.input_ids.tolist() == theirs["input_ids"]
    assert ours.loss_mask.tolist() == theirs["assistant_masks"]


def test_last_character_of_many_tokens_is_supervised_whole(encode):
    template = "{% for m in messages %}{{ m.role }}:{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    assert encode([{"role": "assistant", "content": "ok\N{SNOWMAN}"}], template)[1] == ["ok\N{SNOWMAN}"]


WORDS = st.text(alphabet="ab <é\N{SNOWMAN}.\n", max_size=12)


@settings(max_examples=60, deadline=None)
@given(turns=st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=4), system=st.none() | WORDS, first=st.booleans())
def test_turn_by_turn_masks_equal_those_of_generation_marks(turns, system, first):
    messages = [] if system is None else [{"role": "system", "content": system}]
    for question, answer in turns:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    if first and system is None:
        del messages[0]
    dataset = DatasetConfig(paths=("-",))
    plain = chat._Chat(TOKENIZERS[0], dataset).encode(messages, "assistant")
    marked = chat._Chat(TOKENIZERS[1], dataset).encode(messages, "assistant")
    assert plain.input_ids.tolist() == marked.input_ids.tolist()
    assert plain.loss_mask.tolist() == marked.loss_mask.tolist()
    spans = supervised(TOKENIZERS[0], plain)
    assert [s.lstrip("\n") for s in spans] == [f"{answer}<|im_end|>".lstrip("\n") for _, answer in turns]


TOKENIZERS = (tiny.byte_level(tiny.CHATML), tiny.byte_level(tiny.CHATML_GENERATION))


def test_reasoning_that_only_the_last_turn_shows_does_not_shift_earlier_turns(encode):
    conversation = [USER, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nIt is\n4."}, *LONG[2:3], ANSWER]
    text, spans = encode(conversation, tiny.QWEN3)
    assert spans == ["It is\n4.<|im_end|>", "<think>\n\n</think>\n\nIt is 4.<|im_end|>"]
    assert text.count("<think>") == 1


@pytest.mark.parametrize("content", ["It is 4.", "</think>", "<think>", "o", "k", ""])
def test_reasoning_that_earlier_turns_lose_in_their_middle_does_not_shift_them(encode, content):
    answer = {"role": "assistant", "content": content, "reasoning_content": "hm, ok"}
    _, spans = encode([USER, answer, USER, answer], tiny.KIMI_THINKING)
    assert spans == [f"<think></think>{content}<|im_end|>", f"<think>hm, ok</think>{content}<|im_end|>"]


def test_turn_that_loses_its_answer_inside_the_whole_is_a_reason(encode):
    template = tiny.CHATML.replace("+ m.content +", "+ (m.content if loop.last or m.role != 'assistant' else '') +")
    with pytest.raises(Unusable, match="undecidable mask: the rendering of an assistant turn differs"):
        encode(LONG, template)


@pytest.mark.parametrize("content", ["It is 4.", "<div>", "<think>\nhm\n</think>\n4", "", "a"])
def test_generation_prompt_that_opens_reasoning_does_not_eat_answers(encode, content):
    conversation = [USER, {"role": "assistant", "content": content}]
    expected = content.removeprefix("<think>\n") + "<|im_end|>"
    assert encode(conversation, tiny.R1)[1] == [expected]


@pytest.mark.parametrize("template", [tiny.COUNTING, tiny.COUNTDOWN])
def test_template_whose_parts_do_not_fit_is_a_reason(encode, template):
    with pytest.raises(Unusable, match=r"^undecidable mask: the rendering of"):
        encode(LONG, template)
    assert encode(LONG, template, mask="all")[1]


@TEMPLATES
def test_conversation_may_begin_with_the_assistant(encode, template):
    text, spans = encode([ANSWER, USER, ANSWER], template)
    assert spans == ["It is 4.<|im_end|>"] * 2
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>assistant\nIt is 4.")


def test_first_turn_that_quotes_the_prompt_or_has_another_one_is_a_reason(encode):
    quoting = {"role": "assistant", "content": "Type <|im_start|>assistant\nto begin."}
    with pytest.raises(Unusable, match="undecidable mask: the first turn is the assistant's, and where it begins"):
        encode([quoting, USER, ANSWER])
    with pytest.raises(Unusable, match="undecidable mask: the first turn is the assistant's, and where it begins"):
        encode([ANSWER, USER, ANSWER], tiny.R1)
    assert encode([quoting, USER, ANSWER], tiny.CHATML_GENERATION)[1]


def test_what_a_template_refuses_is_a_reason(encode):
    with pytest.raises(Unusable, match=r"^chat template: Roles must alternate$"):
        encode([USER, ANSWER], tiny.REFUSING)


def test_broken_template_is_a_config_error(encode):
    with pytest.raises(ConfigError, match=r"the tokenizer's chat template: not a valid template, line 1"):
        encode([USER, ANSWER], tiny.BROKEN)


def test_sharegpt_and_openai_spellings_are_the_same_conversation():
    sharegpt = [
        {"from": "system", "value": "s", "weight": None},
        {"from": "human", "value": "q"},
        {"from": "GPT", "value": "a"},
        {"from": "tool", "value": "t"},
    ]
    openai = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "q"}]},
        {"role": "assistant", "content": ["a"]},
        {"role": "tool", "content": "t"},
    ]
    assert normalise(sharegpt) == normalise(openai)
    assert [m["role"] for m in normalise(openai)] == ["system", "user", "assistant", "tool"]


def test_columns_of_messages_are_messages():
    """As Hugging Face `datasets` stores a sequence of records."""
    assert normalise({"from": ["human", "gpt"], "value": ["q", "a"]}) == [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a"},
    ]


def test_fields_of_tool_calls_pass_through():
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}], "name": None}
    assert normalise([call]) == [{"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}]


@pytest.mark.parametrize(
    ("conversation", "reason"),
    [
        ([], "empty conversation"),
        ("[]", "unusable conversation: a text and not a list; if it is JSON, store the list that it stands for"),
        ({"role": ["user"], "content": []}, "unusable conversation: its fields are lists of different lengths"),
        ({}, "empty conversation"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            "unusable tool call: message 1 has one that is not JSON",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}],
            "unusable tool call: message 1 has arguments that are not an object",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}],
            "unusable tool call: message 1 has one without a name",
        ),
        ([{"from": "function_call", "value": "f("}], "unusable tool call: message 1 has one that is not JSON"),
        (
            [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": [1]}]}],
            "unusable tool call: message 1 has arguments that are not an object",
        ),
        (["hello"], "unusable message: message 1 is not an object"),
        ([{"content": "x"}], "unknown role: None in message 1"),
        ([USER, {"role": "narrator", "content": "x"}], "unknown role: 'narrator' in message 2"),
        ([{"role": "user"}], "unusable content: message 1 has none"),
        ([{"role": "user", "content": 4}], "unusable content: message 1 has int content"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url"}]}],
            "unusable content: message 1 has a part of type image_url",
        ),
    ],
)
def test_unusable_conversation_says_why(conversation, reason):
    with pytest.raises(Unusable) as caught:
        normalise(conversation)
    assert str(caught.value) == reason


@pytest.mark.parametrize(
    ("field", "reason"),
    [
        ("messages", "unusable message: message 1 is not an object"),
        ("system", "unusable system: list"),
        ("tools", "unusable tools: not a list of objects"),
    ],
)
def test_column_of_whole_numbers_where_none_belong_is_a_reason(monkeypatch, field, reason):
    monkeypatch.setattr(chat, "load_tokenizer", lambda *_: tiny.byte_level())
    record = {"messages": [USER, ANSWER], field: np.array([1, 2])}
    with pytest.raises(Unusable) as caught:
        Encoder(ModelConfig(path="m"), "m", DatasetConfig(paths=("-",)), VOCAB).encode(record)
    assert str(caught.value) == reason


@pytest.mark.parametrize(
    ("tools", "found"),
    [
        (None, None),
        ("", None),
        ([], None),
        ('[{"name": "f"}]', [{"type": "function", "function": {"name": "f"}}]),
        ([{"type": "function", "function": {"name": "f"}}], [{"type": "function", "function": {"name": "f"}}]),
        ("[{", "unusable tools: not JSON"),
        ({"name": "f"}, "unusable tools: not a list of objects"),
        ([{"description": "x"}], "unusable tools: one has no name"),
    ],
)
def test_tools_are_a_list_or_its_json(tools, found):
    if not isinstance(found, str):
        assert chat.normalise_tools(tools) == found
        return
    with pytest.raises(Unusable) as caught:
        chat.normalise_tools(tools)
    assert str(caught.value) == found


def test_lone_surrogates_are_a_reason(encode):
    with pytest.raises(Unusable, match="unusable text: lone surrogates"):
        encode([{"role": "user", "content": "\ud800"}, ANSWER])


@pytest.mark.parametrize(
    ("ids", "mask", "reason"),
    [
        ("12", None, "unusable input_ids: not a list"),
        ([1, 2.5], None, "unusable input_ids: not a flat list of whole numbers"),
        ([True, False], None, "unusable input_ids: not a flat list of whole numbers"),
        ([[1], [2, 3]], None, "unusable input_ids: not a flat list of whole numbers"),
        ([1, 1 << 70], None, "unusable input_ids: not a flat list of whole numbers"),
        ([1, None], None, "unusable input_ids: not a flat list of whole numbers"),
        ([1, VOCAB], None, f"token id out of range: {VOCAB} with a vocabulary of {VOCAB}"),
        ([-1, 3], None, f"token id out of range: -1 with a vocabulary of {VOCAB}"),
        ([1, 2], [1], "unusable loss_mask: 1 values for 2 tokens"),
        ([1, 2], [1, 2], "unusable loss_mask: values other than 0 and 1"),
        ([1, 2], [0.0, 1.0], "unusable loss_mask: not a flat list of whole numbers"),
    ],
)
def test_unusable_ids_say_why(ids, mask, reason):
    with pytest.raises(Unusable) as caught:
        check_ids(ids, mask, VOCAB)
    assert str(caught.value) == reason


@pytest.mark.parametrize("kind", [list, np.array])
def test_ready_ids_are_taken_as_they_are_without_a_tokenizer(kind, monkeypatch):
    monkeypatch.setattr(chat, "load_tokenizer", lambda *_: pytest.fail("loaded a tokenizer"))
    encoder = Encoder(ModelConfig(path="m"), "m", DatasetConfig(paths=("-",)), VOCAB)
    tokens = encoder.encode({"input_ids": kind([5, 0, 7]), "loss_mask": kind([0, 1, 1]), "messages": None})
    assert (tokens.input_ids.tolist(), tokens.loss_mask.tolist()) == ([5, 0, 7], [0, 1, 1])
    assert encoder.encode({"input_ids": kind([5, 0, 7])}).loss_mask.tolist() == [1, 1, 1]


def test_text_gets_special_tokens_and_a_mask_of_ones(monkeypatch):
    tokenizer = tiny.byte_level()
    monkeypatch.setattr(chat, "load_tokenizer", lambda *_: tokenizer)
    encoder = Encoder(ModelConfig(path="m"), "m", DatasetConfig(paths=("-",)), VOCAB)
    tokens = encoder.encode({"text": "héllo"})
    assert tokenizer.decode(tokens.input_ids) == "<s>héllo"
    assert tokens.loss_mask.tolist() == [1] * 7
    for record, reason in (({"text": ""}, "empty text"), ({"text": 3}, "unusable text: int"), ({}, "no known field")):
        with pytest.raises(Unusable, match=reason):
            encoder.encode(record)


def test_tokenizer_of_a_larger_vocabulary_is_noticed(monkeypatch):
    monkeypatch.setattr(chat, "load_tokenizer", lambda *_: tiny.byte_level())
    encoder = Encoder(ModelConfig(path="m"), "m", DatasetConfig(paths=("-",)), 100)
    with pytest.raises(Unusable, match="token id out of range"):
        encoder.encode({"messages": [USER, ANSWER]})


def test_tokenizer_is_read_from_the_models_folder_or_the_named_one(tmp_path):
    folder = tiny.save(tmp_path)
    named = ModelConfig(path="m", tokenizer=str(folder))
    for model, path in ((ModelConfig(path="hub/name"), str(folder)), (named, "")):
        tokens = Encoder(model, path, DatasetConfig(paths=("-",)), VOCAB).encode({"messages": [USER, ANSWER]})
        assert supervised(tiny.byte_level(), tokens) == ["It is 4.<|im_end|>"]


def test_missing_tokenizer_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match=r"model\.tokenizer = .*no tokenizer can be loaded.*set model\.tokenizer"):
        chat.load_tokenizer(ModelConfig(path="m", tokenizer=str(tmp_path)), "m")
    with pytest.raises(ConfigError, match=r"model\.path = 'm': no tokenizer .*set model\.tokenizer"):
        chat.load_tokenizer(ModelConfig(path="m"), str(tmp_path))


def test_template_file_replaces_the_tokenizers(tmp_path, monkeypatch):
    monkeypatch.setattr(chat, "load_tokenizer", lambda *_: tiny.byte_level(None))

    def encoder(template):
        return Encoder(ModelConfig(path="m"), "m", DatasetConfig(paths=("-",), chat_template=template), VOCAB)

    (tmp_path / "t.jinja").write_text(tiny.CHATML)
    tokens = encoder(str(tmp_path / "t.jinja")).encode({"messages": [USER, ANSWER]})
    assert supervised(tiny.byte_level(), tokens) == ["It is 4.<|im_end|>"]
    with pytest.raises(ConfigError, match=r"dataset\.chat_template: .*no \(default\) chat template"):
        encoder(None).encode({"messages": [USER, ANSWER]})
    with pytest.raises(ConfigError, match=r"dataset\.chat_template = .*cannot be read"):
        encoder(str(tmp_path / "missing")).encode({"messages": [USER, ANSWER]})


def byte_pairs(normalizer=None, pre_tokenizer=None, byte_fallback=False, without="", letter="a", **added):
    """A byte-level tokenizer with a token of 8 letters, and other parts."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = [f"<0x{i:02X}>" for i in range(256)] if byte_fallback else pre_tokenizers.ByteLevel.alphabet()
    pieces = [*letters, *(letter * n for n in (1, 2, 4, 8))]
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys(p for p in pieces if p not in without))}
    merges = [(letter * n, letter * n) for n in (1, 2, 4)]
    backend = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, byte_fallback=byte_fallback, fuse_unk=True, unk_token=letter)
    )
    backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizer or (None if byte_fallback else pre_tokenizers.ByteLevel(use_regex=False))
    backend.add_special_tokens([AddedToken("<|end|>", special=True, normalized=False, **added)])
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def test_least_number_of_tokens_is_told_only_where_nothing_of_a_text_can_vanish():
    from tokenizers import Regex, normalizers, pre_tokenizers

    split = pre_tokenizers.Split
    level = pre_tokenizers.ByteLevel(use_regex=False)
    spaced = normalizers.Sequence([normalizers.Prepend("_"), normalizers.Replace(" ", "_")])
    for least, made in (
        (45, byte_pairs()),
        (11, byte_pairs(normalizers.NFC())),
        (45, byte_pairs(spaced, byte_fallback=True)),
        (45, byte_pairs(pre_tokenizer=pre_tokenizers.Sequence([split(Regex("a+"), "isolated"), level]))),
        (45, byte_pairs(without="Ćâ")),
        (11, byte_pairs(normalizers.NFC(), without="ÿ")),  # no UTF-8 has this byte
        (None, byte_pairs(normalizers.NFC(), without="Ć")),
        (None, byte_pairs(normalizers.NFKC())),
        (None, byte_pairs(normalizers.Strip())),
        (None, byte_pairs(normalizers.Replace(Regex(" +"), " "))),
        (None, byte_pairs(normalizers.Sequence([normalizers.NFC(), normalizers.Replace("  ", " ")]))),
        (None, byte_pairs(pre_tokenizer=pre_tokenizers.Sequence([split(" ", "removed"), level]))),
        (None, byte_pairs(pre_tokenizer=pre_tokenizers.Whitespace())),
        (None, byte_pairs(rstrip=True)),
        (None, byte_pairs(lstrip=True)),
        (None, Slow(byte_pairs())),
    ):
        told = least_tokens(made)
        assert (told and told("a" * 360)) == least
    partial = least_tokens(byte_pairs(without="Ćâ"))
    assert partial("a" * 90 + "\x06" * 1000 + "\N{SNOWMAN}" * 1000) == 11


def test_characters_that_are_composed_before_may_be_four_times_as_many():
    from tokenizers import normalizers

    made = byte_pairs(normalizers.NFC(), byte_fallback=True, letter="\u1f82")
    text = unicodedata.normalize("NFD", "\u1f82" * 96)
    assert len(text) == 384 and len(made(text, add_special_tokens=False)["input_ids"]) == 12 == least_tokens(made)(text)


TEXT = st.text(st.sampled_from("aaaaaab e\u0301\u0323\u1161\u1100\u11a8\N{SNOWMAN}\n\x06"), max_size=60)
LONG_RUNS = st.integers(1, 40).flatmap(lambda n: st.sampled_from(["a" * n, "\x06" * n, "\N{SNOWMAN}" * n, "<|end|>"]))
PIECES = st.lists(TEXT | LONG_RUNS, max_size=8).map("".join)


@pytest.mark.parametrize("kind", ["bytes", "nfc", "fallback", "partial"])
@settings(max_examples=150, deadline=None)
@given(text=PIECES)
def test_no_text_has_fewer_tokens_than_it_must_have(kind, text):
    from tokenizers import normalizers

    nfc = normalizers.NFC() if kind in ("nfc", "fallback") else None
    made = byte_pairs(nfc, byte_fallback=kind == "fallback", without="Ćâ" if kind == "partial" else "")
    assert least_tokens(made)(text) <= len(made(text, add_special_tokens=False)["input_ids"])


@settings(max_examples=60, deadline=None)
@given(
    words=st.lists(st.sampled_from(["a" * 8, "a" * 4, "b", "<|end|>"]), min_size=1, max_size=12),
    limit=st.integers(1, 9),
)
def test_text_that_would_fit_is_never_overlong_and_one_that_is_by_far_is_not_tokenized(words, limit):
    text, asked = "".join(words), []
    tokenizer = byte_pairs()
    count = len(tokenizer(text)["input_ids"])
    made = Encoder(ModelConfig(path="m"), "m", DatasetConfig(paths=("-",)), VOCAB, limit)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat, "load_tokenizer", lambda *_: tokenizer)
        patch.setattr(
            chat, "_tokenize", lambda *args, real=chat._tokenize, **kw: (asked.append(1), real(*args, **kw))[1]
        )
        try:
            assert len(made.encode({"text": text}).input_ids) == count
            assert len(text) < 8 * (limit + 1)
        except Overlong as overlong:
            assert count > limit and len(text) >= 8 * (limit + 1) and not asked
            assert str(overlong) == f"overlong: {len(text)} characters are more than {limit} tokens"


@TEMPLATES
@pytest.mark.parametrize("mask", ["assistant", "last_assistant", "all"])
def test_conversation_that_is_too_long_by_far_is_not_tokenized_once_it_could_be_used(monkeypatch, template, mask):
    monkeypatch.setattr(chat, "load_tokenizer", lambda *_: tiny.byte_level(template))
    made = Encoder(ModelConfig(path="m"), "m", DatasetConfig(paths=("-",), mask=mask), VOCAB, 20)
    with pytest.raises(Overlong, match=r"^overlong: \d+ characters are more than 20 tokens$"):
        made.encode({"messages": [USER, {"role": "assistant", "content": "x" * 300}]})
    if mask != "all":
        with pytest.raises(Unusable, match="no supervised token"):
            made.encode({"messages": [USER, {"role": "user", "content": "x" * 300}]})
    with pytest.raises(Unusable, match="lone surrogates"):
        made.encode({"text": "x" * 300 + "\ud800"})
