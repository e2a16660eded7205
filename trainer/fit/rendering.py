"""Rendering of conversations and texts into token trees, by the run's own tokenizer and chat template.

An answer is tokenised apart from its prompt, as the engine sees them, so its first token never merges with the last
one of the prompt. Only answers are learnt.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from proxy.contract.arrays import pack_ids, pack_logprobs
from proxy.contract.identifiers import SessionId, TurnId
from proxy.contract.policy import Head
from proxy.contract.trajectory import Trajectory, TrajectoryTurn
from proxy.contract.turn import LogprobConvention, VersionSpan
from trainer.errors import ConfigurationError

_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "n_ctx")
_PROBE = "x"

Message = Mapping[str, Any]


class NotLearnable(Exception):
    """A row that cannot be learnt from; it is counted under `reason`."""

    def __init__(self, reason: str, said: str) -> None:
        super().__init__(said)
        self.reason = reason


class Renderer:
    """Renders rows for one model. `base` is the base model's directory. `context` is the bound on the tokens of a
    path; None: unknown."""

    def __init__(self, base: Path, context: int | None) -> None:
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(base)
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"the base model's tokenizer cannot be read: {base}: {error}") from error
        self._context = context
        plain, whole = self._encode(_PROBE), list(self._tokenizer(_PROBE).input_ids)
        at = next((at for at in range(len(whole)) if whole[at : at + len(plain)] == plain), 0)
        self._beginning: list[int] = whole[:at]

    def conversation(
        self, id_: str, messages: Sequence[Message], learnt: Collection[int], tools: Sequence[Any] | None
    ) -> Trajectory:
        """Return a conversation whose answers at the places `learnt` are trained. An answer goes on from the path of
        the one before it if the template renders that path unchanged, and else has a path of its own, as where
        thoughts of earlier answers are stripped. Raises NotLearnable."""
        if self._tokenizer.chat_template is None:
            raise ConfigurationError(
                "the base model has no chat template, so it cannot be fitted to messages; write prompts and answers"
                " as plain text"
            )
        prepared = [_prepared(message) for message in messages]
        turns: list[TrajectoryTurn] = []
        path, path_text = 0, ""
        for place in sorted(learnt):
            prompt = self._render(prepared[:place], tools, generation_prompt=True)
            whole = self._render(prepared[: place + 1], tools, generation_prompt=False)
            if not whole.startswith(prompt):
                raise NotLearnable(
                    "other_template", f"the chat template does not render message {place + 1} behind its own prompt"
                )
            answer = whole[
                len(prompt) :
            ].rstrip()  # the line break after the end token comes from the template, not from the model
            goes_on = bool(turns) and prompt.startswith(path_text)
            prompt_ids = self._encode(prompt[len(path_text) :]) if goes_on else self._encode_prompt(prompt)
            parent, prefix = (len(turns) - 1, path) if goes_on else (None, 0)
            turns.append(_turn(f"{id_}/{place}", parent, prefix, prompt_ids, self._encode(answer)))
            path, path_text = prefix + len(prompt_ids) + len(turns[-1].output_ids), prompt + answer
            self._check(turns[-1])
        return Trajectory(session_id=SessionId(id_), group_id=None, task=None, reward=None, turns=tuple(turns))

    def text(self, id_: str, prompt: str, answer: str) -> Trajectory:
        """Return plain text whose answer is trained, with the end-of-text token after it. Raises NotLearnable."""
        prompt_ids, answer_ids = self._encode_prompt(prompt), self._encode(answer)
        end = self._tokenizer.eos_token_id
        if answer_ids and end is not None and answer_ids[-1] != end:
            answer_ids.append(end)
        turn = _turn(f"{id_}/0", None, 0, prompt_ids, answer_ids)
        self._check(turn)
        return Trajectory(session_id=SessionId(id_), group_id=None, task=None, reward=None, turns=(turn,))

    def _check(self, turn: TrajectoryTurn) -> None:
        if not turn.output_ids:
            raise NotLearnable("empty_answer", "an answer has no tokens")
        if turn.prefix_tokens + len(turn.prompt_ids) == 0:
            raise NotLearnable("empty_prompt", "an answer has no token before it")
        length = turn.prefix_tokens + len(turn.prompt_ids) + len(turn.output_ids)
        if self._context is not None and length > self._context:
            raise NotLearnable("too_long", f"{length} tokens, and the model's context is {self._context}")

    def _render(self, messages: Sequence[Message], tools: Sequence[Any] | None, *, generation_prompt: bool) -> str:
        try:
            rendered: str = self._tokenizer.apply_chat_template(
                list(messages), tools=tools, tokenize=False, add_generation_prompt=generation_prompt
            )
        # A template is the model's code and runs on the user's rows, so it may raise anything.
        except Exception as error:
            raise NotLearnable("refused_by_template", f"the chat template refuses these messages: {error}") from error
        return rendered

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False).input_ids) if text else []

    def _encode_prompt(self, text: str) -> list[int]:
        """Return the ids of a whole prompt, with the tokens that the tokenizer puts before every text, once."""
        ids = self._encode(text)
        return ids if ids[: len(self._beginning)] == self._beginning else self._beginning + ids


def _turn(
    id_: str, parent: int | None, prefix: int, prompt_ids: Sequence[int], output_ids: Sequence[int]
) -> TrajectoryTurn:
    return TrajectoryTurn(
        id=TurnId(id_),
        parent=parent,
        prefix_tokens=prefix,
        packed_prompt_ids=pack_ids(prompt_ids),
        packed_output_ids=pack_ids(output_ids),
        packed_logprobs=pack_logprobs([0.0] * len(output_ids)),
        spans=(VersionSpan(version=0, start=0, end=len(output_ids)),) if output_ids else (),
        temperature=1.0,
        convention=LogprobConvention.SAMPLED,
        trainable=True,
    )


def _prepared(message: Message) -> dict[str, Any]:
    """Return a message as templates expect it: with its content as text, and the arguments of calls as objects.
    Raises NotLearnable for content that is not text."""
    content = message.get("content", "")
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else part for part in content]
        texts = [part for part in parts if isinstance(part, str)]
        content = "".join(texts) if len(texts) == len(parts) else None
    if not isinstance(content, str):
        raise NotLearnable("not_text", "a message has content that is not text")
    made = {**message, "content": content}
    if isinstance(made.get("tool_calls"), list):
        made["tool_calls"] = [_call(call) for call in made["tool_calls"]]
    return made


def _call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def context_of(head: Head, base: Path) -> int | None:
    """Return the bound on the tokens of a prompt and its answer, from the proxy or else the base model's
    configuration; None if neither has one."""
    if head.context_length is not None:
        return head.context_length
    try:
        config = json.loads((base / "config.json").read_text())
    except (OSError, ValueError):
        return None
    sources = [each for each in (config, config.get("text_config")) if isinstance(each, dict)]
    return next((each[key] for each in sources for key in _CONTEXT_KEYS if isinstance(each.get(key), int)), None)
