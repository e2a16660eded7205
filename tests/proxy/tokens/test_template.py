from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from proxy.errors import InvalidRequest
from proxy.settings import ConfigurationError
from proxy.tokens.template import ChatTemplate
from tests.proxy.tokens.models import CHATML, MARKERS, SPECIAL, byte_level_tokenizer, write_model

TOOLS = [{"type": "function", "function": {"name": "calculator", "description": "a < b & é", "parameters": {}}}]
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "What is 17 + 25?"}],
    [{"role": "system", "content": "Be <brief> & né."}, {"role": "user", "content": "日本語 🎉"}],
    [
        {"role": "user", "content": "Compute 3 * 4."},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {
                    "id": "c",
                    "type": "function",
                    "function": {"name": "calculator", "arguments": {"a": 3, "op": "*<é"}},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "c", "content": "12"},
        {"role": "assistant", "content": "The answer is 12."},
        {"role": "user", "content": "Thanks"},
    ],
]


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
@pytest.mark.parametrize("generation_prompt", [True, False])
@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_renders_and_encodes_as_transformers_does(
    template: ChatTemplate,
    model_dir: Path,
    messages: list[dict[str, Any]],
    generation_prompt: bool,
    tools: list[Any] | None,
) -> None:
    reference = AutoTokenizer.from_pretrained(model_dir)
    text = reference.apply_chat_template(
        messages, tools=tools, tokenize=False, add_generation_prompt=generation_prompt
    )
    ids = reference.apply_chat_template(
        messages, tools=tools, add_generation_prompt=generation_prompt, return_dict=False
    )
    rendered = template.render(messages, tools, generation_prompt=generation_prompt)
    assert rendered == text
    assert list(template.encode(rendered)) == ids


def test_arguments_as_json_text_are_rendered_as_the_object(template: ChatTemplate) -> None:
    as_object = CONVERSATIONS[2]
    as_text: list[dict[str, Any]] = json.loads(json.dumps(as_object))
    function = as_text[1]["tool_calls"][0]["function"]
    function["arguments"] = json.dumps(function["arguments"], indent=3)
    rendered = template.render(as_text, TOOLS, generation_prompt=True)
    assert rendered == template.render(as_object, TOOLS, generation_prompt=True)
    assert function["arguments"].startswith("{\n"), "the message itself is not changed"


def test_arguments_that_are_not_an_object_stay_text(template: ChatTemplate) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": "[1"}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    assert '"arguments": "[1"' in template.render(messages, None, generation_prompt=False)


def test_a_template_that_refuses_gives_a_400(tmp_path: Path) -> None:
    refusing = "{% if messages|length > 2 %}{{ raise_exception('too many') }}{% endif %}" + CHATML
    template = ChatTemplate.load(str(write_model(tmp_path, template=refusing)))
    with pytest.raises(InvalidRequest, match="too many") as caught:
        template.render(CONVERSATIONS[2], None, generation_prompt=True)
    assert caught.value.param == "messages"


@pytest.mark.parametrize("fault", ["{{ range(10 ** 9) | list }}", "{{ 1 / 0 }}", "{{ 2.0 ** 10000 }}"])
def test_whatever_a_template_raises_is_a_400(tmp_path: Path, fault: str) -> None:
    failing = "{% if messages|length > 2 %}" + fault + "{% endif %}" + CHATML
    template = ChatTemplate.load(str(write_model(tmp_path, template=failing)))
    with pytest.raises(InvalidRequest, match="cannot render") as caught:
        template.render(CONVERSATIONS[2], None, generation_prompt=True)
    assert caught.value.param == "messages"


def test_a_template_cannot_leave_the_sandbox(tmp_path: Path) -> None:
    escape = "{{ messages.__class__.__mro__ }}" + CHATML
    with pytest.raises(ConfigurationError, match="unsafe"):
        ChatTemplate.load(str(write_model(tmp_path, template=escape)))


ACCESSES = (
    "{{ m.role }}|{{ m.absent }}|{{ m.absent is defined }}|{{ m.items is callable }}|{{ m.get('role') }}|{{ m.pop }}"
    "|{% for key in m %}{{ loop.index0 }}{{ loop.first }}{{ loop.last }}{{ loop.nextitem }}"
    "{{ loop.length }}{% endfor %}|{{ m.__class__ }}|{{ m.inner.role }}|{{ m['role'] }}|{{ loop.__class__ }}"
    "|{{ m.role.upper() }}"
)


def test_the_quick_ways_to_items_and_loops_give_what_the_sandbox_gives(tmp_path: Path) -> None:
    text = f"{{% if tools %}}{{% for m in messages %}}{ACCESSES}{{% endfor %}}{{% endif %}}"
    message = {"role": "user", "content": "x", "items": "an item", "inner": {"role": "y"}, "pop": 1}
    plain = ImmutableSandboxedEnvironment().from_string(text).render(messages=[message], tools=TOOLS)
    ours = ChatTemplate.load(str(write_model(tmp_path, template=text + CHATML)))
    assert plain
    assert ours.render([message], TOOLS, generation_prompt=True).startswith(plain)


def test_special_tokens_and_the_date_are_there(tmp_path: Path) -> None:
    text = "{{ eos_token }}{{ strftime_now('%Y')|length }}" + CHATML
    template = ChatTemplate.load(str(write_model(tmp_path, template=text)))
    assert template.render(CONVERSATIONS[0], None, generation_prompt=False).startswith("<|im_end|>4<|im_start|>")


def test_knows_how_answers_end(template: ChatTemplate) -> None:
    assert template.closing == "<|im_end|>\n"
    assert [template.token_text(token) for token in template.stop_ids] == ["<|im_end|>"]
    assert [template.readable_token(token) for token in template.stop_ids] == ["<|im_end|>"]
    assert "".join(template.readable_token(token) for token in template.encode("Add it.")) == "Add it."
    assert template.context_length == 512


def test_the_templates_closing_token_stops_too(tmp_path: Path) -> None:
    template = ChatTemplate.load(str(write_model(tmp_path, eos=[0])))
    assert [template.token_text(token) for token in template.stop_ids] == ["<|endoftext|>", "<|im_end|>"]


def test_template_inside_the_tokenizer_configuration(tmp_path: Path) -> None:
    write_model(tmp_path, template=None)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({"eos_token": {"content": "<|im_end|>"}, "chat_template": CHATML}))
    assert ChatTemplate.load(str(tmp_path)).closing == "<|im_end|>\n"


def test_named_templates_are_chosen_by_tools(tmp_path: Path) -> None:
    write_model(tmp_path, template=None)
    named = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": "TOOLS" + CHATML}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    template = ChatTemplate.load(str(tmp_path))
    assert template.render(CONVERSATIONS[0], TOOLS, generation_prompt=True).startswith("TOOLS<")
    assert template.render(CONVERSATIONS[0], None, generation_prompt=True).startswith("<|im_start|>")


@pytest.mark.parametrize(
    ("options", "missing"),
    [
        ({"template": None}, "chat template"),
        ({"context_length": None}, "max_position_embeddings"),
        ({"template": "{% if %}"}, "does not parse"),
        ({"template": "{{ messages[0].content }}"}, "leaves out"),
    ],
)
def test_a_model_that_cannot_be_served_is_an_error_with_the_reason(
    tmp_path: Path, options: dict[str, Any], missing: str
) -> None:
    with pytest.raises(ConfigurationError, match=missing):
        ChatTemplate.load(str(write_model(tmp_path, **options)))


def test_a_model_without_an_end_token_is_reported(tmp_path: Path) -> None:
    open_ended = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    with pytest.raises(ConfigurationError, match="eos_token_id"):
        ChatTemplate.load(str(write_model(tmp_path, template=open_ended, eos=None)))


def test_neither_a_directory_nor_an_id() -> None:
    with pytest.raises(ConfigurationError, match="neither a directory"):
        ChatTemplate.load("./no/such/dir")


def test_a_directory_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"tokenizer\.json"):
        ChatTemplate.load(str(tmp_path))


def test_a_hugging_face_id_comes_from_the_local_cache(tmp_path: Path) -> None:
    commit = "0" * 40
    repository = tmp_path / "models--acme--tiny"
    write_model(repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    assert ChatTemplate.load("acme/tiny", cache_dir=tmp_path).closing == "<|im_end|>\n"


def test_text_after_a_special_token_is_not_a_beginning(template: ChatTemplate) -> None:
    stop = template.stop_ids[0]
    assert template.encode_after(stop, "\nx") == template.encode("<|im_end|>\nx")[1:]
    assert template.encode_after(None, "\nx") == template.encode("\nx")


def test_the_proxy_loads_no_torch() -> None:
    code = "import sys, proxy.tokens.template, proxy.tokens.prefix; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_byte_is_a_token() -> None:
    tokenizer = byte_level_tokenizer()
    assert tokenizer.decode(tokenizer.encode("\x00\x7fé🎉").ids) == "\x00\x7fé🎉"


REFUSING = "{%- for m in messages if m.role == 'system' and not loop.first %}{{ raise_exception('x') }}{% endfor %}"
DROPPING = CHATML.replace("or (message.role == 'system' and not loop.first)", "")


@pytest.mark.parametrize(("written", "anywhere"), [(CHATML, True), (REFUSING + CHATML, False), (DROPPING, False)])
def test_whether_system_messages_may_stand_anywhere_is_known(tmp_path: Path, written: str, anywhere: bool) -> None:
    assert ChatTemplate.load(str(write_model(tmp_path / "model", template=written))).system_anywhere is anywhere


SWITCHED = (
    CHATML
    + "{%- if add_generation_prompt and enable_thinking is defined and not enable_thinking %}"
    + "{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
)


def test_arguments_reach_the_template_and_which_it_reads_is_known(tmp_path: Path, template: ChatTemplate) -> None:
    switched = ChatTemplate.load(str(write_model(tmp_path / "model", template=SWITCHED)))
    assert template.known_arguments == frozenset()
    assert switched.known_arguments == {"enable_thinking"}
    messages = [{"role": "user", "content": "Hi."}]

    def asked(**arguments: Any) -> str:
        return switched.render(messages, None, generation_prompt=True, arguments=arguments)

    assert asked() == asked(enable_thinking=True) == asked(bos_token="x")
    assert asked(enable_thinking=False) == asked() + "<think>\n\n</think>\n\n"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> tuple[ChatTemplate, Tokenizer]:
    """A template and its tokenizer."""
    directory = write_model(tmp_path_factory.mktemp("model"))
    return ChatTemplate.load(str(directory)), Tokenizer.from_file(str(directory / "tokenizer.json"))


@given(text=st.text(max_size=80) | st.lists(st.sampled_from([*SPECIAL, *MARKERS, " ", "a", "\n"])).map("".join))
def test_texts_are_encoded_as_the_tokenizer_encodes_them(shared: tuple[ChatTemplate, Tokenizer], text: str) -> None:
    template, tokenizer = shared
    assert template.encode(text) == tuple(tokenizer.encode(text, add_special_tokens=False).ids)


def test_other_threads_run_while_a_long_text_is_tokenised(tmp_path: Path) -> None:
    """The test measures the longest pause of another thread as a share of the whole; the best of three, because
    machines are busy."""
    template = ChatTemplate.load(str(write_model(tmp_path)))
    text = "one two three " * 50_000
    assert min(_pause_beside(lambda: template.encode(text)) for _ in range(3)) < 0.5


def _pause_beside(work: Callable[[], object]) -> float:
    longest = 0.0
    started, ended = threading.Event(), threading.Event()

    def step() -> None:
        nonlocal longest
        last = time.perf_counter()
        while not ended.is_set():
            started.set()
            now = time.perf_counter()
            longest, last = max(longest, now - last), now

    stepping = threading.Thread(target=step)
    stepping.start()
    started.wait()
    began = time.perf_counter()
    work()
    took = time.perf_counter() - began
    ended.set()
    stepping.join()
    return longest / took
