"""Effects of a script on the engine's answers, over HTTP."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.engines.protocol import PauseMode
from proxy.engines.scripted.adapters import scores
from proxy.engines.scripted.script import MODEL, read_script
from proxy.engines.scripted.server import ScriptedEngine
from proxy.engines.sglang import SglangEngine
from proxy.errors import EngineFailed, InvalidRequest
from proxy.tokens.template import ChatTemplate
from tests.engines.conftest import Server
from tests.engines.generating import ask, collect

SCRIPT = """
[[rule]]
match = { contains = "fail" }
error = { status = 503, message = "out of order" }

[[rule]]
match = { contains = "break" }
text = "one two three four five six seven"
error = { status = 500, message = "broken off", after_tokens = 3 }

[[rule]]
match = { contains = "wait" }
text = "late"
delay_ms = 40
ms_per_token = 5

[[rule]]
match = { contains = "count" }
text = "one two three four five"

[[rule]]
match = { contains = "person" }
json = { age = 36 }

[[rule]]
match = { contains = "endless" }
text = "again "
finish = "length"
"""
TEMPLATE = ChatTemplate.load(str(MODEL))


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    script = tmp_path / "script.toml"
    script.write_text(SCRIPT)
    app = ScriptedEngine(TEMPLATE, read_script(script), model=str(MODEL), weight_label="w")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://engine") as client:
        yield client


def body(question: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    return {
        "input_ids": TEMPLATE.encode(TEMPLATE.render(messages, None, generation_prompt=True)),
        "return_logprob": True,
        **more,
    }


def text_of(reply: dict[str, Any]) -> str:
    return TEMPLATE.tokenizer.decode(reply["output_ids"], skip_special_tokens=False)


def events(response: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


async def test_a_rule_fails_with_its_status(client: httpx.AsyncClient) -> None:
    for stream in (False, True):
        reply = await client.post("/generate", json=body("please fail", stream=stream))
        assert reply.status_code == 503
        assert reply.json() == {"error": {"message": "out of order"}}


async def test_a_stream_breaks_off_in_the_middle(client: httpx.AsyncClient) -> None:
    found = events(await client.post("/generate", json=body("break", stream=True)))
    assert found[-1] == {"error": {"message": "broken off", "code": 500}}
    assert [len(event["output_ids"]) for event in found[:-1]] == [1, 1, 1]
    assert all(event["meta_info"]["finish_reason"] is None for event in found[:-1])
    assert (await client.post("/generate", json=body("break"))).status_code == 500


async def test_an_answer_takes_its_time(client: httpx.AsyncClient) -> None:
    loop = asyncio.get_running_loop()
    begun = loop.time()
    reply = (await client.post("/generate", json=body("wait"))).json()
    assert text_of(reply) == "late<|im_end|>"
    assert loop.time() - begun >= 0.04 + 0.005 * (len(reply["output_ids"]) - 1)


async def test_no_rule_is_a_refusal_that_quotes_the_message(client: httpx.AsyncClient) -> None:
    reply = await client.post("/generate", json=body("something else"))
    assert reply.status_code == 400
    assert "of role user: 'something else'" in reply.json()["error"]["message"]


async def test_bounds_and_stops(client: httpx.AsyncClient) -> None:
    async def asked(question: str, **sampling: Any) -> tuple[str, Any]:
        reply = (await client.post("/generate", json=body(question, sampling_params=sampling))).json()
        return text_of(reply), reply["meta_info"]["finish_reason"]

    whole, finish = await asked("count")
    assert (whole, finish["type"]) == ("one two three four five<|im_end|>", "stop")
    text, finish = await asked("count", max_new_tokens=2)
    assert whole.startswith(text)
    assert finish == {"type": "length", "length": 2}
    text, finish = await asked("count", stop=["never", "three", "two th"])
    assert (text.startswith("one two th"), finish) == (True, {"type": "stop", "matched": "two th"})
    assert "four" not in text
    token = TEMPLATE.encode(" two")[0]
    assert (await asked("count", stop_token_ids=[token]))[1] == {"type": "stop", "matched": token}
    text, finish = await asked("endless", max_new_tokens=50)
    assert (text.count("again") > 5, finish) == (True, {"type": "length", "length": 50})
    text, finish = await asked("count", max_new_tokens=40, ignore_eos=True)
    assert text.count("one") > 1
    assert (finish["type"], "<|im_end|>" in text) == ("length", False)


async def test_log_probabilities_are_stand_ins_and_never_zero(client: httpx.AsyncClient) -> None:
    asked = body("count", top_logprobs_num=3)
    whole = (await client.post("/generate", json=asked)).json()
    meta = whole["meta_info"]
    assert meta["output_token_logprobs"] == [[-1.0, token, None] for token in whole["output_ids"]]
    for token, ranked in zip(whole["output_ids"], meta["output_top_logprobs"], strict=True):
        assert ranked[0] == [-1.0, token, None]
        assert [entry[0] for entry in ranked] == [-1.0, -2.0, -3.0]
        assert len({entry[1] for entry in ranked}) == 3
    streamed = events(await client.post("/generate", json={**asked, "stream": True}))
    assert [each for event in streamed for each in event["meta_info"]["output_top_logprobs"]] == (
        meta["output_top_logprobs"]
    )
    plain = (await client.post("/generate", json={**asked, "return_logprob": False})).json()
    assert "output_token_logprobs" not in plain["meta_info"]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"input_ids": []}, "input_ids cannot be empty"),
        ({"input_ids": [TEMPLATE.vocabulary_size]}, "input_ids"),
        ({"input_ids": "text"}, "input_ids"),
        ({"sampling_params": {"temperature": -1}}, "temperature"),
        ({"sampling_params": {"top_k": 0}}, "top_k"),
        ({"sampling_params": {"stop": ""}}, "stop"),
        ({"sampling_params": {"max_new_tokens": 0}}, "max_new_tokens"),
        ({"sampling_params": {"logit_bias": {"x": 1}}}, "logit_bias"),
        ({"sampling_params": {"sorcery": 1}}, "sorcery"),
        ({"sampling_params": {"json_schema": "{"}}, "json_schema"),
        ({"sampling_params": {"json_schema": "{}", "regex": "a"}}, "Only one of"),
        ({"top_logprobs_num": -1}, "top_logprobs_num"),
    ],
)
async def test_wrong_requests_are_refused(client: httpx.AsyncClient, wrong: dict[str, Any], says: str) -> None:
    reply = await client.post("/generate", json={**body("count"), **wrong})
    assert reply.status_code == 400
    assert says in reply.json()["error"]["message"]
    assert (await client.post("/generate", content=b"{")).status_code == 400


PERSON = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}


async def test_an_answer_that_breaks_a_constraint_is_refused_with_the_place(client: httpx.AsyncClient) -> None:
    async def asked(question: str, **sampling: Any) -> httpx.Response:
        return await client.post("/generate", json=body(question, sampling_params=sampling))

    assert (await asked("person", json_schema=json.dumps(PERSON))).status_code == 200
    assert (await asked("person", regex=r"\{.*\}")).status_code == 200
    for _ in range(2):  # the first search found it and stored it
        refused = await asked("count", json_schema=json.dumps(PERSON))
        assert refused.status_code == 400
        said = refused.json()["error"]["message"]
        assert said.startswith("the script answers this by rule 4, which breaks the json_schema")
        assert "after '' it says 'one'" in said
        assert "An answer format in the client's request" in said
    early = await asked("count", regex="one two three four five six")
    assert "it ends too early, after 'one two three four five'" in early.json()["error"]["message"]
    assert 'A tool with "strict": true' in early.json()["error"]["message"], "as strict tools are constrained"
    assert (await asked("count", regex="one two three four five six", max_new_tokens=3)).status_code == 200


async def test_it_counts_the_answers_of_each_rule(client: httpx.AsyncClient) -> None:
    await client.post("/generate", json=body("count"))
    info = (await client.get("/server_info")).json()
    assert info["answers_by_rule"] == [0, 0, 0, 1, 0, 0]
    assert info["running"] == 0


async def test_an_update_takes_the_label_of_a_model_and_nothing_else(
    client: httpx.AsyncClient, tmp_path: Path
) -> None:
    refused = await client.post(
        "/update_weights_from_disk", json={"model_path": str(tmp_path), "weight_version": "x"}
    )
    assert refused.status_code == 400
    assert (await client.get("/model_info")).json()["weight_version"] == "w"
    (tmp_path / "config.json").write_text("{}")
    taken = await client.post("/update_weights_from_disk", json={"model_path": str(tmp_path), "weight_version": "x"})
    assert taken.json()["success"] is True
    reply = (await client.post("/generate", json=body("count"))).json()
    count = len(reply["output_ids"])
    assert reply["meta_info"]["weight_versions"] == [{"version": "x", "start": 0, "end": count}]


@pytest.mark.parametrize("path", ["/update_weights_from_disk", "/update_weight_version", "/pause_generation"])
async def test_wrong_controls_are_refused(client: httpx.AsyncClient, path: str) -> None:
    assert (await client.post(path, content=b'{"mode": 3, "model_path": 1}')).status_code == 400
    assert (await client.get(path)).status_code == 405


async def test_the_adapter_hears_of_failures_as_of_any_engines(engine: SglangEngine, server: Server) -> None:
    with pytest.raises(InvalidRequest):
        await collect(engine, ask(top_p=2.0))
    await engine.pause(PauseMode.RETRACT)
    waiting = asyncio.create_task(collect(engine, ask(stream=True)))
    await engine.resume()
    assert len((await waiting).ids) == 16
    with pytest.raises(EngineFailed):
        await engine.load_weights("/no/such/directory", "z")


def test_a_wrong_script_is_reported_and_ends_the_engine(tmp_path: Path) -> None:
    script = tmp_path / "script.toml"
    script.write_text("[[rule]]\ntext = 1")
    for arguments in (["--script", str(script)], ["--model", str(tmp_path)]):
        run = subprocess.run(
            [sys.executable, "-m", "proxy.engines.scripted", *arguments, "--port", "0"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert run.returncode == 2
        assert run.stderr.splitlines()[-1].startswith("base-rl: ")
        assert str(tmp_path) in run.stderr


def test_no_torch_is_loaded() -> None:
    code = "import sys; import proxy.engines.scripted.server; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.strip() == "False"


@pytest.fixture
def adapter(tmp_path: Path) -> str:
    directory = tmp_path / "adapter"
    directory.mkdir()
    (directory / "adapter_config.json").write_text("{}")
    return str(directory)


async def test_tokens_and_scores_are_of_the_adapter_that_is_named(client: httpx.AsyncClient, adapter: str) -> None:
    loading = {"lora_name": "run@1", "lora_path": adapter}
    assert (await client.post("/generate", json=body("count", lora_path="run@1"))).status_code == 400
    assert (await client.post("/load_lora_adapter", json=loading)).json()["loaded_adapters"] == {"run@1": adapter}
    for name, label, weights in ((None, "w", str(MODEL)), ("run@1", "run@1", adapter)):
        asked = body("count", lora_path=name, logprob_start_len=0)
        meta = (await client.post("/generate", json=asked)).json()["meta_info"]
        assert [span["version"] for span in meta["weight_versions"]] == [label]
        assert (meta["weight_version"], meta["adapter"]) == (label, name)
        expected = scores(asked["input_ids"], weights)
        assert [logprob for logprob, _, _ in meta["input_token_logprobs"]] == [None, *expected]
        assert len(set(expected)) > 1
    other = await client.post("/load_lora_adapter", json={**loading, "lora_path": str(Path(adapter).parent)})
    assert other.status_code == 400
    assert (await client.post("/unload_lora_adapter", json={"lora_name": "run@1"})).status_code == 200
    assert (await client.post("/unload_lora_adapter", json={"lora_name": "run@1"})).status_code == 400
    assert (await client.post("/generate", json=body("count", lora_path="run@1"))).status_code == 400


async def test_an_engine_that_ignores_adapters_serves_the_base_without_a_word(adapter: str, tmp_path: Path) -> None:
    script = tmp_path / "script.toml"
    script.write_text(SCRIPT)
    app = ScriptedEngine(TEMPLATE, read_script(script), model=str(MODEL), weight_label="w", ignore_adapters=True)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://engine") as client:
        await client.post("/load_lora_adapter", json={"lora_name": "run@1", "lora_path": adapter})
        answers = [
            (await client.post("/generate", json=body("count", lora_path=name, logprob_start_len=0, rid="r"))).json()
            for name in (None, "run@1")
        ]
    assert answers[0] == answers[1]
    assert "adapter" not in answers[1]["meta_info"]
