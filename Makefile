# `make demo` and `make test` set up .venv automatically. To use another Python: make PYTHON=python3.12 demo
# To start over: rm -rf .venv

PYTHON ?= python3
BIN := .venv/bin
# Exists if the last installation succeeded. If it is missing or older than the requirements, pip runs again.
STAMP := .venv/.outrider-installed
# Constraints are set in the environment, because pip's -c does not apply to build dependencies.
# Older versions of pip read the first variable for them, newer ones the second.
CONSTRAIN := PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt

PIP = $(CONSTRAIN) $(BIN)/python -m pip install --disable-pip-version-check --no-input --no-compile
# Prints the requirements of '.[dev]'. They are downloaded while the C++ step is compiled.
NEEDS := import tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
  needs = [*p["dependencies"], "outrider[dev]"]; \
  [needs.extend(p["optional-dependencies"][extra]) for need in needs if need.startswith("outrider[") \
  for extra in need[9:-1].split(",")]; \
  print(*(need for need in needs if not need.startswith("outrider[")), sep="\n")

# Otherwise, each of about a hundred processes would compile the modules that it imports.
unexport PYTHONDONTWRITEBYTECODE
# Exists if one process has compiled them, so that parallel processes do not all do it.
IMPORTED := .venv/.outrider-imported

# "make test" already runs the whole suite on this instruction set, so it is not run again.
SUITE_ISA =
ENGINES := $(addprefix engine-,$(filter-out $(SUITE_ISA),portable avx2 off))

# The other parts of "make test" run at low priority: they use idle time and do not delay server tests.
NICE =
.PHONY: help demo test suite engine $(ENGINES) isas arm equality slow fuzz drill lint interface setup peers clients site clean

help:
	@echo "make demo      see plain and speculative decoding side by side"
	@echo "make test      tests, lint and types"
	@echo "make engine    the engine's tests on portable, AVX2 and no native code (part of make test)"
	@echo "make isas      the whole suite on every instruction set, and without native code"
	@echo "make arm       build the C++ step for Arm and run its tests in an emulator, slowly"
	@echo "make equality  plain and speculative decoding give the same output, with every option and drafter"
	@echo "make slow      the long tests, including equality"
	@echo "make fuzz      send random and hostile requests to a real server, in half an hour"
	@echo "make drill     the guard rolls back a real fleet with HAProxy, Prometheus and faults, in minutes"
	@echo "make lint      lint and types only"
	@echo "make interface generate the binding of the C interface, after a change of outrider.h"
	@echo "make peers     install other engines for comparison, outside .venv (python -m benchmarks peers)"
	@echo "make clients   install third-party clients and speculators (tests/*/test_{clients,speculators}.py)"
	@echo "make site      the documentation as a website in build/site, with every link checked"
	@echo "make clean     remove caches and packages (.venv and build stay)"

demo: $(STAMP)
	@$(BIN)/outrider demo

test: $(STAMP)
	@$(MAKE) --no-print-directory -j3 suite lint engine "NICE=nice -n 19" SUITE_ISA=$$($(BIN)/python \
	  -c "from outrider.native.choice import library; print(library().isa if library() else 'off')")

# One thread per process, because spinning threads would delay each other.
suite: $(STAMP) $(IMPORTED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $$(nproc) --dist worksteal

# In parallel, so with one thread each. Only files with such tests, because collecting all files takes long.
engine: $(ENGINES)
$(ENGINES): engine-%: $(STAMP) $(IMPORTED)
	@said=$$(OMP_NUM_THREADS=1 OUTRIDER_NATIVE_ISA=$* $(NICE) $(BIN)/python -m pytest -q -m "engine and not slow" \
	    $$(grep -rlE --include='test_*.py' 'mark\.engine|some_for_engines' tests) 2>&1); \
	  code=$$?; echo "OUTRIDER_NATIVE_ISA=$*"; echo "$$said"; exit $$code

isas: $(STAMP)
	for isa in $$($(BIN)/python -c "from outrider.native.choice import available; print(*available())") off; do \
	  echo "OUTRIDER_NATIVE_ISA=$$isa"; \
	  OUTRIDER_NATIVE_ISA=$$isa $(BIN)/python -m pytest -q || exit 1; done

# On x86-64: apt-get install cmake g++-aarch64-linux-gnu qemu-user-static mmdebstrap
arm: $(STAMP)
	deploy/aarch64/run

equality: $(STAMP)
	$(BIN)/python -m pytest -m equality

slow: $(STAMP)
	$(BIN)/python -m pytest -m slow

# For another seed or fewer bodies: make fuzz SEED=7 BODIES=20000
fuzz: $(STAMP)
	$(BIN)/python -m benchmarks fuzz --seed $(or $(SEED),0) --bodies $(or $(BODIES),200000)
	$(BIN)/python -m benchmarks soak --compare

# If HAProxy or Prometheus is missing, it is skipped with a reason. CASES= selects other cases.
drill: CASES ?= weak,killed,panels
drill: $(STAMP)
	$(BIN)/python -m benchmarks drill --short --cases $(CASES)

lint: $(STAMP)
	$(NICE) $(BIN)/ruff check
	$(NICE) $(BIN)/ruff format --check
	$(NICE) $(BIN)/clang-format --dry-run --Werror $(wildcard src/outrider/native/src/*)
	$(NICE) $(BIN)/mypy

# Run this after a change of src/outrider/native/src/outrider.h.
interface: $(STAMP)
	$(BIN)/python -m outrider.native.generate

setup: $(STAMP)

# PEERS="llama.cpp openvino vllm" installs only some of them.
peers: $(STAMP)
	@$(BIN)/python -m benchmarks install $(or $(PEERS),llama.cpp ik_llama.cpp mistral.rs openvino vllm)

# CLIENTS="vllm guidellm schemathesis speculators triton" installs only some of them.
clients: $(STAMP)
	@$(BIN)/python -m benchmarks install $(or $(CLIENTS),vllm agents guidellm schemathesis speculators triton)

# The site builder has its own environment, because nothing else needs it.
SITE_TOOLS := build/site-tools/bin/zensical
site: $(STAMP) $(SITE_TOOLS)
	@$(BIN)/python -m dev.website

$(SITE_TOOLS): dev/site.txt
	@$(PYTHON) -m venv --clear build/site-tools
	@build/site-tools/bin/python -m pip install --disable-pip-version-check --quiet --requirement dev/site.txt
	@touch $@

# Keep a .venv that has a working pip and a supported Python, because pip need not download its packages again.
$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { \
	  echo "No $(PYTHON) found: install Python 3.11, 3.12 or 3.13, or name one with PYTHON=/path/to/python." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || { \
	  echo "Outrider needs Python 3.11, 3.12 or 3.13, but $(PYTHON) is another version: name one with PYTHON=python3.12." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "$(PYTHON) cannot create virtual environments: install its venv module (Debian and Ubuntu: the package python3-venv)," \
	    "or name another Python with PYTHON=/path/to/python." >&2; exit 1; }
	@echo "Setting up .venv with Outrider and the packages of constraints.txt; the largest is torch, which can take some minutes."
	@$(BIN)/python -c 'import pip, sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null \
	  || $(PYTHON) -m venv --clear .venv
	@$(BIN)/python -c '$(NEEDS)' > .venv/needs.txt
	@$(PIP) --quiet --no-deps --editable . & built=$$!; \
	  $(PIP) --requirement .venv/needs.txt; code=$$?; echo "Compiling the rest of the C++ step."; wait $$built && exit $$code
	@# Write the bytecode now, so that the first server starts as fast as later ones.
	@$(BIN)/python -c "import outrider.engine.worker.worker, outrider.server.run"
	@touch $@

$(IMPORTED): $(STAMP)
	@$(BIN)/python -m pytest --collect-only -q >/dev/null 2>&1; touch $@

# build/ is kept, because it holds checkpoints from hours of training.
clean:
	rm -rf dist .cache .mypy_cache .pytest_cache .ruff_cache docs/reference src/*.egg-info
	find src tests benchmarks -name __pycache__ -type d -exec rm -rf {} +
