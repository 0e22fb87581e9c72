# Each target prepares what it needs: a bare machine with Python 3.11 or newer, git and make is enough.
#   make demo                                        train a drafter on the CPU and measure it
#   make real                                        the same for SmolLM2-135M-Instruct
#   make demo TORCH="torch==2.11.0 --index-url ..."  the same on another torch build (remembered in .venv)
#   make pytest PINS="transformers==5.16.0 ..."      other versions than constraints.txt has (remembered; PINS= ends it)
#   make help                                        every target in a line

SHELL := bash
PYTHON ?= $(firstword $(foreach p,python3.11 python3.12 python3.13 python3,$(shell \
	$(p) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $(p))))
TORCH ?= $(or $(shell cat .venv/.torch 2>/dev/null),torch==2.13.0)
PINS ?= $(shell cat .venv/.pins 2>/dev/null)
BIN := .venv/bin
WORKERS ?= 2

# one thread per process: two notebooks or tests run side by side
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false
# tests start hundreds of processes, and each would compile the package again
unexport PYTHONDONTWRITEBYTECODE

# pip says what it downloads and what fails, and nothing else
PIP := -m pip install --disable-pip-version-check --progress-bar off
QUIET := > >(grep --line-buffered -E '^ *Downloading .* MB\)|^Installing' | cut -c1-120) \
	2> >(grep --line-buffered -v -E '^WARNING: Location .* is ignored' >&2)
OFFLINE := HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1
# a file of tests stays on one worker, which makes its fixtures once; in the order of names the long files are not the last.
# One worker more than there are cores: tests wait for servers, for ranks, and for what they have killed to end
PYTEST = $(BIN)/python -m pytest -n $$(($(WORKERS) + 1)) --dist loadfile --no-loadscope-reorder --max-worker-restart 0

.PHONY: help demo real test quick lint types newest notebooks-test pytest nbdev2 lab docs browser-test browser-site browser-lab vllm-test proofs upstream-test \
	bench compare verifier answers corpus notebooks export format hooks env env-dev wheel release-check clean force
.DEFAULT_GOAL := help

help:  ## this list
	@grep -E '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

demo: .venv/.run  ## train a drafter for the shipped tiny verifier, measure it, write a report to output/demo
	$(OFFLINE) $(BIN)/speculators-nb demo

real: .venv/.real  ## train a drafter for SmolLM2-135M-Instruct (fetched, 93 MB) on its own answers, measure it, write a report to output/real; 22 minutes on two idle cores, continues where it stopped
	$(OFFLINE) env -u OMP_NUM_THREADS $(BIN)/speculators-nb real

test: beside pytest  ## everything that must hold: lint, types, notebooks, nbdev 2, pytest (sync included)

.PHONY: beside
beside: .venv/.dev .venv-nbdev2/.stamp  # the type checker, on one core, while notebooks run
	$(MAKE) $(if $(findstring -j,$(MAKEFLAGS)),,-j2) --no-print-directory lint types notebooks-test nbdev2

# one shell, so that the last step knows what is left of the three minutes
quick: .venv/.dev  ## lint, types, export in sync, tests of what changed since HEAD (BASE=main: since main); within three minutes
	@began=$$(date +%s); failed=; $(MAKE) -k --no-print-directory lint types || failed=yes; \
	$(OFFLINE) $(BIN)/python -m pytest tests/test_sync.py || failed=yes; \
	$(OFFLINE) $(BIN)/python tests/changed.py $(if $(BASE),--base '$(BASE)') --workers $(WORKERS) \
		--without tests/test_sync.py --seconds $$((170 - $$(date +%s) + began)) || failed=yes; \
	[ -z "$$failed" ]

lint: .venv/.dev  ## ruff: its rules, and the format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .

types: .venv/.dev  ## what the annotations say
	$(BIN)/python tests/typecheck.py

notebooks-test: .venv/.dev  ## every notebook in a kernel of its own, without slow cells: assertions hold, every stored figure is shown
	$(OFFLINE) $(BIN)/python tests/notebooks.py --workers $(WORKERS)

.PHONY: slow-notebooks
slow-notebooks: .venv/.dev  ## every notebook with its slow cells, those that train for minutes; half an hour
	$(OFFLINE) $(BIN)/python tests/notebooks.py --flags slow --workers $(WORKERS)

pytest: .venv/.dev  ## the tests alone
	$(OFFLINE) $(PYTEST) --durations=20

newest: .venv/.dev  ## pytest with the newest release of every requirement, our upper bounds lifted; says what will break
	rm -f .venv/.run  # the next make installs the tested versions again
	$(BIN)/python -c 'import importlib.metadata as m; print("torch==" + m.version("torch"))' > .venv/.constraints
	$(BIN)/python $(PIP) --upgrade --upgrade-strategy eager -c .venv/.constraints $$($(BIN)/python .ci/pins.py --newest)
	$(OFFLINE) $(PYTEST)

nbdev2: .venv/.dev .venv-nbdev2/.stamp  ## nbdev 2.4 exports the same bytes from settings.ini
	NBDEV2_BIN=.venv-nbdev2/bin $(BIN)/python -m pytest tests/nbdev2.py

lab: .venv/.dev  ## JupyterLab on the notebooks
	$(BIN)/jupyter lab nbs $(if $(filter 0,$(shell id -u)),--allow-root)

docs: .venv/.dev  ## the site, from the stored outputs, into docs/_site
	$(BIN)/python docs/build.py

browser-test: browser-site browser-lab  ## the site, and sessions in Lab, in a headless browser

browser-site: docs chromium
	$(BIN)/python tests/browser/links.py docs/_site
	$(BIN)/python tests/browser/site_smoke.py docs/_site
	$(OFFLINE) $(BIN)/python tests/browser/widgets.py docs/_site

browser-lab: .venv/.dev chromium
	$(OFFLINE) $(BIN)/python tests/browser/lab_smoke.py
	$(OFFLINE) $(BIN)/python tests/browser/lab_stop.py
	$(OFFLINE) $(BIN)/python tests/browser/report.py
	$(OFFLINE) $(BIN)/python tests/browser/lab_widgets.py

.PHONY: chromium
chromium:
	@command -v chromium >/dev/null || { [ "$$(id -u)" = 0 ] && apt-get -qq update && \
		DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends chromium >/dev/null; } || \
		{ echo "browser-test needs /usr/bin/chromium: install Debian's package 'chromium' and try again" >&2; exit 1; }

.PHONY: vllm pipeline-test
vllm: .venv/.run  ## the real vLLM for processors in .venv-vllm (3.4 GB); `speculators-nb serve --run` finds it there
	$(BIN)/python -c 'import sys; sys.path.insert(0, "tests/vllm"); import check_vllm; check_vllm.install()'

pipeline-test: vllm  ## chats to a drafter served by the real vLLM, by commands alone; `make vllm-all` kills each stage once
	$(OFFLINE) $(BIN)/python tests/vllm/check_pipeline.py --no-kills

vllm-test: vllm  ## checkpoints of ours in the real vLLM on the CPU, token for token (its own environment, 3.4 GB)
	$(MAKE) $(if $(findstring -j,$(MAKEFLAGS)),,-j2 --output-sync=target) --no-print-directory vllm-drafters vllm-servers

# vLLM computes on one core and waits for its servers: two processes share two cores. `make -j2 vllm-test pipeline-test`
# has three parts for them
.PHONY: vllm-drafters vllm-servers
vllm-drafters:
	$(OFFLINE) $(BIN)/python tests/vllm/check_vllm.py
	$(OFFLINE) $(BIN)/python tests/vllm/check_mtp_families.py

vllm-servers:
	$(OFFLINE) $(BIN)/python tests/vllm/check_engine.py --only eagle3
	$(OFFLINE) .venv-vllm/bin/python tests/vllm/check_speculative_config.py
	$(OFFLINE) .venv-vllm/bin/python tests/vllm/check_dflash2.py
	$(OFFLINE) .venv-vllm/bin/python tests/vllm/check_lilicorr.py
	$(OFFLINE) .venv-vllm/bin/python tests/vllm/check_fp8.py

.PHONY: vllm-all
vllm-all: vllm  ## what `make vllm-test` and `make pipeline-test` leave out: all variants, suffix decoding, Medusa and n-gram lookup in a server, answers and hidden states of one, MTP heads of every family, kills of each stage
	$(OFFLINE) $(BIN)/python tests/vllm/check_vllm.py --all
	$(OFFLINE) $(BIN)/python tests/vllm/check_engine.py
	$(OFFLINE) $(BIN)/python tests/vllm/check_pipeline.py
	$(OFFLINE) $(BIN)/python tests/vllm/check_regenerate.py
	$(OFFLINE) $(BIN)/python tests/vllm/check_features.py
	$(OFFLINE) $(BIN)/python tests/vllm/check_mtp_families.py --all
	$(OFFLINE) .venv-vllm/bin/python tests/vllm/check_speculative_config.py --wheel 0.33.0
	$(OFFLINE) .venv-vllm/bin/python tests/vllm/check_xpress.py

upstream-test: .venv/.run  ## checkpoints of ours in speculators 0.9.0 and its in ours: the same loss (its own environment, 1.7 GB)
	$(OFFLINE) $(BIN)/python tests/parity/check_upstream.py
	$(OFFLINE) $(BIN)/python tests/parity/check_prepared.py
	$(OFFLINE) $(BIN)/python tests/parity/check_converters.py
	$(OFFLINE) $(BIN)/python tests/parity/check_features.py

proofs: .venv/.dev  ## sampled texts by chi-square, greedy texts token for token: hours; goes on where it stopped (AGAIN=yes: anew)
	$(OFFLINE) $(BIN)/python $(if $(AGAIN),.ci/proofs.py --seed $(SEED) --minutes $(MINUTES),tests/proofs/run.py) $(PART)

.PHONY: nightly
nightly: .venv/.dev slow-notebooks bad-input planted doctor laptop real shared-jobs ray-test scale ranks distributed upstream-test vllm-all loggers-test nightly-pytest slurm-test skypilot-test mooncake-test llama-cpp-test proofs  ## what takes longer than CI may: the slow cells of notebooks, random bad input, planted faults, the doctor on spoilt drafters, the laptop recipe killed three times, a drafter for a language model, kills of shared jobs, Ray, memory at 300,000 conversations, training on ranks and through kills, sharded training on four ranks and through kills, upstream's checkpoints both ways, more of vLLM, loggers read back, the tests that CI leaves out, the page "On a cluster" under Slurm and as SkyPilot reads it, hidden states through a Mooncake store, drafters in llama.cpp, the proofs (hours; they continue where they stopped)

.PHONY: real-test
real-test: .venv/.dev  ## the commands of `make real` on the language model itself (fetched, 93 MB), in their smallest form; three minutes
	$(OFFLINE) $(BIN)/python tests/real/check_real.py

.PHONY: loggers-test
loggers-test: .venv/.dev  ## TensorBoard, W&B offline, MLflow and trackio: each writes a run and is read back (its own environment, 0.7 GB)
	$(OFFLINE) $(BIN)/python tests/loggers/check_loggers.py

.PHONY: shared-jobs ray-test
shared-jobs: .venv/.dev  ## kill -9 at random moments of one and of two processes that share regenerate or features; the output is the same
	$(OFFLINE) $(BIN)/python tests/jobs/run.py

ray-test: .venv/.dev  ## 200 rows on a Ray cluster of two nodes on this machine, a worker killed on the way (its own environment, 0.3 GB)
	$(OFFLINE) $(BIN)/python tests/jobs/check_ray.py

.PHONY: nightly-pytest
nightly-pytest: .venv/.dev  ## the tests that CI leaves out: what the marker `nightly` names
	$(OFFLINE) $(PYTEST) -m nightly --timeout 1800 -o faulthandler_timeout=1860 --durations=20

.PHONY: mooncake-test
mooncake-test: vllm .venv/.dev  ## hidden states through a real Mooncake store on loopback, from a stand-in and from the real vLLM (its packages apart, 0.15 GB); five minutes
	$(OFFLINE) $(BIN)/python tests/mooncake/check_mooncake.py

.PHONY: llama-cpp-test
llama-cpp-test: .venv/.dev  ## drafters in the real llama.cpp: texts, accepted tokens, and the files of its own converter (built from the source in a package, ten minutes the first time)
	$(OFFLINE) $(BIN)/python tests/llama_cpp/check_llama_cpp.py

.PHONY: slurm-test skypilot-test
slurm-test: .venv/.dev  ## the Slurm lines of the page "On a cluster" on two nodes of a Slurm on loopback (Debian's packages, installed as root); minutes
	$(OFFLINE) $(BIN)/python tests/cluster/check_slurm.py

skypilot-test: .venv/.dev  ## the SkyPilot file of the page "On a cluster", read by SkyPilot (its own environment, 0.5 GB)
	$(OFFLINE) $(BIN)/python tests/cluster/check_skypilot.py

.PHONY: doctor
doctor: .venv/.dev  ## drafters spoilt on purpose, one fault each: trained, and what the doctor names first; half an hour
	$(OFFLINE) PYTHONPATH="$(CURDIR)" $(BIN)/python tests/doctor/run.py output/doctor

.PHONY: ranks scale
scale: .venv/.dev  ## memory and time of prepare at 300,000 conversations, and of a feature folder of 100,000 rows; half an hour
	$(OFFLINE) $(BIN)/python tests/scale/run.py

ranks: .venv/.dev  ## training on 1, 2 and 4 ranks: every drafter equal, resumed on others, killed at 40 random moments; half an hour
	$(OFFLINE) $(BIN)/python tests/ranks/run.py

.PHONY: planted
planted: .venv/.dev  ## fifty faults, put into the package one at a time: a test notices each (tests/planted.md); a quarter of an hour
	$(OFFLINE) $(BIN)/python tests/planted.py --all

.PHONY: bad-input
SEED ?= $(shell date +%Y%m%d)
BAD_SEED ?= $(SEED)
MINUTES ?= 300
bad-input: .venv/.dev  ## 300 random bad inputs, from BAD_SEED (today's date); says where an answer is wrong
	cd tests && $(OFFLINE) PYTHONPATH="$(CURDIR)" ../$(BIN)/python -m bad.draw --seed $(BAD_SEED) --n 300

bench: .venv/.dev  ## every measurement in benchmarks/, results beside each; peers get environments of their own
	for f in $(filter-out benchmarks/gpu/run.py benchmarks/real/run.py,$(wildcard benchmarks/*/run.py)); do echo "== $$f"; $(BIN)/python "$$f" || exit; done

.PHONY: gpu gpu-bundle gpu-toy
# the machine with the device has its own torch; no environment is made there and nothing is installed
GPU_PYTHON ?= python3
gpu:  ## on a machine with an NVIDIA device: what single changes are worth, a train step beside upstream's, what agrees; ONLY='ab*,step MTP*' for some cells; nine minutes, no network
	$(GPU_PYTHON) benchmarks/gpu/run.py $(if $(OUT),--out "$(OUT)") $(if $(ONLY),--only "$(ONLY)")

gpu-bundle: .venv/.run  ## where there is a network: the wheels that `make gpu` needs beside torch and transformers, into output/gpu-bundle, and the size of what must travel
	$(BIN)/python benchmarks/gpu/bundle.py fetch

gpu-toy: .venv/.run  ## `make gpu` at toy sizes on the CPU
	$(BIN)/python benchmarks/gpu/run.py --toy

compare: .venv/.dev  ## every family of drafters on one training budget; results in benchmarks/drafters/results
	$(OFFLINE) $(BIN)/python benchmarks/drafters/run.py

corpus: .venv/.run  ## write data/corpus again (the same bytes)
	$(BIN)/python data/make/corpus.py

verifier: .venv/.run  ## train data/tiny-verifier again
	$(OFFLINE) $(BIN)/python data/make/tiny_verifier.py

answers: .venv/.run  ## write data/answers again: what the verifier says to the training prompts
	$(OFFLINE) $(BIN)/python data/make/answers.py

notebooks: .venv/.dev  ## run every notebook as notebooks-test does, store its outputs, README
	$(OFFLINE) $(BIN)/python tests/notebooks.py --save --flags slow --workers $(WORKERS)
	$(BIN)/python docs/readme.py

export: .venv/.dev  ## notebooks to package, names of the drafters to their stub, README from nbs/index.ipynb
	$(BIN)/nbdev-export
	$(BIN)/nbdev-clean
	$(BIN)/python docs/stubs.py
	$(BIN)/python docs/readme.py

format: .venv/.dev  ## mend what ruff can mend, format, clean the notebooks, export
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(MAKE) export

hooks: .venv/.dev  ## git hooks of this clone: notebook-aware merge and diff, and what a commit must pass (pre-commit)
	$(BIN)/nbdev-install-hooks
	@if [ -x $(BIN)/pre-commit ]; then $(BIN)/pre-commit install; \
		else echo "no pre-commit in .venv: commits are not checked"; fi

wheel: .venv/.dev  ## the wheel of this tree, in dist/; the same commit gives the same bytes
	$(BIN)/python .ci/release.py build

release-check: wheel  ## dist/ against docs/release.md: versions, changelog, content, installation (TAG=v0.2.0: the tag too)
	$(BIN)/python .ci/release.py check $(if $(TAG),--tag '$(TAG)')

env: .venv/.run  ## only the environment that the demo needs
env-dev: .venv/.dev  ## the environment for tests, Lab and docs

.venv/bin/python:
	@[ -n "$(PYTHON)" ] || { echo "No Python 3.11 or newer found; say which with: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo "== environment in .venv ($(shell $(PYTHON) --version 2>&1))"
	@$(PYTHON) -m venv .venv || { rm -rf .venv; exit 1; }

# torch first and alone: its own index need not carry the pinned versions of the rest
.venv/.run: constraints.txt pyproject.toml | .venv/bin/python
	@echo "== installing $(TORCH) and the runtime requirements$(if $(PINS), with $(PINS))"
	@$(BIN)/python .ci/pins.py $(foreach w,$(PINS),'$(w)') > .venv/.constraints
	@$(BIN)/python $(PIP) $(foreach w,$(TORCH),'$(w)') $(QUIET)
	@PYTHONWARNINGS=ignore $(BIN)/python $(PIP) -c .venv/.constraints -e . $(QUIET)
	@echo "$(TORCH)" > .venv/.torch && echo "$(PINS)" > .venv/.pins && touch $@

ifneq ($(TORCH),$(shell cat .venv/.torch 2>/dev/null))
.venv/.run: force
endif
ifneq ($(strip $(PINS)),$(shell cat .venv/.pins 2>/dev/null))
.venv/.run: force
endif

.venv/.dev: .venv/.run
	@echo "== installing the requirements of tests, Lab and docs"
	@PYTHONWARNINGS=ignore $(BIN)/python $(PIP) -c .venv/.constraints -e ".[dev,docs]" $(QUIET)
	@touch $@

.venv/.real: .venv/.run
	@PYTHONWARNINGS=ignore $(BIN)/python $(PIP) -c .venv/.constraints -e ".[gguf]" $(QUIET)
	@touch $@

# nbdev 2.4.14 runs with these two bounds only, and never beside nbdev 3
.venv-nbdev2/.stamp:
	@echo "== environment in .venv-nbdev2"
	@$(PYTHON) -m venv --clear .venv-nbdev2
	@.venv-nbdev2/bin/python $(PIP) "nbdev==2.4.14" "execnb<0.2" "fastcore<2" $(QUIET)
	@touch $@

clean:  ## remove what can be built again (not the environments)
	rm -rf _proc _docs _site build dist output docs/_src docs/_site docs/jupyter_execute .pytest_cache .ruff_cache .hypothesis *.egg-info
	find nbs speculators_nb tests docs benchmarks -name __pycache__ -prune -exec rm -rf {} +

.PHONY: laptop
laptop: .venv/.dev  ## the laptop recipe whole, timed, and again with three kills: the same report; ten minutes
	$(OFFLINE) PYTHONPATH="$(CURDIR)" $(BIN)/python tests/laptop/run.py output/laptop_runs

.PHONY: distributed
distributed: .venv/.dev  ## sharded training: every drafter on four ranks, resumes on fewer, ranks killed at random; twenty minutes
	$(OFFLINE) PYTHONPATH="$(CURDIR)" $(BIN)/python tests/distributed/run.py output/distributed
