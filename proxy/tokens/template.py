"""The model's chat template and tokenizer, from messages to text to ids, exactly as transformers renders them.

Uses `tokenizers` and Jinja directly: importing transformers' tokenizers would load torch into the proxy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from tokenizers import Tokenizer

from proxy.contract.token_ids import TokenIds
from proxy.errors import ContextLengthExceeded, InvalidRequest
from proxy.settings import ConfigurationError
from proxy.tokens import reasoning
from proxy.tokens.control_tokens import ControlTokens, constants_of
from proxy.tokens.jinja_environment import chat_environment, known_arguments
from proxy.tokens.messages import Message, prepared
from proxy.tokens.model_files import ModelFiles, locate, read_model_files
from proxy.tokens.openings import Openings
from proxy.tokens.shield import any_of

_TAIL_TOKENS = 32
# Characters per token of usual text: a text with fewer for each token of the context is not counted, since it fits.
_USUAL_CHARACTERS = 4
# Only runs of one character have more characters per token, and tokenising those would take a minute.
_MOST_CHARACTERS = 32
# Characters tokenised at a time to count them: bounds memory, as a tokenizer takes about 200 bytes for a token.
_PIECE = 1 << 16
# Cutting a text into pieces may change the number of tokens at the cuts by at most this many.
_CUT = 64
# Control pictures, which no tokenizer or template treats specially, so that the probe is found again as it is.
_PROBE = "\u2402probe\u2403"


class ChatTemplate:
    """Renders, encodes and decodes for one model. Safe to share between tasks and threads: it changes only caches."""

    def __init__(self, tokenizer: Tokenizer, files: ModelFiles, *, allow_control_tokens: bool = False) -> None:
        """With `allow_control_tokens` the text of a control token is that token, whoever wrote it."""
        self._tokenizer = tokenizer
        self._special_tokens = files.special_tokens
        environment = chat_environment()
        self._templates = {name: environment.from_string(text) for name, text in files.templates.items()}
        self.sources = tuple(files.templates.values())
        """The Jinja sources of the templates."""
        self._short_ids = any("[TOOL_CALLS]" in text for text in self.sources)
        self.known_arguments = known_arguments(environment, files.templates.values()) - files.special_tokens.keys()
        """The further names that the templates read, beside messages and tools: switches such as
        `enable_thinking`."""
        self.context_length = files.context_length
        self.vocabulary_size = tokenizer.get_vocab_size(with_added_tokens=True)
        highest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        self.model_vocabulary_size = max(files.vocabulary_size, highest + 1)
        """The number of ids that the model can generate: its output layer may be padded beyond the tokenizer's
        vocabulary."""
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(token for token, entry in added.items() if entry.special)
        self._added = {entry.content: token for token, entry in added.items()}
        self._added_texts = {token: entry.content for token, entry in added.items()}
        self._control = ControlTokens(tokenizer, self.encode, turns=(), data=(), constants=())
        if not allow_control_tokens:
            turns = self._find_turn_tokens()
            constants = {text for source in self.sources for text in constants_of(environment.parse(source))}
            self._control = ControlTokens(
                tokenizer, self.encode, turns=turns, data=self._find_tags(constants) - turns, constants=constants
            )
        self._beginning = self._find_beginning()
        self.closing = self._find_closing()
        self._think_ids = self.added_ids((reasoning.OPEN,))
        self.knows_reasoning = any(reasoning.CLOSE in text for text in self.sources)
        self.writes_reasoning = self.knows_reasoning and self._renders_reasoning()
        """Whether the template writes the `reasoning_content` of the last answer."""
        self.single_calls = self._renders_calls(1) and not self._renders_calls(2)
        """Whether the template refuses an answer with several calls."""
        self.system_anywhere = self._takes_system_anywhere()
        """Whether the template writes system messages at their place, also behind the first message."""
        self._openings = Openings(self.encode, self.encode_after, self._find_end())
        self.stop_ids = self._find_stop_ids(files)
        if not self.stop_ids:
            raise ConfigurationError(f"{files.directory} names no end-of-sequence token (eos_token_id)")

    @classmethod
    def load(cls, model: str, *, cache_dir: Path | None = None, allow_control_tokens: bool = False) -> ChatTemplate:
        """Load a model's directory or Hugging Face id. Raise ConfigurationError that names what is missing."""
        files = read_model_files(locate(model, cache_dir))
        try:
            tokenizer = Tokenizer.from_file(str(files.tokenizer_json))
        except Exception as error:  # the binding raises bare Exception
            raise ConfigurationError(f"cannot read {files.tokenizer_json}: {error}") from error
        tokenizer.no_padding()
        tokenizer.no_truncation()
        try:
            return cls(tokenizer, files, allow_control_tokens=allow_control_tokens)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigurationError(f"the chat template of {files.directory} does not parse: {error}") from error

    @property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        generation_prompt: bool,
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the conversation as the model reads it. `arguments` are further variables for the template.

        Contents that could form control tokens are marked in it: `encode` reads the marks, `plain` removes them.
        Raise InvalidRequest if the template refuses the conversation.
        """
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        control = self._control
        try:
            return self._templates[name].render(
                **{
                    **{name: control.from_client(value) for name, value in (arguments or {}).items()},
                    **self._special_tokens,
                },
                messages=list(map(control.message, prepared(messages, short_ids=self._short_ids))),
                tools=control.tools(list(tools)) if tools else None,
                documents=None,
                add_generation_prompt=generation_prompt,
            )
        # A template is code of the model's, run on text of the client's: it may raise anything, such as the sandbox's
        # OverflowError for a range that is too long, and none of it is a failure of the proxy.
        except Exception as error:
            raise InvalidRequest(
                f"the model's chat template cannot render these messages: {self.plain(str(error))}", param="messages"
            ) from error

    def marked_text(self, text: str) -> str:
        """Return a text that will follow a rendered one, marked as `render` marks contents."""
        return self._control.from_client(text)

    def marked_message(self, message: Message) -> Message:
        """Return a message with its contents marked, as `render` passes them to the template."""
        return self._control.message(message)

    def plain(self, rendered: str) -> str:
        """Return rendered text without marks, for people to read."""
        return self._control.restored(rendered)

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the token ids of text, rendered or raw, without adding tokens at either end."""
        try:
            # A batch of one, because it releases the interpreter's lock: `encode` holds it, and a long text would
            # delay all other requests.
            return tuple(self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids)
        except TypeError:  # tokenizers refuse marks; trying is cheaper than searching every text for them
            return self._control.encode(text)

    def encode_conversation(self, text: str) -> TokenIds:
        """Return the ids of a rendered conversation, as `encode` does, without tokenising a known opening again."""
        return self._openings.encode(text)

    def forget_texts(self) -> None:
        """Forget the ids of the texts that were encoded."""
        self._openings.forget()

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of prompt ids, control tokens included. Where ordinary tokens spell a control token, the
        text has marks as in `render`."""
        return self._control.decode(ids)

    def check_length(self, text: str) -> None:
        """Raise ContextLengthExceeded for a text that cannot fit the context.

        The text is tokenised piece by piece and only until it is too long: a body may hold so much text that its
        tokens would fill the memory.
        """
        if len(text) <= _USUAL_CHARACTERS * self.context_length:
            return
        count, start = 0, 0
        while start < len(text) <= _MOST_CHARACTERS * self.context_length and count <= self.context_length:
            count += max(0, len(self.encode(text[start : start + _PIECE])) - _CUT)
            start += _PIECE
        if start < len(text) or count > self.context_length:
            raise ContextLengthExceeded(
                f"prompt is too long: more than {max(count, self.context_length)} tokens > {self.context_length} "
                "maximum",
                param="messages",
            )

    def encode_prompt(self, text: str) -> tuple[int, ...]:
        """Return the ids of a text that is a whole prompt. They begin, exactly once, with the tokens that the
        tokenizer puts before every text, such as BOS."""
        ids = self.encode(text)
        return ids if ids[: len(self._beginning)] == self._beginning else self._beginning + ids

    def encode_after(self, last_id: int | None, text: str) -> tuple[int, ...]:
        """Return the ids of `text` as it is tokenised behind the special token `last_id`: some tokenizers treat the
        beginning of a text differently."""
        if last_id is None or not text:
            return self.encode(text)
        anchored = self.encode(self.token_text(last_id) + text)
        return anchored[1:] if anchored[:1] == (last_id,) else self.encode(text)

    def token_text(self, token: int) -> str:
        """Return a token's text in the vocabulary; an empty string for an id outside of the vocabulary."""
        # Added tokens, which every call asks for, from a dictionary: the tokenizer takes 20 times as long.
        return self._added_texts.get(token) or self._tokenizer.id_to_token(token) or ""

    def readable_token(self, token: int) -> str:
        """Return a token as text for people; a part of a character becomes U+FFFD."""
        return self._tokenizer.decode([token], skip_special_tokens=False)

    def added_ids(self, texts: Iterable[str]) -> frozenset[int]:
        """Return the ids of those `texts` that are added tokens of this tokenizer."""
        return frozenset(self._added[text] for text in texts if text in self._added)

    def holds_thought(self, ids: TokenIds) -> bool:
        """Return whether `ids` hold the beginning of a thought."""
        if self._think_ids:
            return ids.has_any(self._think_ids)
        return reasoning.OPEN in self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def may_end_in_thought(self, ids: TokenIds) -> bool:
        """Return False where no token of `ids` begins a thought, so that they cannot end inside of one."""
        return not self._think_ids or self.holds_thought(ids)

    def tail_text(self, ids: Sequence[int], *, margin: int = 0) -> str:
        """Return the text of the last ids, special tokens included: a few words, and `margin` characters more."""
        return self._tokenizer.decode(list(ids[-_TAIL_TOKENS - margin :]), skip_special_tokens=False)

    def _find_beginning(self) -> tuple[int, ...]:
        whole = tuple(self._tokenizer.encode(_PROBE, add_special_tokens=True).ids)
        plain = self.encode(_PROBE)
        return next((whole[:at] for at in range(len(whole)) if whole[at : at + len(plain)] == plain), ())

    def _find_turn_tokens(self) -> frozenset[str]:
        """Return the control tokens: the tokenizer's special tokens, and the added tokens that the template writes
        around messages, since some models do not mark these as special. The tags of thoughts are excluded: they
        divide an answer and end no turn."""
        special = {self.token_text(token) for token in self.special_ids}
        asked = [{"role": "user", "content": _PROBE}, {"role": "assistant", "content": _PROBE}]
        framing: set[str] = set()
        for messages in ([*asked, asked[0]], [{"role": "system", "content": _PROBE}, *asked, asked[0]]):
            try:
                rendered = self.render(messages, None, generation_prompt=False)
            except InvalidRequest:
                continue
            framing.update(any_of(self._structural).findall(rendered))
        return frozenset(special | framing) - {reasoning.OPEN, reasoning.CLOSE}

    def _find_tags(self, constants: Iterable[str]) -> frozenset[str]:
        """Return the added tokens in the template's own texts, such as `<tool_response>`."""
        written = any_of(self._structural)
        return frozenset(found for text in constants for found in written.findall(text))

    @property
    def _structural(self) -> list[str]:
        """The added tokens that are neither words nor white space."""
        return [text for text in self._added if text.strip() and not text.replace(" ", "").isalnum()]

    def _find_closing(self) -> str:
        """Return the text that the template writes behind an assistant's text, such as `<|im_end|>` and a line
        break."""
        probe = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _PROBE}]
        try:
            rendered = self.render(probe, None, generation_prompt=False)
        except InvalidRequest as error:
            raise ConfigurationError(f"the chat template cannot render a question and an answer: {error}") from error
        _, found, closing = rendered.rpartition(_PROBE)
        if not found:
            raise ConfigurationError("the chat template leaves out the assistant's text")
        return closing

    def _renders_reasoning(self) -> bool:
        answer = {"role": "assistant", "content": "y", "reasoning_content": _PROBE}
        try:
            return _PROBE in self.render([{"role": "user", "content": "x"}, answer], None, generation_prompt=False)
        except InvalidRequest:
            return False

    def _renders_calls(self, count: int) -> bool:
        call = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        answer = {"role": "assistant", "content": "", "tool_calls": [call] * count}
        try:
            self.render([{"role": "user", "content": "x"}, answer], None, generation_prompt=False)
        except InvalidRequest:
            return False
        return True

    def _takes_system_anywhere(self) -> bool:
        question, late = {"role": "user", "content": "x"}, {"role": "system", "content": _PROBE}
        try:
            return _PROBE in self.render([question, late], None, generation_prompt=True)
        except InvalidRequest:
            return False

    def _find_end(self) -> tuple[int, str] | None:
        """Return the special token, id and text, with which the template closes an answer; None if it is another
        text."""
        first = self.encode(self.closing.lstrip())[:1]
        return (first[0], self.token_text(first[0])) if self.special_ids.issuperset(first) and first else None

    def _find_stop_ids(self, files: ModelFiles) -> tuple[int, ...]:
        """Return the configured end tokens, and the special token with which the template closes an answer: the
        configuration of base models often names the end of text only."""
        stops = list(files.stop_ids)
        stops += [self._added[text] for text in files.stop_texts if text in self._added]
        end = self._find_end()
        stops += [] if end is None else [end[0]]
        return tuple(dict.fromkeys(stops))
