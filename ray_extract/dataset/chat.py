"""One record of the input -> token ids and loss mask.

Which tokens of a conversation are supervised is decided on the rendered text, as spans of characters, and then carried
over to tokens. Spans come from the template's `{% generation %}` blocks where it has them. Otherwise the conversation
is rendered turn by turn: an assistant turn starts where the generation prompt ends and ends where the next turn starts,
without the white space behind its last mark. A template whose partial renderings do not fit the whole one gives a
reason, never a guess.

transformers is imported only when a record needs a tokenizer; records with ready token ids do not.
"""

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ray_extract.config import DatasetConfig, FieldNames, ModelConfig
from ray_extract.errors import ConfigError

Ids = npt.NDArray[np.int32]
Mask = npt.NDArray[np.uint8]
Span = tuple[int, int]
Message = dict[str, Any]

_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "function_call": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
    "developer": "developer",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "function_response": "tool",
}
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_SURROGATE = re.compile("[\ud800-\udfff]")


class Unusable(Exception):  # noqa: N818 - it is a verdict on a row, not a failure of ours
    """A record that cannot become a row; the message is the reason.

    Args:
        reason: why; the text before the first colon is its kind.
        rendered: the conversation as the template renders it, where that shows why.
    """

    def __init__(self, reason: str, rendered: str | None = None) -> None:
        super().__init__(reason)
        self.rendered = rendered


class Overlong(Unusable):
    """A text that has more tokens than a row may have, as its characters alone show.

    Args:
        chars: how many it has.
        limit: tokens of a row.
    """

    def __init__(self, chars: int, limit: int) -> None:
        self.told = f"{chars} characters are more than {limit} tokens"
        super().__init__(f"overlong: {self.told}")


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """A tokenized record.

    Args:
        input_ids: i32 [n].
        loss_mask: u8 [n], 1 for supervised tokens.
    """

    input_ids: Ids
    loss_mask: Mask


def normalise(conversation: object, tool_arguments: str = "object") -> list[Message]:
    """Messages in OpenAI's spelling from OpenAI's or ShareGPT's; fields that are neither pass through.

    Args:
        conversation: of a record. A mapping of lists, as which some tables hold one, is a list of mappings.
        tool_arguments: see DatasetConfig.

    Raises:
        Unusable: not a list of messages, a role, a content or a tool call that is not understood.
    """
    if isinstance(conversation, dict) and all(isinstance(v, list | tuple) for v in conversation.values()):
        if len({len(column) for column in conversation.values()}) > 1:
            raise Unusable("unusable conversation: its fields are lists of different lengths")
        conversation = [dict(zip(conversation, row, strict=True)) for row in zip(*conversation.values(), strict=True)]
    if isinstance(conversation, str):
        raise Unusable("unusable conversation: a text and not a list; if it is JSON, store the list that it stands for")
    if not isinstance(conversation, list | tuple) or not conversation:
        raise Unusable("empty conversation" if conversation in ([], ()) else "unusable conversation: not a list")
    return [_normalise_message(i, message, tool_arguments) for i, message in enumerate(conversation, start=1)]


def _normalise_message(number: int, message: object, tool_arguments: str) -> Message:
    if not isinstance(message, dict):
        raise Unusable(f"unusable message: message {number} is not an object")
    fields = {name: value for name, value in message.items() if value is not None}
    role = fields.pop("role", None) or fields.pop("from", None)
    name = _ROLES.get(role.lower()) if isinstance(role, str) else None
    if name is None:
        raise Unusable(f"unknown role: {role!r} in message {number}")
    content = fields.pop("content", None)
    if content is None:
        content = fields.pop("value", None)
    calls = fields.pop("tool_calls", None)
    if calls is None and "function_call" in fields:  # OpenAI's spelling before tool_calls
        calls = fields.pop("function_call")
    if str(role).lower() == "function_call":  # ShareGPT's
        calls, content = _parsed(number, content), None
    if calls:
        calls = calls if isinstance(calls, list | tuple) else [calls]
        fields["tool_calls"] = [_tool_call(number, call, tool_arguments) for call in calls]
    elif content is None:
        raise Unusable(f"unusable content: message {number} has none")
    return {"role": name, "content": None if content is None else _text_of(number, content), **fields}


def _tool_call(number: int, call: object, tool_arguments: str) -> Message:
    if not isinstance(call, dict):
        raise Unusable(f"unusable tool call: message {number} has one that is not an object")
    call = _as_function(call)
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Unusable(f"unusable tool call: message {number} has one without a name")
    arguments = function.get("arguments")
    if arguments is None:
        return call
    if tool_arguments == "object" and isinstance(arguments, str):
        arguments = _parsed(number, arguments or "{}")
    if tool_arguments == "object" and not isinstance(arguments, dict):
        raise Unusable(f"unusable tool call: message {number} has arguments that are not an object")
    if tool_arguments == "string" and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def _as_function(item: Message) -> Message:
    """A tool or a tool call in OpenAI's spelling, `{"type": "function", "function": {...}}`, also from a bare one."""
    return item if "function" in item or "name" not in item else {"type": "function", "function": item}


def _parsed(number: int, text: object) -> Any:
    if not isinstance(text, str):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise Unusable(f"unusable tool call: message {number} has one that is not JSON") from None


def normalise_tools(tools: object) -> list[Message] | None:
    """The tools of a conversation in OpenAI's spelling, from a list or its JSON; None if there are none.

    Raises:
        Unusable: they are no list of named objects.
    """
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError):
            raise Unusable("unusable tools: not JSON") from None
    if not tools:
        return None
    if not isinstance(tools, list | tuple) or not all(isinstance(tool, dict) for tool in tools):
        raise Unusable("unusable tools: not a list of objects")
    found = [_as_function(tool) for tool in tools]
    if not all(isinstance(f := tool.get("function"), dict) and isinstance(f.get("name"), str) for tool in found):
        raise Unusable("unusable tools: one has no name")
    return found


def _text_of(number: int, content: object) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise Unusable(f"unusable content: message {number} has {type(content).__name__} content")
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) and part.get("type", "text") == "text" else part
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise Unusable(f"unusable content: message {number} has a part of type {kind}")
        texts.append(text)
    return "".join(texts)


def check_ids(input_ids: object, loss_mask: object, vocab_size: int) -> Tokens:
    """Ready token ids and their mask (all ones when None), checked.

    Raises:
        Unusable: not whole numbers, outside the vocabulary, a mask of another length or with other values than 0 and 1.
    """
    ids = _whole_numbers(input_ids, "input_ids", "iu")
    check_vocabulary(ids, vocab_size)
    if loss_mask is None:
        return Tokens(ids.astype(np.int32), np.ones(len(ids), np.uint8))
    mask = _whole_numbers(loss_mask, "loss_mask", "iub")
    if len(mask) != len(ids):
        raise Unusable(f"unusable loss_mask: {len(mask)} values for {len(ids)} tokens")
    if not np.isin(mask, (0, 1)).all():
        raise Unusable("unusable loss_mask: values other than 0 and 1")
    return Tokens(ids.astype(np.int32), mask.astype(np.uint8))


def check_vocabulary(ids: npt.NDArray[Any], vocab_size: int) -> None:
    """Raises Unusable for ids that the model has no embedding for."""
    if len(ids) and (ids.min() < 0 or ids.max() >= vocab_size):
        worst = int(ids.min()) if ids.min() < 0 else int(ids.max())
        raise Unusable(f"token id out of range: {worst} with a vocabulary of {vocab_size}")


def _whole_numbers(value: object, name: str, kinds: str) -> npt.NDArray[Any]:
    if not isinstance(value, list | tuple | np.ndarray):
        raise Unusable(f"unusable {name}: not a list")
    if len(value) == 0:
        return np.empty(0, np.int32)
    try:
        array = np.asarray(value)
    except (ValueError, OverflowError):
        raise Unusable(f"unusable {name}: not a flat list of whole numbers") from None
    if array.ndim != 1 or array.dtype.kind not in kinds:
        raise Unusable(f"unusable {name}: not a flat list of whole numbers")
    return array


class Encoder:
    """Turns records into tokens; the tokenizer is loaded when the first record needs it.

    Args:
        model: names the tokenizer.
        model_path: local folder of the model, used when no tokenizer is named.
        dataset: names fields, template and mask.
        vocab_size: of the model.
        limit: most tokens of a row, if longer ones need not be tokenized to know what becomes of them.
    """

    def __init__(
        self, model: ModelConfig, model_path: str, dataset: DatasetConfig, vocab_size: int, limit: int | None = None
    ) -> None:
        self._model = model
        self._model_path = model_path
        self._dataset = dataset
        self._vocab_size = vocab_size
        self._limit = limit
        self._least: Callable[[str], int] | None = None
        self._tokenizer: Any = None
        self._chat: _Chat | None = None

    def encode(self, record: dict[str, Any]) -> Tokens:
        """Tokens of one record; its first known field decides what it is.

        Raises:
            Overlong: it has certainly more tokens than `limit`.
            Unusable: this record cannot be used.
            ConfigError: no record of this kind could be: the tokenizer or the template is missing or broken.
        """
        names = self._dataset.fields
        for name in names.messages:
            if record.get(name) is not None:
                parts = (record[name], record.get(names.system), record.get(names.tools))
                tokens = self._encode_chat(*map(_without_array, parts))
                break
        else:
            if record.get(names.text) is not None:
                tokens = self._encode_text(record[names.text])
            elif record.get(names.input_ids) is not None:
                return check_ids(record[names.input_ids], record.get(names.loss_mask), self._vocab_size)
            else:
                raise Unusable(f"no known field: {_known(names)} expected")
        check_vocabulary(tokens.input_ids, self._vocab_size)
        return tokens

    def _encode_chat(self, conversation: object, system: object, tools: object) -> Tokens:
        messages = normalise(conversation, self._dataset.tool_arguments)
        if system and messages[0]["role"] not in ("system", "developer"):
            if not isinstance(system, str):
                raise Unusable(f"unusable system: {type(system).__name__}")
            messages.insert(0, {"role": "system", "content": system})
        if self._chat is None:
            self._chat = _Chat(self._load(), self._dataset, self._check_length)
        return self._chat.encode(messages, self._dataset.mask, normalise_tools(tools))

    def _encode_text(self, text: object) -> Tokens:
        if not isinstance(text, str):
            raise Unusable(f"unusable text: {type(text).__name__}")
        if not text:
            raise Unusable("empty text")
        tokenizer = self._load()
        self._check_length(text)
        ids = np.asarray(_tokenize(tokenizer, text, add_special_tokens=True)["input_ids"], dtype=np.int32)
        return Tokens(ids, np.ones(len(ids), np.uint8))

    def _load(self) -> Any:
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self._model, self._model_path)
            self._least = None if self._limit is None else least_tokens(self._tokenizer)
        return self._tokenizer

    def _check_length(self, text: str) -> None:
        """Tokenizing takes a hundred times the memory of a text."""
        if self._limit is not None and self._least is not None and self._least(text) > self._limit:
            if _SURROGATE.search(text):
                raise _surrogates()
            raise Overlong(len(text), self._limit)


def _without_array(value: object) -> object:
    """A field as JSON has it: a column of lists of integers comes as arrays, whose truth value is an error."""
    return value.tolist() if isinstance(value, np.ndarray) else value


def _known(names: FieldNames) -> str:
    return ", ".join([*names.messages, names.text]) + f" or {names.input_ids}"


def load_tokenizer(model: ModelConfig, model_path: str) -> Any:
    """The tokenizer of transformers; a local folder is read without touching a network.

    Raises:
        ConfigError: it cannot be loaded.
    """
    name = model.tokenizer or model_path
    key = f"model.tokenizer = {model.tokenizer!r}" if model.tokenizer else f"model.path = {model.path!r}"
    way_out = "set model.tokenizer to a folder with tokenizer.json and tokenizer_config.json"
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ConfigError(
            f"dataset.paths: text and conversations need transformers, which does not import ({error}); "
            "install ray-extract[run], or give input_ids"
        ) from None
    local = Path(name).expanduser()
    if not local.is_dir() and name.startswith(("/", ".", "~")):
        raise ConfigError(f"{key}: no such folder; {way_out}")
    try:
        return AutoTokenizer.from_pretrained(
            str(local) if local.is_dir() else name,
            trust_remote_code=model.trust_remote_code,
            local_files_only=local.is_dir(),
        )
    except ImportError as error:
        raise ConfigError(f"{key}: its tokenizer needs a package that does not import ({error})") from None
    except Exception as error:  # whatever a tokenizer's files and code may raise
        first = (str(error).strip().splitlines() or [""])[0]
        raise ConfigError(f"{key}: no tokenizer can be loaded ({type(error).__name__}: {first}); {way_out}") from None


_NFC_CHARS = 4  # most that canonical composition makes one of; decomposed, a text never has fewer than it had
_NOT_UTF8 = {0xC0, 0xC1, *range(0xF5, 0x100)}


def least_tokens(tokenizer: Any) -> Callable[[str], int] | None:
    """How many tokens a text has at least, without tokenizing it; None if that cannot be told.

    It can of byte-pair encoders that leave out nothing before: a token stands for no more characters than the longest
    one has. Only those count that are sure to be in a token of the vocabulary, since any number of others may become
    one unknown token. Elsewhere a token may be white space of any length, or a long unknown word.
    """
    if not getattr(tokenizer, "is_fast", False) or not type(tokenizer).__module__.startswith("transformers."):
        return None
    tree = json.loads(tokenizer.backend_tokenizer.to_str())
    model, steps = tree["model"], _steps(tree["pre_tokenizer"], "pretokenizers")
    shortening = [_most_of_one(step) for step in _steps(tree["normalizer"], "normalizers")]
    added = tree["added_tokens"]
    if (
        model["type"] != "BPE"
        or None in shortening
        or not all(map(_keeps_all, steps))
        or any(token["lstrip"] or token["rstrip"] for token in added)
    ):
        return None
    vocab = model["vocab"]
    longest = max(map(len, itertools.chain(vocab, (token["content"] for token in added))))
    longest *= math.prod(filter(None, shortening))
    if any(step["type"] == "ByteLevel" for step in steps):
        unknown = bytes(byte for byte, letter in enumerate(_letters()) if letter not in vocab)
        if set(unknown) - _NOT_UTF8:
            # What a normalizer makes of a known character may be unknown.
            return None if shortening else lambda text: _count_ascii(text, unknown) // longest
    elif not model["byte_fallback"] or not all(f"<0x{byte:02X}>" in vocab for byte in range(256)):
        return None
    return lambda text: len(text) // longest


def _count_ascii(text: str, without: bytes) -> int:
    return len(text.encode("ascii", "ignore").translate(None, without))


def _letters() -> list[str]:
    """The letter that stands for each byte in a byte-level vocabulary."""
    others = itertools.count(256)
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    return [chr(byte if byte in shown else next(others)) for byte in range(256)]


def _steps(step: Any, parts: str) -> list[Any]:
    """A step of a tokenizer, or those that it is a sequence of."""
    if step is None:
        return []
    return [inner for s in step[parts] for inner in _steps(s, parts)] if step["type"] == "Sequence" else [step]


def _most_of_one(step: Any) -> int | None:
    """Of how many characters a normalizer makes one at most; None if that cannot be told."""
    if step["type"] == "NFC":
        return _NFC_CHARS
    text = step["pattern"].get("String") if step["type"] == "Replace" else None
    return 1 if step["type"] == "Prepend" or (text is not None and len(text) <= len(step["content"])) else None


def _keeps_all(step: Any) -> bool:
    """Whether a pre-tokenizer leaves out nothing."""
    if step["type"] in ("Split", "Punctuation"):
        return bool(step["behavior"] != "Removed")
    return step["type"] in ("ByteLevel", "Metaspace", "Digits")


_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")


def template_fingerprint(model: ModelConfig, dataset: DatasetConfig, model_path: str) -> str:
    """Hex SHA-256 of what turns records into ids: the tokenizer's files and the chat template.

    A tokenizer that is named rather than a folder counts by its name.
    """
    digest = hashlib.sha256()
    name = model.tokenizer or model_path
    folder = Path(name).expanduser()
    if not folder.is_dir():
        digest.update(name.encode())
    for path in (folder / file for file in _TOKENIZER_FILES):
        if path.is_file():
            digest.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    if dataset.chat_template and Path(dataset.chat_template).expanduser().is_file():
        digest.update(b"template\0" + Path(dataset.chat_template).expanduser().read_bytes())
    return digest.hexdigest()


def _surrogates() -> Unusable:
    return Unusable("unusable text: lone surrogates")


def _tokenize(tokenizer: Any, text: str, *, add_special_tokens: bool) -> Any:
    if _SURROGATE.search(text):
        raise _surrogates()
    return tokenizer(
        text, add_special_tokens=add_special_tokens, return_offsets_mapping=tokenizer.is_fast, verbose=False
    )


class _Chat:
    """A tokenizer and its chat template."""

    def __init__(
        self, tokenizer: Any, dataset: DatasetConfig, check_length: Callable[[str], None] = lambda text: None
    ) -> None:
        self._tokenizer = tokenizer
        self._check_length = check_length
        self._key, self._template = _find_template(tokenizer, dataset)
        self._marks_generation = bool(_GENERATION.search(self._template))

    def encode(self, messages: list[Message], mode: str, tools: list[Message] | None = None) -> Tokens:
        """Render and tokenize; `mode` is `assistant`, `last_assistant` or `all`."""
        render = functools.partial(self._render, tools)
        if mode == "all" or not self._marks_generation:
            text, spans = render(messages), list[Span]()
        else:
            text, spans = self._render_with_spans(messages, tools)
        _require_rendered(text, messages, tools, self._render)
        if mode == "all":
            self._check_length(text)
            ids = self._ids(_tokenize(self._tokenizer, text, add_special_tokens=False))
            return Tokens(ids, np.ones(len(ids), np.uint8))
        try:
            if not self._marks_generation:
                spans = turn_spans(text, messages, render)
            if mode == "last_assistant":
                spans = spans[self._count_earlier(messages, tools, len(spans)) :]
        except Unusable as unusable:
            raise Unusable(str(unusable), text) from None
        if not any(start < end for start, end in spans):
            raise Unusable("no supervised token", text)
        self._check_length(text)
        encoding = _tokenize(self._tokenizer, text, add_special_tokens=False)
        ids = self._ids(encoding)
        try:
            mask = self._mask(text, encoding, ids, spans)
        except Unusable as unusable:
            raise Unusable(str(unusable), text) from None
        if not mask.any():
            raise Unusable("no supervised token", text)
        return Tokens(ids, mask)

    def _count_earlier(self, messages: list[Message], tools: list[Message] | None, count: int) -> int:
        """How many of `count` spans are of turns before the assistant's last one: a turn may have several blocks."""
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if count <= len(turns):
            return max(0, count - 1)
        return 0 if len(turns) == 1 else len(self._render_with_spans(messages[: turns[-1]], tools)[1])

    @staticmethod
    def _ids(encoding: Any) -> Ids:
        return np.asarray(encoding["input_ids"], dtype=np.int32)

    def _mask(self, text: str, encoding: Any, ids: Ids, spans: Sequence[Span]) -> Mask:
        if self._tokenizer.is_fast:
            offsets = np.asarray(encoding["offset_mapping"], dtype=np.int64).reshape(-1, 2)
            return mask_by_offsets(offsets, spans)
        cuts = [self._count_tokens(text[:at], ids) for span in spans for at in span]
        mask = np.zeros(len(ids), np.uint8)
        for start, end in zip(cuts[0::2], cuts[1::2], strict=True):
            mask[start:end] = 1
        return mask

    def _count_tokens(self, prefix: str, ids: Ids) -> int:
        """Tokens of a prefix of the text, for tokenizers in Python (Kimi's), which give no offsets."""
        part = self._ids(_tokenize(self._tokenizer, prefix, add_special_tokens=False))
        if not np.array_equal(part, ids[: len(part)]):
            raise Unusable("undecidable mask: a token spans the border of an assistant turn")
        return len(part)

    def _render(self, tools: list[Message] | None, messages: list[Message], generation_prompt: bool = False) -> str:
        text: str = self._guarded(
            lambda: self._tokenizer.apply_chat_template(
                messages,
                tools=tools,
                chat_template=self._template,
                tokenize=False,
                add_generation_prompt=generation_prompt,
                return_dict=False,
            )
        )
        return text

    def _render_with_spans(self, messages: list[Message], tools: list[Message] | None) -> tuple[str, list[Span]]:
        # Not `return_assistant_tokens_mask`: it marks everything up to the end of the row when the last character of a
        # block has no token, and drops all later blocks when the first one has none.
        from transformers.utils.chat_template_utils import render_jinja_template

        texts, spans = self._guarded(
            lambda: render_jinja_template(
                [messages],
                tools=tools,
                chat_template=self._template,
                return_assistant_tokens_mask=True,
                add_generation_prompt=False,
                **self._tokenizer.special_tokens_map,
            )
        )
        return texts[0], [(start, end) for start, end in spans[0]]

    def _guarded(self, render: Callable[[], Any]) -> Any:
        import jinja2

        try:
            return render()
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"{self._key}: not a valid template, line {error.lineno}: {error.message}") from None
        except Exception as error:  # a template is a program of its own; what it raises on this row is about this row
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise Unusable(f"chat template: {first}") from None


def _require_rendered(
    text: str, messages: list[Message], tools: list[Message] | None, render: Callable[..., str]
) -> None:
    """Templates that know no tools leave them out without a word.

    A name may be in the text for another reason: as a word, or since a call has the name of a tool. So it is also
    looked whether the text changes with the names.
    """
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    other_calls = [
        {**message, "tool_calls": list(map(_renamed, message["tool_calls"]))} if "tool_calls" in message else message
        for message in messages
    ]
    other_tools = None if tools is None else list(map(_renamed, tools))
    for what, items, other in (("tool calls", calls, (tools, other_calls)), ("tools", tools, (other_tools, messages))):
        if not items:
            continue
        shown = all(item["function"]["name"] in text for item in items)
        with contextlib.suppress(Unusable):  # a template that refuses them looks at them
            shown = shown and render(*other) != text
        if not shown:
            raise Unusable(f"chat template: it leaves out the {what} of the conversation", text)


def _renamed(item: Message) -> Message:
    """A tool or a call with another name, and another id, by which Kimi K2's template shows a call."""
    ids = {"id": f"{item['id']}0"} if "id" in item else {}
    return {**item, **ids, "function": {**item["function"], "name": f"{item['function']['name']}0"}}


def _find_template(tokenizer: Any, dataset: DatasetConfig) -> tuple[str, str]:
    """The configuration key that the template comes from, for messages, and the template."""
    if dataset.chat_template:
        key = f"dataset.chat_template = {dataset.chat_template!r}"
        try:
            return key, Path(dataset.chat_template).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "not UTF-8"
            raise ConfigError(f"{key}: cannot be read ({why}); give a Jinja file") from None
    try:
        return "the tokenizer's chat template", tokenizer.get_chat_template()
    except (ValueError, AttributeError):
        raise ConfigError(
            "dataset.chat_template: the data set holds conversations and the tokenizer has no (default) chat template; "
            "give a Jinja file"
        ) from None


def mask_by_offsets(offsets: npt.NDArray[np.int64], spans: Sequence[Span]) -> Mask:
    """1 for each token that has a character of a span.

    Args:
        offsets: i64 [n, 2], the characters [start, end) of each token; empty for tokens without text.
        spans: characters [start, end), ascending.
    """
    mask = np.zeros(len(offsets), np.uint8)
    starts, ends = offsets[:, 0], offsets[:, 1]
    for first, last in spans:
        mask[np.maximum(starts, first) < np.minimum(ends, last)] = 1
    return mask


def turn_spans(full: str, messages: list[Message], render: Callable[[list[Message], bool], str]) -> list[Span]:
    """The characters of each assistant turn in a rendered conversation.

    Args:
        full: the whole conversation, rendered.
        messages: the conversation.
        render: renders the first messages, with a generation prompt or without.

    Raises:
        Unusable: partial renderings do not fit the whole one.
    """
    spans: list[Span] = []
    at = 0
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = _opening(message, render) if i == 0 else render(messages[:i], True)
        start = len(before)
        if start < at or not full.startswith(before):
            if i == 0:
                raise _no_prefix(1)
            plain = render(messages[:i], False)
            head = _head(full, at, plain, i)
            if not before.startswith(plain[:head]):
                raise _no_prefix(i)
            start = at + _turn_start(full[at:], before[head:], plain[head:], message, i)
            before = plain[:head] + full[at:start]
        end = _turn_end(full, start, message, before, render(messages[: i + 1], False))
        spans.append((start, end))
        at = end
    return spans


def _opening(message: Message, render: Callable[[list[Message], bool], str]) -> str:
    """What a conversation that begins with the assistant's turn has before its content.

    There is nothing to render before it. But the prompt for a turn is known from that for the next one, and where it is
    in the turn's rendering, if only once.
    """
    alone, prompted = render([message], False), render([message], True)
    prompt = prompted[len(alone) :]
    if not prompt or not prompted.startswith(alone) or alone.count(prompt) != 1:
        raise Unusable("undecidable mask: the first turn is the assistant's, and where it begins is not clear")
    return alone[: alone.index(prompt) + len(prompt)]


def _no_prefix(count: int) -> Unusable:
    return Unusable(f"undecidable mask: the rendering of the first {count} messages is no prefix of the whole")


def _head(full: str, at: int, before: str, count: int) -> int:
    """How much of the rendering of the first `count` messages lies before character `at` of the whole.

    Earlier turns may have a block of reasoning there that the whole has not: Qwen3 shows that of the turns since the
    last question. Then the last turn's end is looked for, and what follows it must follow it in the whole, too.
    """
    if full.startswith(before):
        return at
    mark = full[max(0, at - 32) : at]
    found = []
    place = before.find(mark) if mark else -1
    while place >= 0:
        if full.startswith(before[place + len(mark) :], at):
            found.append(place + len(mark))
        place = before.find(mark, place + 1)
    if len(found) != 1:
        raise _no_prefix(count)
    return found[0]


def _turn_start(full: str, prompted: str, plain: str, message: Message, count: int) -> int:
    """Where a turn starts in the rest of the whole, given those of the messages before it with and without a prompt."""
    if full.startswith(prompted):
        return len(prompted)
    # A generation prompt may open a block of reasoning that past turns do not have (DeepSeek-R1, Qwen3 Thinking):
    # then the turn starts where the two part, or a bit before if the content happens to go on like the prompt.
    shared = _shared_prefix(prompted, full)
    if not full.startswith(plain) or shared <= len(plain):
        raise _no_prefix(count)
    content = (message["content"] or "").strip()
    found = full.rfind(content, len(plain), shared + len(content)) if content else -1
    return shared if found < 0 else found


def _shared_prefix(a: str, b: str) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _turn_end(full: str, start: int, message: Message, before: str, through: str) -> int:
    """Where the turn that starts at `start` ends, given the renderings of what is before it, and of both."""
    problem = Unusable("undecidable mask: the rendering of an assistant turn differs inside the whole conversation")
    turn = through[len(before) :]
    if not through.startswith(before):
        raise problem
    if full.startswith(turn, start):
        return start + len(turn.rstrip())
    # A template may show the reasoning of the last turn only (Qwen3, Kimi K2 Thinking). Inside the whole conversation
    # the turn must then be its own rendering with one block left out, the last line of its content included.
    same = _shared_prefix(turn, full[start : start + len(turn)])
    at = start + same
    last_line = (message["content"] or "").strip().rpartition("\n")[2]
    for left_out in range(same + 1, len(turn)):
        # The short comparison first, so that a long turn is not copied at every step.
        if full.startswith(turn[left_out : left_out + 32], at) and full.startswith(turn[left_out:], at):
            end = at + len(turn[left_out:].rstrip())
            if last_line in full[start:end]:
                return end
    raise problem
