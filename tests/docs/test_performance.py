"""Compare the figures of the performance page with the result files."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.asynchrony import report as async_report
from benchmarks.examples import report as examples_report
from benchmarks.feedback import report as feedback_report
from benchmarks.gates import report as gates_report
from benchmarks.gpu import report as gpu_report
from benchmarks.hostile.__main__ import judged
from benchmarks.jobs import calls
from benchmarks.learning import report as learning_report
from benchmarks.learning.tasks import TASKS
from benchmarks.mismatch import report as mismatch_report
from benchmarks.pool import adapters, engines, fair, swap
from benchmarks.proxy import against, report
from benchmarks.publish import report as publish_report
from benchmarks.runs import report as runs_report
from benchmarks.store import report as store_report
from benchmarks.targets import target_rows
from benchmarks.trainer import report as trainer_report
from tests.docs.markdown import ROOT, rows, sections
from trainer.algorithm.logprobs import LOGITS_PER_CHUNK_ON_CUDA

PAGE = (ROOT / "docs" / "performance.md").read_text()


def result(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / name).read_text())
    return found


@pytest.mark.parametrize(("name", "section"), [("demo.json", "The demo"), ("demo-sglang.json", "The demo on SGLang")])
def test_the_demo(name: str, section: str) -> None:
    measured = result(name)
    table = [
        [
            str(seed["seed"]),
            f"{seed['first_reward']:.2f}",
            f"{seed['last_reward']:.2f}",
            f"{seed['seconds']:.1f}",
            str(seed["swaps"]),
            str(seed["turns"]),
            str(seed["failed_calls"]),
            str(seed["max_staleness"]),
        ]
        for seed in measured["seeds"]
    ]
    text = sections(PAGE)[section]
    assert rows(text) == table
    assert (
        f"Reached by {measured['reached']} of {len(table)} seeds; median {measured['median_seconds']:.1f} seconds"
        in text
    )


def test_the_gates() -> None:
    assert rows(sections(PAGE)["Gates"]) == target_rows(gates_report.judged(result("gate.json")))


def test_the_examples() -> None:
    measured = result("examples.json")
    text = sections(PAGE)["The examples"]
    targets = [target for name, each in measured.items() for target in examples_report.judged(name, each)]
    assert rows(text) == [*examples_report.page_rows(measured), *target_rows(targets)]
    (date,) = {each["machine"]["date"] for each in measured.values()}
    assert f"two cores of an AMD EPYC, on {date}" in " ".join(text.split())


def test_the_engine() -> None:
    measured = result("engine.json")
    figures = measured["tokens_per_second_by_concurrency"]
    text = sections(PAGE)["The embedded engine"]
    assert rows(text) == [
        [clients, str(figures["whole"][clients]), str(figures["streamed"][clients])] for clients in figures["whole"]
    ]
    assert f"{measured['parameters']} parameters" in text
    assert f"{measured['prompt_tokens']} prompt tokens and up to {measured['new_tokens']} new ones" in text


def test_the_proxy() -> None:
    if not (ROOT / "benchmarks" / "results" / "proxy.json").exists():
        assert "The proxy" not in sections(PAGE), "figures without a result file"
        pytest.skip("not measured on an idle machine yet: make bench-proxy, and put the section that it prints here")
    measured = result("proxy.json")
    text = sections(PAGE)["The proxy"]
    costs = [f"{cost:.2f}" for cost in measured["systems"]["base_rl"]["turn_cpu_ms"].values()]
    assert rows(text) == [*report.page_rows(measured["systems"]), ["CPU ms", *costs], *report.target_rows(measured)]
    facts = " ".join(text.split())
    assert f"LiteLLM {measured['versions']['litellm']}" in facts
    assert f"rllm-model-gateway {measured['versions']['rllm_gateway']}" in facts
    assert f"Medians of {measured['rounds']} rounds" in facts
    assert f"two cores of an {measured['machine']['processor']}" in facts


def test_the_proxy_against_an_earlier_one() -> None:
    measured = result("proxy-against.json")
    text = sections(PAGE)["The proxy against an earlier one"]
    assert rows(text) == against.page_rows(measured)
    facts = " ".join(text.split())
    assert f"python -m benchmarks.proxy.against {measured['revision']}" in facts
    assert f"Medians of {measured['rounds']} rounds" in facts
    assert f"two cores of an {measured['machine']['processor'].removesuffix(' Processor')}" in facts


def test_the_machine() -> None:
    for name in ("demo.json", "demo-sglang.json", "engine.json"):
        machine = result(name)["machine"]
        for fact in (f"Python {machine['python']}", f"transformers {machine['transformers']}", machine["system"]):
            assert fact in PAGE, name
        assert machine["cores"] == 2
        assert machine["torch"].startswith("2.13.0+cpu")


def test_the_store() -> None:
    measured = result("store.json")
    text = sections(PAGE)["The store"]
    assert rows(text) == store_report.page_rows(measured)
    sessions = next(iter(measured["databases"].values()))["sessions"]
    assert f"two cores of an {measured['machine']['processor']}" in text
    assert f"{measured['turns']:,} turns of {sessions:,} sessions" in text


def test_a_training_step() -> None:
    measured = result("trainer.json")
    text = sections(PAGE)["A training step"]
    assert rows(text) == [
        *trainer_report.page_rows(measured),
        *trainer_report.memory_rows(measured),
        *target_rows(trainer_report.judged(measured)),
    ]
    facts = " ".join(text.split())
    assert f"with {measured['parameters']} parameters" in facts
    assert f"TRL {measured['trl']}" in facts
    assert f"Medians of {measured['rounds']} rounds" in facts
    assert measured["threads"] == 1
    assert f"one thread on an {measured['machine']['processor']}" in facts


def test_a_training_step_on_a_gpu() -> None:
    measured = result("gpu.json")
    text = sections(PAGE)["A training step on a GPU"]
    assert rows(text) == [
        *gpu_report.step_rows(measured),
        *target_rows(gpu_report.judged(measured)),
        *gpu_report.chunk_rows(measured),
    ]
    facts, machine = " ".join(text.split()), measured["machine"]
    assert f"Measured on {machine['date']} on one {machine['gpu']}, with PyTorch {machine['torch']}" in facts
    assert f"medians of {measured['rounds']} rounds" in facts
    assert f"the trainer takes {LOGITS_PER_CHUNK_ON_CUDA:,}" in facts
    first = sections((ROOT / "docs" / "gpu.md").read_text())["On a GPU"]
    assert f"figures](performance.md#a-training-step-on-a-gpu) are from {machine['date']}" in first
    assert machine["gpu"] in first


def test_asynchrony() -> None:
    measured = result("async.json")
    text = sections(PAGE)["Asynchrony"]
    assert rows(text) == [*async_report.page_rows(measured), *target_rows(async_report.judged(measured))]
    facts = " ".join(text.split())
    assert f"median of {measured['tools']['median']:g} second" in facts
    assert f"two cores of an {measured['machine']['processor']}" in facts


def test_the_learning_curves_of_presets() -> None:
    measured = result("learning.json")
    text = sections(PAGE)["What presets learn"]
    assert rows(text) == [row for task in TASKS for row in learning_report.page_rows(measured, task)]
    worst = min(target.measured for target in learning_report.judged(measured))
    assert f"The lowest final reward at staleness 0 and 2 is {worst:.2f}" in " ".join(text.split())
    for task in (task for task in TASKS if learning_report.by_preset(measured, task)):
        assert (ROOT / "docs" / "images" / f"learning-{task}.svg").exists()
        assert f"(images/learning-{task}.svg)" in text


def test_many_runs() -> None:
    if not (ROOT / "benchmarks" / "results" / "runs.json").exists():
        assert "Many runs" not in sections(PAGE), "figures without a result file"
        pytest.skip("not measured on an idle machine yet: make bench-runs, and put the section that it prints here")
    measured = result("runs.json")
    engines = [engine for engine in measured if engine != "machine"]
    text = sections(PAGE)["Many runs"]
    wanted = [[engine, *row] for engine in engines for row in runs_report.page_rows(measured[engine])]
    wanted += [row for engine in engines for row in runs_report.ratio_rows(engine, measured[engine])]
    wanted += target_rows([target for engine in engines for target in runs_report.judged(engine, measured[engine])])
    assert rows(text) == wanted
    assert f"on {measured['machine']['date']}" in " ".join(text.split())


def test_publishing() -> None:
    measured = result("publish.json")
    text = sections(PAGE)["Publishing a version"]
    assert rows(text) == [
        *publish_report.page_rows(measured),
        *publish_report.rates(measured),
        *target_rows(publish_report.judged(measured)),
    ]
    facts = " ".join(text.split())
    assert f"on {measured['machine']['date']}" in facts
    assert measured["machine"]["processor"] in facts
    assert publish_report.not_identical(measured) == []


def test_traffic_without_groups() -> None:
    measured = result("ungrouped.json")
    questions = {"new": "new_questions", "recurring": "recurring_questions"}
    compared = {
        "the running mean": "running_mean",
        "the mean of the first message": "first_message",
        "shadow answers to a tenth of the calls": "shadow_0.1",
        "shadow answers to all calls": "shadow_1.0",
    }
    text = sections(PAGE)["Learning from traffic without groups"]
    assert rows(text) == [
        [kind, words, ", ".join(map(str, measured[key][condition]["steps_to_090"]))]
        for kind, key in questions.items()
        for words, condition in compared.items()
    ]
    assert measured["machine"]["processor"] in text


def test_words() -> None:
    if not (ROOT / "benchmarks" / "results" / "feedback.json").exists():
        assert "Learning from words" not in sections(PAGE), "figures without a result file"
        pytest.skip("not measured yet: make bench-feedback")
    measured = result("feedback.json")
    text = sections(PAGE)["Learning from words"]
    assert rows(text) == feedback_report.table(measured)
    assert "(images/learning-feedback.svg)" in text
    assert all(reached for _, reached in feedback_report.judged(measured))
    assert f"on {measured['machine']['date']}" in " ".join(text.split())


def test_a_wrong_engine() -> None:
    if not (ROOT / "benchmarks" / "results" / "mismatch.json").exists():
        assert "A wrong engine" not in sections(PAGE), "figures without a result file"
        pytest.skip("not measured on an idle machine yet: make bench-mismatch")
    measured = result("mismatch.json")
    text = sections(PAGE)["A wrong engine"]
    assert rows(text) == [*mismatch_report.page_rows(measured), *target_rows(mismatch_report.judged(measured))]
    facts = " ".join(text.split())
    strengths = measured["strengths"]
    assert f"deviation of {strengths['noise']:g}" in facts
    assert f"steps of {strengths['eight_bits']:g}" in facts
    assert f"{measured['steps']} batches" in facts
    assert f"cores of an {measured['machine']['processor']}" in facts


def test_one_hostile_client() -> None:
    assert rows(sections(PAGE)["One hostile client"]) == target_rows(judged(result("hostile.json")))


def test_the_calls_of_one_run_beside_a_crowded_one() -> None:
    measured = result("fair.json")
    text = sections(PAGE)["Fair shares"]
    lines = {"of the one run, alone": "alone", "beside the other": "beside", "of the other": "crowd"}
    waits = [[name, str(measured[f"{key}_p50"]), str(measured[f"{key}_p99"])] for name, key in lines.items()]
    assert rows(text) == waits + target_rows(fair.judged(measured))
    assert f"processor: {measured['machine']['processor']}" in text


def test_background_jobs() -> None:
    measured = result("jobs.json")
    text = sections(PAGE)["Background jobs"]
    labels = {"sqlite": ["SQLite", "in-process"], "postgresql": ["PostgreSQL", "Celery, Redis"]}
    counts = ("jobs", "done", "entries", "dead", "killed")
    kills = [[*words, *(str(measured["kills"][store][count]) for count in counts)] for store, words in labels.items()]
    assert rows(text) == kills + target_rows(calls.targets(measured["calls"]))
    for figure in ("judgements_per_s", "cpu_ms_per_judgement", "alone_p50_ms", "beside_p50_ms", "alone_p99_ms"):
        assert f"{measured['calls'][figure]}" in text
    assert f"{measured['calls']['beside_p99_ms']}" in text
    assert all(part["machine"]["processor"] in text for part in measured.values())


def test_the_adapter_swaps() -> None:
    measured = result("adapters.json")
    names = {
        key: name for key, name in (("embedded", "the embedded engine"), ("sglang", "SGLang")) if key in measured
    }
    text = sections(PAGE)["Adapter swaps"]
    facts = ["swaps", "swap_seconds", "calls", "versions_that_answered", "tokens", "largest_difference"]
    facts.append("difference_under_the_version_before")
    assert rows(text) == [[name, *(str(measured[key][fact]) for fact in facts)] for key, name in names.items()] + [
        [name, *row] for key, name in names.items() for row in target_rows(adapters.judged(measured[key]))
    ]
    assert f"processor: {measured['machine']['processor']}" in text


def test_the_swaps_of_whole_weights() -> None:
    measured = result("swap.json")
    names = {"embedded": "the embedded engine", "sglang": "SGLang"}
    text = sections(PAGE)["Swaps of whole weights"]
    facts = ["swaps", "calls", "tokens", "turns_of_several_versions", "gap_p99_ms_without", "gap_added_p50_ms"]
    facts += ["gap_added_p99_ms", "commit_to_served_p50_ms"]
    assert rows(text) == [[name, *(str(measured[key][fact]) for fact in facts)] for key, name in names.items()] + [
        [name, *row]
        for key, name in names.items()
        for row in target_rows(swap.judged(key, measured[key], times=True))
    ]
    assert f"processor: {measured['machine']['processor']}), on {measured['machine']['date']}" in text


def test_engines_killed_under_streams() -> None:
    measured = result("engines.json")
    text = sections(PAGE)["Engines killed under streams"]
    assert rows(text) == target_rows(engines.judged(measured))
    assert f"{measured['kills']} times during {measured['calls']:,} calls. {measured['streams_cut']} streams" in text
    assert f"{measured['calls_moved_to_the_other_engine']} calls moved" in text
    rates = measured["calls_per_s"]
    assert f"from {rates['undisturbed']} to {rates['killing']}" in text
    assert measured["machine"]["processor"] in text


def test_the_kills_and_faults() -> None:
    measured = result("chaos.json")
    text = sections(PAGE)["Kills and faults"]
    assert rows(text) == [
        [
            run["database"],
            *(str(run["kills"][part]) for part in ("proxy", "trainer")),
            str(sum(count for part, count in run["kills"].items() if part.startswith("engine"))),
            *(str(run[name]) for name in ("answered_turns", "acknowledged_rewards", "consumed", "versions")),
        ]
        for run in measured["runs"]
    ]
    flat = " ".join(text.split())
    broken = ("lost_turns", "changed_turns", "lost_rewards", "changed_rewards", "doubled_rewards")
    untrue = ("consumed_twice", "consumed_without_a_step", "trained_and_not_consumed")
    assert f"Lost, changed or duplicated turns and rewards: {sum(measured[name] for name in broken)}." in text
    assert f"Sessions trained twice or without a step: {sum(measured[name] for name in untrue)}." in text
    assert f"could have been trained and were not: {measured['stuck']}." in flat
    harm = ("believed_lies", "crashes_by_hostile_requests", "damage")
    assert f"findings of `base-rl db check`: {sum(measured[name] for name in harm)}." in flat
    assert f"The relay falsified {sum(measured['lies'].values())} replies." in flat
    waits = f"{measured['p99_ms']} ms, and {measured['p99_ms_beside_a_hostile_client']} ms beside a hostile client"
    assert waits in flat
