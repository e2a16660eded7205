# `make demo` first, `make test` second; `make help` lists the rest.
SHELL := /bin/bash
.DEFAULT_GOAL := help
export OMP_NUM_THREADS ?= 1
# Images of containers often set it. Every process would compile the project again, and every test session the tests.
unexport PYTHONDONTWRITEBYTECODE
BIN := .venv/bin
SEED ?= 0
ENGINE ?= embedded
# Of a suite with a short form: cases that it leaves out.
LESS = $(if $(SHORT), and not exhaustive)
# Tests that wait leave a core to others, so more processes than cores. Tests that failed run again alone.
PROCESSES = $(if $(AGAIN),,-n $(1) --dist loadgroup)
PYTEST = $(BIN)/pytest --durations=15 --durations-min=5 $(if $(AGAIN),--again)

EXAMPLES = $(or $(NAME),$(patsubst agents_examples/%/checkpoint,%,$(wildcard agents_examples/*/checkpoint)))

.PHONY: help demo test test-again setup setup-dev lock lint types layers code-figures format test-fast test-fuzz test-end-to-end test-ranks test-browser test-clients test-docs test-install test-tracking test-sglang test-gpu test-images test-slurm test-ray test-helm \
        sglang-cpu demo-sglang example examples bench-demo bench-demo-sglang bench-engine bench-proxy bench-hostile bench-fair bench-engines bench-adapters bench-swap bench-feedback bench-gate bench-jobs bench-store bench-learning bench-mismatch bench-async bench-runs bench-trainer bench-publish bench-scale bench-partitions bench-gpu chaos checkpoint clean trace-call

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  \033[1m%-18s\033[0m %s\n", $$1, $$2}'

demo: setup  ## set everything up and watch an agent learn (ENGINE=sglang for the real SGLang, SEED=n)
	@$(BIN)/base-rl demo --engine $(ENGINE) --seed $(SEED)

test: setup-dev  ## set everything up; lint, types, layers, bounds on the code and the tests
	@$(MAKE) --no-print-directory -j2 --output-sync=target lint types layers code-figures
	@$(MAKE) --no-print-directory test-fast

test-again:  ## after a `make test` with failed tests: the same checks, and at most 10 failed tests once more, alone (other suites: AGAIN=1)
	@$(MAKE) test AGAIN=1

setup:
	@scripts/setup.sh runtime

setup-dev:
	@scripts/setup.sh dev

lint: setup-dev  ## ruff: lint and format check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: setup-dev  ## ruff: format and mend what can be mended
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

types: setup-dev  ## mypy --strict
	$(BIN)/mypy --num-workers 2

lock:  ## after a change of pins: locks/ again, with the hashes of all files
	scripts/lock.sh

layers: setup-dev  ## import-linter: who may import whom
	$(BIN)/lint-imports

code-figures: setup-dev  ## sizes of files and functions, comments, private names in tests (fails beyond a bound)
	$(BIN)/python scripts/code_figures.py

test-fast: setup-dev  ## the tests without the slow suites below; on PostgreSQL as well, where its server is installed
	$(PYTEST) $(call PROCESSES,3) -m "not sglang and not end_to_end and not browser and not clients and not install and not tracking and not archon and not ranks and not gpu and not images and not slurm and not ray and not helm and not pages"

test-fuzz: setup-dev  ## every endpoint with 300 odd requests a kind; minutes (FUZZ_EXAMPLES=n)
	FUZZ_EXAMPLES=$(or $(FUZZ_EXAMPLES),300) $(BIN)/pytest tests/proxy/test_fuzz.py

test-browser: setup-dev  ## the admin page in Chromium (needs /usr/bin/chromium)
	BASE_RL_REQUIRE_BROWSER=1 $(PYTEST) -m browser

test-ranks: setup-dev  ## every way of dividing a model among processes on gloo, and going on in another; minutes (SHORT=1: without layouts that others contain)
	$(PYTEST) -m "archon$(LESS) or ranks$(LESS)"

test-gpu: $(if $(GPU_PYTHON),,setup-dev)  ## training on a CUDA device: skipped without one (GPU_PYTHON=an interpreter that has all it needs)
	$(or $(GPU_PYTHON),$(BIN)/python) -m pytest -m gpu --confcutdir tests/gpu tests/gpu

test-slurm: setup-dev  ## a run under a real slurmctld with two nodes on this machine; two minutes (as root, needs slurm-wlm and munge)
	BASE_RL_REQUIRE_SLURM=1 $(PYTEST) -m slurm

test-ray: setup-dev  ## a run on a real Ray cluster of several nodes on this machine, in an environment of its own; two minutes (SHORT=1: only that it survives lost nodes)
	$(PYTEST) -m ray $(if $(SHORT),-k survives) --timeout 1200

test-images: setup-dev  ## the images built without Docker, and the services of docker-compose.yml run in them by crun; minutes (as root, needs mmdebstrap, buildah, crun; IMAGES_BUILD_OPTIONS="…": more options for buildah)
	BASE_RL_REQUIRE_IMAGES=1 $(PYTEST) -m images -s

test-helm: setup-dev  ## the Helm chart rendered by Helm, in an environment of its own, and validated against the schemas of Kubernetes
	$(PYTEST) -m helm --timeout 1200

test-end-to-end: setup-dev  ## whole processes: kills, restarts, learning; minutes (SHORT=1: without cases that others contain)
	$(PYTEST) $(call PROCESSES,2) -m "end_to_end$(LESS)"

test-clients: setup-dev  ## real agents and SDKs, each in an environment of its own, following their pages of docs/agents (SHORT=1: the example coding by one agent)
	$(PYTEST) -m "clients$(LESS)" --timeout 1200

test-docs: setup-dev  ## README, docs and READMEs of examples followed as they are written: every command, in order; minutes (SHORT=1: of two examples)
	$(PYTEST) -m "pages$(LESS)"

test-install: setup-dev  ## the wheel without extras, in an environment of its own: serves a call without torch; a minute
	$(PYTEST) -m install --timeout 1200

test-tracking: setup-dev  ## metrics told to the real W&B, MLflow and Trackio, in an environment of their own
	$(PYTEST) -m tracking --timeout 1200

sglang-cpu:  ## install the real SGLang for CPU in an environment of its own (3.3 GB, about 8 minutes)
	bash scripts/sglang_cpu/install.sh

test-sglang: setup-dev sglang-cpu  ## the engine contract tests against the real SGLang
	BASE_RL_REQUIRE_SGLANG=1 $(PYTEST) -m sglang

demo-sglang: setup sglang-cpu  ## the demo on the real SGLang
	@$(BIN)/base-rl demo --engine sglang --seed $(SEED)

trace-call: setup-dev  ## one chat completion traced: the files of its trunk in order, and how many calls it makes
	@$(BIN)/python -m scripts.trace_call

# `assistant` needs the anthropic SDK, which the environment of `make demo` does not have.
example: $(if $(filter assistant,$(NAME)),setup-dev,setup)  ## one example learns on its tiny model, within three minutes (NAME=calculator; SEED=n; SHORT=1: does it run?)
	$(if $(NAME),,$(error name an example: make example NAME=calculator; the others are the folders of agents_examples))
	$(BIN)/python -m benchmarks.examples $(NAME) --seed $(SEED) $(if $(SHORT),--short)

examples: setup-dev $(if $(SHORT),$(EXAMPLES:%=short-example-%))  ## every example with three seeds -> benchmarks/results/examples.json and a plot each (NAME=calculator: a part; SHORT=1: do they run?)
	$(if $(SHORT),,$(BIN)/python -m benchmarks.examples $(NAME))

# A target for each, so that `make -j2` runs two at a time.
short-example-%: setup-dev
	$(BIN)/python -m benchmarks.examples $* --short

bench-demo: setup  ## the demo with five seeds -> benchmarks/results/demo.json
	$(BIN)/python -m benchmarks.demo

bench-demo-sglang: setup sglang-cpu  ## the demo on the real SGLang with three seeds -> benchmarks/results/demo-sglang.json
	$(BIN)/python -m benchmarks.demo --engine sglang --seeds 3

bench-engine: setup  ## tokens/s of the embedded engine -> benchmarks/results/engine.json
	$(BIN)/python -m benchmarks.engine

bench-proxy: setup  ## the proxy's own cost, beside LiteLLM and rllm-model-gateway -> benchmarks/results/proxy.json (SHORT=1: does it run?)
	$(BIN)/python -m benchmarks.proxy $(if $(SHORT),--short) $(if $(PROFILE),--profile)

bench-hostile: setup  ## what others notice of one hostile client -> benchmarks/results/hostile.json (SHORT=1: does it run?)
	$(BIN)/python -m benchmarks.hostile $(if $(SHORT),--short)

bench-fair: setup  ## the calls of one run beside another with ten times its share -> benchmarks/results/fair.json (SHORT=1: does it run?)
	$(BIN)/python -m benchmarks.pool.fair $(if $(SHORT),--short)

bench-engines: setup  ## kill -9 of one of two engines every 20 s under 64 streams, five minutes -> benchmarks/results/engines.json (SHORT=1: does it run?)
	$(BIN)/python -m benchmarks.pool.engines $(if $(SHORT),--short)

bench-adapters: setup-dev sglang-cpu  ## adapter swaps under load, 500 on the embedded engine, 50 on SGLang -> benchmarks/results/adapters.json (ARGS="--engine embedded": a part; SHORT=1: does it run?)
	$(BIN)/python -m benchmarks.pool.adapters $(if $(SHORT),--short) $(ARGS)

bench-swap: setup $(if $(SHORT),,sglang-cpu)  ## swaps of whole weights under load, 1,000 on the embedded engine, 100 on SGLang; stale prompts, bad versions, a rollback -> benchmarks/results/swap.json (ARGS="--engine embedded": a part; SHORT=1: does it run?)
	$(BIN)/python -m benchmarks.pool.swap $(if $(SHORT),--short) $(ARGS)

bench-store: setup  ## both databases from nothing to a million turns -> benchmarks/results/store.json (TURNS=n, DATABASE=sqlite; SHORT=1: does it run?)
	$(BIN)/python -m benchmarks.store $(if $(TURNS),--turns $(TURNS)) $(if $(DATABASE),--database $(DATABASE)) $(if $(SHORT),--short)

bench-learning: setup-dev  ## every preset that rewards teach, on three tasks, three seeds, staleness 0, 2 and 4 -> benchmarks/results/learning.json (SHORT=1: one seed, staleness 0 and 2; ARGS="--tasks live": a part)
	$(BIN)/python -m benchmarks.learning $(if $(SHORT),--short) $(ARGS)

bench-mismatch: setup  ## learning from a wrong engine, by correction, three seeds, 20 minutes -> benchmarks/results/mismatch.json (ARGS="--faults stale --seeds 0" for a part; SHORT=1: does it run?)
	$(BIN)/python -m benchmarks.mismatch $(if $(SHORT),--short) $(ARGS)

bench-async: setup  ## an agent whose tools take time, synchronously and not, three seeds -> benchmarks/results/async.json (SHORT=1: does it run?)
	$(BIN)/python -m benchmarks.asynchrony $(if $(SHORT),--short)

bench-runs: setup $(if $(SHORT),,sglang-cpu)  ## eight adapter runs on one engine and one trainer, and four on the real SGLang -> benchmarks/results/runs.json (ARGS="--engines embedded": a part; SHORT=1: does it run?)
	$(BIN)/python -m benchmarks.runs $(if $(SHORT),--short) $(ARGS)

bench-trainer: setup-dev  ## a training step packed, as trees and by TRL, per CPU-second -> benchmarks/results/trainer.json (SHORT=1: does it run?)
	$(BIN)/python -m benchmarks.trainer $(if $(SHORT),--short)

bench-publish: setup-dev  ## bytes, seconds and stall of a published version, 1M to 500M parameters -> benchmarks/results/publish.json (SHORT=1: does it run?)
	$(BIN)/python -m benchmarks.publish $(if $(SHORT),--short) $(ARGS)

bench-scale: setup-dev  ## costs of calls with 1 and 2 workers of a proxy on PostgreSQL, and what follows for 1, 10 and 100 proxies -> benchmarks/results/scale.json (SHORT=1: does it run?)
	$(BIN)/python -m benchmarks.scale $(if $(SHORT),--short)

bench-partitions: setup-dev  ## one table of turns beside one with a partition for each month, on PostgreSQL -> benchmarks/results/partitions.json (SHORT=1: does it run?)
	$(BIN)/python -m benchmarks.scale.partitions $(if $(SHORT),--short)

bench-gpu: $(if $(GPU_PYTHON),,setup-dev)  ## a training step on a CUDA device, in the shape of Qwen3-0.6B -> benchmarks/results/gpu.json (SHORT=1: does it run?)
	$(or $(GPU_PYTHON),$(BIN)/python) -m benchmarks.gpu $(if $(SHORT),--short)

bench-feedback: setup-dev  ## learning from words alone, from words of other sessions, and from numbers, three seeds -> benchmarks/results/feedback.json (SHORT=1: does it run?)
	$(BIN)/python -m benchmarks.feedback $(if $(SHORT),--short)

bench-gate: setup  ## bad versions refused or taken back, and good ones not, by drawn rewards on a real store and in real learning -> benchmarks/results/gate.json (SHORT=1: does it run?)
	$(BIN)/python -m benchmarks.gates $(if $(SHORT),--short)

chaos: setup-dev  ## kill -9 at random times, with two runs on two engines, a judge and its workers (needs redis-server), lying engines, a hostile client, a full disk, five connections, on both databases; and what is missing afterwards -> benchmarks/results/chaos.json (KILLS=seconds, DATABASE=sqlite; SHORT=1: half a minute each)
	$(BIN)/python -m benchmarks.chaos $(if $(KILLS),--seconds $(KILLS)) $(if $(DATABASE),--database $(DATABASE)) $(if $(SHORT),--short)

bench-jobs: setup-dev  ## 10,000 background jobs, workers killed every ten seconds, in-process and by Celery, and agents' calls while 1,000 judgements run -> benchmarks/results/jobs.json (needs redis-server; ARGS="--parts calls": a part; SHORT=1: does it run?)
	$(BIN)/python -m benchmarks.jobs $(if $(SHORT),--short) $(ARGS)

checkpoint: setup  ## make the demo's checkpoint anew (a few minutes)
	$(BIN)/python -m agents_examples.calculator.make_checkpoint

clean:  ## remove the environment and caches; keeps .base-rl
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache *.egg-info
