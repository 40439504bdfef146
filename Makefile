# The commands of this repository. CI runs `make test-all`.
PYTHON ?= python3
FOCUS_PYTHON ?= python3.12
VENV := .venv
BIN := $(VENV)/bin
PYTEST = $(BIN)/pytest -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder  # in the order of tests/conftest.py
PIP := $(BIN)/pip --disable-pip-version-check

# Python keeps what it compiles, also where the environment says otherwise: the tests start hundreds of processes.
export PYTHONDONTWRITEBYTECODE :=

# Files of installed packages that few tests or none import: a quarter of all. Python compiles those that are imported.
NOT_IMPORTED := /transformers/models/|/tests/

KERNELS := $(shell find backend/native -name '*.cpp' -o -name '*.h')
RELAY := gateway/providers/native_relay

.PHONY: up install test test-all test-triton test-focus test-clients test-servers check lint prose bench docs docs-site manifests release release-dry-run lock sbom audit clean .compiling .bytecode .test-tools

up: install ## start engine and gateway, print how to call them
	@$(BIN)/warmpath up

install: $(VENV)/.kernels ## create the virtual environment with gateway and engine, and compile the native code

# Processes that share the tests, on two cores. Many of the slow tests wait for processes and for time limits.
test: TEST_WORKERS ?= 2
test: TEST_LIBRARIES := --highest
test-all: TEST_WORKERS ?= 3

test: .compiling $(VENV)/.installed-dev ## the fast half: all checks, and every test that is not marked slow
	@scripts/ensure-redis.sh
	@$(MAKE) --no-print-directory --jobs=2 lint .bytecode
	@$(PYTEST) -m "not slow"

test-all: .compiling ## everything a change must pass, real redis-server and browser included
	@$(MAKE) --no-print-directory --jobs=2 .test-tools $(VENV)/.installed-dev
	@$(MAKE) --no-print-directory --jobs=2 lint .bytecode
	@$(PYTEST)

.compiling: ## start to compile the kernels that the tests use, while the environment is installed and the code linted
	@mkdir -p build/tests
	@$(PYTHON) -m tests.backend.native.libraries $(TEST_LIBRARIES) >build/tests/kernels.log 2>&1 &

.bytecode: ## compile the installed packages while the code is linted; pip would do it earlier, on one core
	@$(BIN)/python -m compileall -q -x '$(NOT_IMPORTED)' $(VENV)/lib >/dev/null || true  # some files are for newer Pythons

.test-tools:
	@scripts/ensure-redis.sh
	-@scripts/ensure-chromium.sh
	-@scripts/ensure-prometheus.sh

test-triton: $(VENV)/.installed-dev ## the GPU kernels on a CPU: interpreted, and compiled without being run
	$(PIP) install -q -c constraints.txt -e '.[triton]'  # torch for CUDA pins its version, so constraints.txt does not
	TRITON_INTERPRET=1 $(BIN)/pytest -q tests/gpu_kernels tests/backend/attention tests/backend/ops

# The validator's newest release in the package index has the rules of FOCUS 1.0.
test-focus: $(VENV)/.installed-dev ## the FOCUS export with focus-validator, which needs Python 3.12 and older libraries, in an environment under build/
	$(FOCUS_PYTHON) -m venv build/focus
	build/focus/bin/pip --disable-pip-version-check install -q focus-validator==2.2.1 'pyarrow<22'
	PATH="$(CURDIR)/build/focus/bin:$$PATH" $(BIN)/pytest -q -k own_validator tests/gateway/billing/ledger/test_focus.py

test-clients: $(VENV)/.installed-dev ## the newest clients against a gateway, each in an environment under build/; writes docs/reference/clients.md
	$(BIN)/python -m tests.clients.matrix --engine

test-servers: $(VENV)/.installed-dev ## inference servers behind the gateway, each in an environment under build/
	$(BIN)/python -m tests.servers.matrix
	$(BIN)/python -m docs.generate

lint: $(VENV)/.installed-dev prose ## formats, ruff, mypy strict, import directions, spelling and words
	$(BIN)/clang-format --dry-run -Werror $(KERNELS) $(RELAY)/relay.c
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

prose: $(VENV)/.installed-dev ## spelling, and the words to avoid of docs/style/words.yaml
	$(BIN)/typos
	$(BIN)/python -m docs.words

check: lint ## lint, and the documentation against the code
	$(BIN)/pytest -q -m "not e2e" tests/docs

bench: $(VENV)/.installed-dev ## the gateway's cost per request
	$(BIN)/python -m benchmarks.gateway.counts
	$(BIN)/python -m benchmarks.gateway.run

docs: $(VENV)/.installed-dev ## regenerate the policy's schema and the generated reference pages
	$(BIN)/warmpath check --schema > policies/policy.schema.json
	$(BIN)/python -m docs.generate

docs-site: $(VENV)/.installed-dev ## the documentation as a static site in build/docs/site, links checked
	$(BIN)/python -m docs.site

$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)
	@echo "installing Warmpath into $(VENV) (a few minutes the first time)"
	$(PIP) install --progress-bar on -c constraints.txt -e '.[engine]'
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(VENV)
	@echo "installing Warmpath and its development tools into $(VENV) (a few minutes the first time)"
	$(PIP) install --progress-bar on --no-compile -c constraints.txt -e '.[dev]'
	@touch $@ $(VENV)/.installed

$(VENV)/.kernels: $(KERNELS) backend/native/compiler.py $(RELAY)/relay.c $(RELAY)/compiler.py $(VENV)/.installed
	@$(BIN)/python -m backend.native.compiler
	@$(BIN)/python $(RELAY)/compiler.py
	@touch $@

$(VENV):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Warmpath needs Python 3.11 or later; set PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)

manifests: $(VENV)/.installed-dev ## the plain manifests of deploy/kubernetes, from the Helm chart
	$(BIN)/python -m scripts.manifests

release: $(VENV)/.installed-dev ## what a release consists of, in dist/: sdist, wheel, chart, notes, checksums
	$(BIN)/python -m scripts.release build

release-dry-run: $(VENV)/.installed-dev ## the same, and the images, where docker or buildah can build them
	$(BIN)/python -m scripts.release build --images

AUDIT := .audit
lock: $(AUDIT)/.installed ## regenerate the hash-pinned locks from pyproject.toml and constraints.txt
	$(AUDIT)/bin/python scripts/lock.py

sbom: $(AUDIT)/.installed $(VENV)/.installed ## CycloneDX bill of materials and licences of what the locks install, in build/sbom
	$(AUDIT)/bin/python scripts/sbom.py --environment $(BIN)/python

audit: $(AUDIT)/.installed ## bandit over the code, and known vulnerabilities of what the locks install
	$(AUDIT)/bin/bandit --quiet --recursive --configfile pyproject.toml gateway backend scripts
	$(AUDIT)/bin/python scripts/audit.py

$(AUDIT)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(AUDIT)
	$(AUDIT)/bin/pip --disable-pip-version-check install -q -c constraints.txt bandit cyclonedx-bom pip-audit pip-licenses uv
	@touch $@

clean: ## remove the environment and the data of `make up`
	rm -rf $(VENV) $(AUDIT) .warmpath backend/native/compiled
