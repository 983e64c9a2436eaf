# `make` lists what there is. VENV=<folder> uses another virtual environment, PYTHON=<command>
# another Python, KEEP=1 leaves the demo running.

VENV ?= .venv
PYTHON ?= python3
BIN = $(abspath $(VENV))/bin
RAW = <<cookiecutter.service_name>>
STACK = $(BIN)/python '$(RAW)/dev/stack.py'

# Tests mostly wait, so more of them run at once than there are processors.
WORKERS ?= 6
ENGINE = $(BIN)/python -m pytest -o cache_dir='$(CURDIR)/build/pytest-raw' --ignore='tests/<<cookiecutter.package_name>>'
TEMPLATE = $(BIN)/python -m pytest -o cache_dir='$(CURDIR)/build/pytest-template'
SIDE_BY_SIDE = --no-print-directory --keep-going --jobs=2 $(if $(CI),--output-sync)

PIN = $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
    --no-annotate --no-emit-index-url --custom-compile-command "make requirements" $(UPGRADE)

# Named after what the environment holds, so that nothing is installed twice. The second says it
# to the Makefile of a generated service, whose requirements are a part of ours.
INSTALLED = $(VENV)/.holds-$(shell cksum < requirements.txt | cut -d ' ' -f 1)
HOLDS_RAW = $(VENV)/.installed-$(shell cksum < '$(RAW)/requirements/dev.txt' | cut -d ' ' -f 1)

# Nothing but source may lie in the raw tree: cookiecutter copies what it finds.
export PYTHONPYCACHEPREFIX := $(CURDIR)/build/pycache
# Tests start hundreds of processes, each three times as quickly from bytecode.
unexport PYTHONDONTWRITEBYTECODE
export RUFF_CACHE_DIR := $(CURDIR)/build/ruff
export MYPY_CACHE_DIR := $(CURDIR)/build/mypy
export HYPOTHESIS_STORAGE_DIRECTORY := $(CURDIR)/build/hypothesis

.DEFAULT_GOAL := help
.PHONY: help setup up down demo chaos chaos-selftest bench model docs test-unit test test-full canary
.PHONY: test-engine test-template test-engine-full test-template-full
.PHONY: check check-raw format requirements clean

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' Makefile

setup: $(INSTALLED) ## install everything into the virtual environment

up: $(INSTALLED) ## start PostgreSQL and Kafka and wait until they serve
	@$(STACK) up

down: $(INSTALLED) ## stop them
	@$(STACK) down
	@test ! -d build/demo || $(BIN)/python -m demo.run --stop
	@test ! -d build/chaos || $(BIN)/python -m chaos.run --stop
	@test ! -d build/bench || $(BIN)/python -m benchmarks.run --stop

demo: $(INSTALLED) ## bake a service, send it 100,000 scans, kill it twice, check what came out
	@exec $(BIN)/python -m demo.run $(if $(KEEP),--keep)

# EVENTS=200000 SECONDS=600 SEED=1 POISON=0.01 FAULTS=<all kinds, separated by commas>, unless said
# otherwise.
# REPLAY=<report.json> runs the round of a report again.
chaos: $(INSTALLED) ## feed a service, break everything around it on a schedule, check the ledger
	@exec $(BIN)/python -m chaos.run $(addprefix --events=,$(EVENTS)) \
	    $(addprefix --seconds=,$(SECONDS)) $(addprefix --seed=,$(SEED)) \
	    $(addprefix --poison=,$(POISON)) $(addprefix --faults=,$(FAULTS)) \
	    $(addprefix --replay=,$(REPLAY))

chaos-selftest: $(INSTALLED) ## break the engine on purpose: the same check must catch it
	@exec $(BIN)/python -m chaos.selftest

# EVENTS=200000 ROUNDS=3 MINUTES=10 ONLY=<all measures, separated by commas>, unless said otherwise.
# KEEP_PLOTS=1 puts what was measured into docs/performance; everything must be committed.
bench: $(INSTALLED) ## measure the service beside what else one could have written
	@exec $(BIN)/python -m benchmarks.run $(addprefix --events=,$(EVENTS)) \
	    $(addprefix --rounds=,$(ROUNDS)) $(addprefix --minutes=,$(MINUTES)) \
	    $(addprefix --only=,$(ONLY)) $(if $(KEEP_PLOTS),--keep-plots)

model: $(INSTALLED) ## search the protocol exhaustively, in small bounds, as it is and with faults
	@$(BIN)/python -m tests.programs spin gcc
	@$(BIN)/python -m model.check

docs: $(INSTALLED) ## build the site of the documentation into build/site, and check its links
	@$(BIN)/python -m website.build

test-unit: $(INSTALLED) ## the tests that need no server
	@cd '$(RAW)' && $(ENGINE) --numprocesses=2 -m 'not integration and not full'
	@$(TEMPLATE) --numprocesses=2 -m 'not integration and not full and not slow'

test: check ## what a contributor needs to trust a change, real servers included
	@$(BIN)/python -m tests.programs test
	@$(STACK) run -- $(MAKE) $(SIDE_BY_SIDE) test-engine test-template

test-full: $(INSTALLED) ## everything else: crashes, outages, plans, TLS, pooler, every variant; half an hour
	@$(BIN)/python -m tests.programs test-full
	@$(STACK) run -- $(MAKE) $(SIDE_BY_SIDE) test-engine-full test-template-full

# The bound is lifted and the pins are made again, so that generated services are tested with it, too.
NEWEST ?= aiokafka
CANARY = $(MAKE) --no-print-directory --directory=build/canary VENV=.venv
canary: ## what `make test` runs, with the newest release of NEWEST=aiokafka, in a clone of what is committed
	@rm -rf build/canary && git clone --quiet . build/canary
	@cd 'build/canary/$(RAW)/requirements' && sed -i.old -E 's/^($(NEWEST)(\[.*\])?)>=[^ ;]+/\1/' base.in && rm base.in.old
	@$(CANARY) requirements UPGRADE='--upgrade-package $(NEWEST)'
	@grep -E '^$(NEWEST)(\[.*\])?==' 'build/canary/$(RAW)/requirements/base.txt'
	@$(CANARY) test

# The engine's own tests, in the raw tree; a baked service runs the contract suite.
test-engine: $(INSTALLED)
	@cd '$(RAW)' && $(ENGINE) --numprocesses=$(WORKERS) --ignore=tests/contract

# The worlds of the crash matrix run side by side by themselves, and hold transactions open, for
# whose end other tests would wait. A second time behind PgBouncer go those that it could change:
# see BEHIND_A_POOLER.
MATRIX = tests/pipeline/integration/test_crash_matrix.py
test-engine-full: $(INSTALLED)
	@cd '$(RAW)' && $(ENGINE) -m full $(MATRIX)
	@cd '$(RAW)' && $(ENGINE) --numprocesses=$(WORKERS) -m full --ignore=$(MATRIX)
	@cd '$(RAW)' && TEST_POOLER=1 $(ENGINE) --numprocesses=$(WORKERS) -m pooler

# The template's tests, which bake services and let those test themselves.
test-template: $(INSTALLED)
	@$(TEMPLATE) --numprocesses=2

test-template-full: $(INSTALLED)
	@$(TEMPLATE) --numprocesses=2 -m full

check: $(INSTALLED) check-raw ## lint, formatting, types, direction of imports: raw tree and template
	@$(BIN)/mypy

# Folders named after questions need care: ruff gets the template's configuration, not the one that lies
# nearest; mypy and import-linter see the package as `unbaked`, and pytest and mypy leave its tests out.
RUFF = $(BIN)/ruff --config pyproject.toml
check-raw: $(INSTALLED)
	@$(RUFF) check .
	@$(RUFF) format --check .
	@$(BIN)/python '$(RAW)/dev/alert_rules.py' --check
	@rm -rf build/raw && mkdir -p build/raw
	@ln -s '$(CURDIR)/$(RAW)/src/<<cookiecutter.package_name>>' build/raw/unbaked
	@sed 's/<<cookiecutter.package_name>>/unbaked/g' '$(RAW)/pyproject.toml' > build/raw/pyproject.toml
	@cd '$(RAW)' && $(BIN)/mypy --exclude '(src|tests)/[<]' && MYPYPATH='$(CURDIR)/build/raw' $(BIN)/mypy -p unbaked
	@cd build/raw && PYTHONPATH='.:$(CURDIR)/$(RAW)/src' $(BIN)/lint-imports --cache-dir ../import-linter

format: $(INSTALLED) ## format the code and mend what the linter can
	@$(RUFF) check --fix .
	@$(RUFF) format .

requirements: $(INSTALLED) ## pin again what the .in files ask for (UPGRADE=--upgrade: the newest)
	@cd '$(RAW)' && $(PIN) requirements/base.in --output-file requirements/base.txt
	@cd '$(RAW)' && $(PIN) requirements/dev.in --output-file requirements/dev.txt \
	    --constraint requirements/base.txt
	@$(PIN) requirements.in --output-file requirements.txt --constraint '$(RAW)/requirements/dev.txt'

clean: ## delete everything that was made here, the servers' data too
	@test ! -x $(BIN)/python || $(MAKE) --no-print-directory down
	@test ! -x $(BIN)/python || $(STACK) down --purge
	@rm -rf .venv .stack .*_cache build
	@find . -name __pycache__ -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "This needs Python 3.11 or newer: make PYTHON=<command of one> ..." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)

$(INSTALLED): | $(BIN)/python
	@echo "Installing what requirements.txt pins into $(VENV)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.txt
	@rm -f $(VENV)/.holds-* $(VENV)/.installed-*
	@touch $@ $(HOLDS_RAW)
