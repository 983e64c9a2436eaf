# `make` lists the commands. VENV=<folder> uses another virtual environment, PYTHON=<command> another
# Python, KEEP=1 leaves the demo running.

# PATH, shells and .ini files would not take these characters literally.
UNUSABLE := $(strip $(foreach each,: $$ % " \ `,$(findstring $(each),$(CURDIR))))
ifdef UNUSABLE
$(error No command runs in a folder whose path has one of : $$ % " \ and `, which tools give another meaning: rename or move $(CURDIR))
endif

VENV ?= .venv
PYTHON ?= python3
BIN = $(abspath $(VENV))/bin
RAW = <<cookiecutter.service_name>>
STACK = $(BIN)/python '$(RAW)/dev/stack.py'

# Tests mostly wait, so more of them run in parallel than there are processors.
WORKERS ?= 6
ENGINE = $(BIN)/python -m pytest -o cache_dir='$(CURDIR)/build/pytest-raw' --ignore='tests/<<cookiecutter.package_name>>'
TEMPLATE = $(BIN)/python -m pytest -o cache_dir='$(CURDIR)/build/pytest-template'
SIDE_BY_SIDE = --no-print-directory --keep-going --jobs=2 $(if $(CI),--output-sync)

PIN = $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
    --no-annotate --no-emit-index-url --custom-compile-command "make requirements" $(UPGRADE)

# Files in the environment, named after the hash of what was installed, so that nothing is repeated.
# The second is for the Makefile of a generated service, whose requirements are a part of these.
INSTALLED = $(VENV)/.holds-$(shell cksum < requirements.txt | cut -d ' ' -f 1)
HOLDS_RAW = $(VENV)/.installed-$(shell cksum < '$(RAW)/requirements/dev.txt' | cut -d ' ' -f 1)

# A dot for each package that pip gets; its exit code.
DOTS = while read -r what code; do case $$what in Collecting|Installing) printf .;; \
    ended) echo; exit $$code;; esac; done

# The raw tree must have source files only: cookiecutter copies all files in it.
export PYTHONPYCACHEPREFIX := $(CURDIR)/build/pycache
# uv trusts the certificate authorities of the system, such as that of a company's proxy.
export UV_SYSTEM_CERTS ?= true
# Tests start hundreds of processes, each three times as fast with bytecode.
unexport PYTHONDONTWRITEBYTECODE
export RUFF_CACHE_DIR := $(CURDIR)/build/ruff
export MYPY_CACHE_DIR := $(CURDIR)/build/mypy
export HYPOTHESIS_STORAGE_DIRECTORY := $(CURDIR)/build/hypothesis

.DEFAULT_GOAL := help
.PHONY: help setup up down demo chaos chaos-selftest bench instructions model docs test-unit test test-full
.PHONY: test-docker canary release wheel pin-image
.PHONY: announce-test test-engine test-template test-engine-full test-template-full
.PHONY: check check-raw format requirements clean

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' Makefile

setup: $(INSTALLED) ## install everything into the virtual environment

up: $(INSTALLED) ## start PostgreSQL and Kafka and wait until they serve
	@$(STACK) up

ONE = $(if $(filter command line,$(origin SERVER)),$(SERVER))
down: $(INSTALLED) ## stop PostgreSQL, Kafka, a demo, chaos or benchmark run (SERVER=kafka or postgres: only one)
	@$(STACK) down $(ONE)
ifeq ($(ONE),)
	@test ! -d build/demo || $(BIN)/python -m demo.run --stop
	@test ! -d build/chaos || $(BIN)/python -m chaos.run --stop
	@test ! -d build/bench || $(BIN)/python -m benchmarks.run --stop
endif

demo: $(INSTALLED) ## bake a service, send it 100,000 scans, kill it twice, check the result
	@exec $(BIN)/python -m demo.run $(if $(KEEP),--keep)

# Defaults: EVENTS=200000 SECONDS=600 SEED=1 POISON=0.01 PAYMENTS=0.1 FAULTS=<all kinds, separated by commas>;
# with FAULTS= there are none, which gives the rate to compare others with.
# REPLAY=<report.json> repeats the round of a report.
chaos: $(INSTALLED) ## run a service under faults on a schedule, check its results
	@exec $(BIN)/python -m chaos.run $(addprefix --events=,$(EVENTS)) \
	    $(addprefix --seconds=,$(SECONDS)) $(addprefix --seed=,$(SEED)) \
	    $(addprefix --poison=,$(POISON)) $(addprefix --payments=,$(PAYMENTS)) \
	    $(if $(filter-out undefined,$(origin FAULTS)),--faults=$(FAULTS)) \
	    $(addprefix --replay=,$(REPLAY))

chaos-selftest: $(INSTALLED) ## check that the chaos run finds deliberate errors in the engine
	@exec $(BIN)/python -m chaos.selftest

# Defaults: EVENTS=200000 ROUNDS=3 MINUTES=10 ONLY=<all measures, separated by commas>.
# KEEP_PLOTS=1 writes the results to docs/performance; the working tree must be clean. PYTHON=<command>
# runs what is measured; by default the first Python found that was built with optimisation.
bench: $(INSTALLED) ## measure the service and alternative implementations
	@exec $(BIN)/python -m benchmarks.run $(addprefix --events=,$(EVENTS)) \
	    $(addprefix --rounds=,$(ROUNDS)) $(addprefix --minutes=,$(MINUTES)) \
	    $(addprefix --only=,$(ONLY)) $(if $(KEEP_PLOTS),--keep-plots) \
	    $(if $(filter-out file,$(origin PYTHON)),--python='$(PYTHON)')

# RENEW=1 writes them to benchmarks/instructions.json and docs/measures.md.
instructions: $(INSTALLED) ## count the instructions of a message, and compare with the recorded ones (3 minutes)
	@$(BIN)/python -m tests.programs valgrind
	@exec $(BIN)/python -m benchmarks.instructions $(if $(RENEW),--renew)

model: $(INSTALLED) ## check the protocol's model exhaustively within small bounds, also with faults
	@$(BIN)/python -m tests.programs spin gcc
	@$(BIN)/python -m model.check

# REPOSITORY=<URL> adds a link to the repository.
docs: $(INSTALLED) ## build the documentation's site in build/site, and check its links
	@$(BIN)/python -m website.build $(addprefix --repository=,$(REPOSITORY))

test-unit: $(INSTALLED) ## run the tests that need no server
	@cd '$(RAW)' && $(ENGINE) --numprocesses=2 -m 'not integration and not full'
	@$(TEMPLATE) --numprocesses=2 -m 'not integration and not full and not slow'

test: announce-test check ## check, and run the tests for a change, with real servers (10 minutes)
	@$(BIN)/python -m tests.programs test
	@echo "make test: now the tests of the engine and, side by side, those of the template, a new service and a demo"
	@$(STACK) run -- $(MAKE) $(SIDE_BY_SIDE) test-engine test-template
	@echo "make test: all passed"

announce-test:
	@echo "make test: checks the code, then runs the tests with PostgreSQL and Kafka, which it starts itself."
	@echo "make test: about 10 minutes on 2 idle cores, longer on a busy machine; the first time it also installs them"

test-full: $(INSTALLED) ## run the other tests: crashes, outages, plans, TLS, pooler, all variants (an hour)
	@$(BIN)/python -m tests.programs test-full
	@$(STACK) run -- $(MAKE) $(SIDE_BY_SIDE) test-engine-full test-template-full

test-docker: $(INSTALLED) ## run the tests that need a Docker engine: image, Compose, development stack
	@docker info > /dev/null && docker compose version > /dev/null || { \
	    echo "make test-docker needs a Docker engine that runs, and Docker Compose" >&2; exit 1; }
	@$(TEMPLATE) -m docker

# Removes the upper bound and pins again, so that generated services are tested with it, too.
NEWEST ?= aiokafka
CANARY = $(MAKE) --no-print-directory --directory=build/canary VENV=.venv
canary: ## run `make test` with the newest release of NEWEST=aiokafka, in a clone of HEAD
	@rm -rf build/canary && git clone --quiet . build/canary
	@cd 'build/canary/$(RAW)/requirements' && sed -i.old -E 's/^($(NEWEST)(\[.*\])?)>=[^ ;]+/\1/' base.in && rm base.in.old
	@$(CANARY) requirements UPGRADE='--upgrade-package $(NEWEST)'
	@grep -E '^$(NEWEST)(\[.*\])?==' 'build/canary/$(RAW)/requirements/base.txt'
	@$(CANARY) test

# The engine's own tests, in the raw tree; a baked service runs the contract suite.
test-engine: $(INSTALLED)
	@cd '$(RAW)' && $(ENGINE) --numprocesses=$(WORKERS) --ignore=tests/contract

# The crash matrix runs alone: it runs its cases in parallel, and holds transactions open that other
# tests would wait for. Tests that PgBouncer may affect run a second time behind it: see
# BEHIND_A_POOLER.
MATRIX = tests/onceward/integration/test_crash_matrix.py
test-engine-full: $(INSTALLED)
	@cd '$(RAW)' || exit; status=0; \
	    $(ENGINE) -m full $(MATRIX) || status=1; \
	    $(ENGINE) --numprocesses=$(WORKERS) -m full --ignore=$(MATRIX) || status=1; \
	    TEST_POOLER=1 $(ENGINE) --numprocesses=$(WORKERS) -m pooler || status=1; \
	    exit $$status

# The template's tests, which bake services and run the tests of these.
test-template: $(INSTALLED)
	@$(TEMPLATE) --numprocesses=2

test-template-full: $(INSTALLED)
	@$(TEMPLATE) --numprocesses=3 -m full

check: $(INSTALLED) check-raw ## check lint rules, formatting, words, types and the direction of imports
	@$(BIN)/mypy

# Folders with names of questions need options: ruff gets the template's configuration, not the nearest
# one; mypy and import-linter check the package as `unbaked`; pytest and mypy leave its tests out.
# Both worked examples are in one file there, and each opens its resources.
RUFF = $(BIN)/ruff --config pyproject.toml
check-raw: $(INSTALLED)
	@$(RUFF) check .
	@$(RUFF) format --check .
	@$(BIN)/python '$(RAW)/dev/alert_rules.py' --check
	@$(BIN)/python -m tests.language README.md AGENTS.md SECURITY.md docs '$(RAW)/docs' '$(RAW)'/*.md
	@rm -rf build/raw && mkdir -p build/raw
	@ln -s '$(CURDIR)/$(RAW)/src/<<cookiecutter.package_name>>' build/raw/unbaked
	@sed 's/<<cookiecutter.package_name>>/unbaked/g' '$(RAW)/pyproject.toml' > build/raw/pyproject.toml
	@cd '$(RAW)' && $(BIN)/mypy --exclude '(src|tests)/[<]' && MYPYPATH='$(CURDIR)/build/raw' $(BIN)/mypy --disable-error-code no-redef -p unbaked
	@cd build/raw && PYTHONPATH='.:$(CURDIR)/$(RAW)/src' $(BIN)/lint-imports --no-logo --cache-dir ../import-linter

format: $(INSTALLED) ## format the code and apply the linter's fixes
	@$(RUFF) check --fix --exit-zero --quiet .
	@$(RUFF) format .

release: $(INSTALLED) ## commit and tag the version that CHANGELOG.md begins with: see docs/contributing.md
	@$(STACK) run --postgres -- $(BIN)/python -m tests.release

wheel: $(BIN)/python ## build the engine as a wheel, and its SBOM, in build/wheel
	@$(BIN)/python engine_wheel.py build/wheel

requirements: $(INSTALLED) ## pin the packages of the .in files (UPGRADE=--upgrade: newest versions)
	@cd '$(RAW)' && $(PIN) requirements/base.in --output-file requirements/base.txt
	@cd '$(RAW)' && $(PIN) requirements/dev.in --output-file requirements/dev.txt \
	    --constraint requirements/base.txt
	@$(PIN) requirements.in --output-file requirements.txt --constraint '$(RAW)/requirements/dev.txt'
	@$(MAKE) --no-print-directory setup  # the packages that are pinned now
	@$(BIN)/python -m tests.imports

pin-image: ## pin the base of the image of services by the digest that its tag has now (with Docker)
	@$(MAKE) --no-print-directory --directory='$(RAW)' pin-image

clean: ## delete all generated files, including the servers' data
	@test ! -x $(BIN)/python || $(MAKE) --no-print-directory down
	@test ! -x $(BIN)/python || $(STACK) down --purge
	@rm -rf .venv .stack .*_cache build
	@find . -name __pycache__ -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "Python 3.11 or newer is required: make PYTHON=<its command> ..." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)

$(INSTALLED): | $(BIN)/python
	@printf 'Installing the packages of requirements.txt into $(VENV), which takes a minute or two: '
	@{ $(BIN)/python -m pip install --disable-pip-version-check --require-hashes -r requirements.txt; echo "ended $$?"; } | $(DOTS)
	@rm -f $(VENV)/.holds-* $(VENV)/.installed-*
	@touch $@ $(HOLDS_RAW)
