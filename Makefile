# Every target does its own set-up, in .venv, and is quick when run again.
#
#   make demo [ARGS=--quick]     two trainings, with the plain loop and with FusedAccumulator
#   make test [ARGS=...]         the test suite
#   make test-quick              the inner loop: some of it, in a minute
#   make test-slow               what takes long: sanitizers and races in the emulation, planted faults, machine code
#   make test-emulated           the accumulator's tests once more, on the emulated CUDA kernels
#   make test-triton [TRITON=3.9.0]   the Triton kernels: interpreted, and compiled ahead of time
#   make coverage                test, test-emulated, test-triton, test-bridges; the share of fastaccum/ reached
#   make test-bridges            the bridges to Accelerate, Transformers and Lightning, with the real libraries
#   make test-mindspore [ARGS=...]    fastaccum.mindspore, in an environment of its own without torch
#   make demo-mindspore [ARGS=--quick]   LeNet-5 in MindSpore, its own accumulation and TrainStep
#   make bench [ARGS=...]        the benchmarks
#   make counters [ARGS=--write] calls, allocations, instructions: what no other process disturbs; or store them
#   make bench-mindspore [ARGS=...]   accumulate, clip and update, by MindSpore's operators and by fastaccum
#   make static-proof            what the GPU kernels' machine code says (no GPU needed); writes the table
#   make gpu-check [ARGS=...]    on a GPU: the kernels' proofs and times; see benchmarks/gpu_check.py
#   make lint                    ruff, clang-format and mypy
#   make docs                    the pages of docs/ into build/docs; a warning is an error
#   make sanitize                the native tests under address and undefined-behaviour sanitizers
#   make env | clean             only the set-up | remove all that make has made
#
# Any build of torch >= 2.11 does: make TORCH='torch==2.13.0+cpu --index-url ...' PYTHON=python3.12

TORCH ?= torch==2.13.0
PYTHON ?= python3
ARGS ?=

BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
KEY := $(shell printf '%s' '$(TORCH) $(PYTHON)' | cksum | cut -d ' ' -f 1)
TORCH_STAMP := .venv/.torch-$(KEY)
STAMP := .venv/.installed-$(KEY)
LINT_STAMP := .venv/.lint
NATIVE_SOURCES := $(wildcard csrc/*.h csrc/*.cpp csrc/*.cu csrc/*/*.h csrc/*/*.cpp)
export PIP_ROOT_USER_ACTION = ignore

.PHONY: env demo test test-quick test-slow test-emulated test-triton test-bridges test-mindspore coverage bench \
  static-proof counters gpu-check lint docs sanitize clean demo-mindspore bench-mindspore
.DELETE_ON_ERROR:

env: $(STAMP)

demo: $(STAMP)
	$(BIN)/python -m fastaccum demo $(ARGS)

# A process per core; a file stays in one, as its tests share what they build.
PARALLEL := -n auto --dist loadfile --no-loadscope-reorder
test: $(STAMP)
	$(BIN)/python -m pytest $(PARALLEL) -m "not slow" $(ARGS)

INNER_LOOP := accumulator arguments clip_functions clipping docs failures field_cases fuzz groups layers layout \
  mixed_precision ops parameters readme weights
test-quick: $(STAMP)
	$(BIN)/python -m pytest -q $(PARALLEL) -m quick $(INNER_LOOP:%=tests/test_%.py) $(ARGS)

test-slow: $(STAMP)
	$(BIN)/python -m pytest -q $(PARALLEL) -m slow $(ARGS)

# What drives the wrapper; the ops themselves have their own tests on every backend.
ON_ANY_BACKEND := accumulator arguments clip_functions clipping failures fuzz groups hooks mixed_precision parameters state \
  stock take_backward training weights
test-emulated: $(STAMP)
	$(BIN)/python -m pytest -q $(PARALLEL) --emulated $(ON_ANY_BACKEND:%=tests/test_%.py) $(ARGS)

# An environment that has .venv's packages too, and whose own come first.
define beside
	$(BIN)/python -m venv --clear --without-pip $(1)
	$(BIN)/python -c "import sysconfig as s; p = s.get_path('purelib'); \
	  open(p.replace('.venv', '$(1)', 1) + '/base.pth', 'w').write( \
	  f'import site; site.addsitedir({p!r})\n')"
endef

# A version of Triton beside the packages of .venv.
TRITON ?= 3.9.0
TRITON_ENV := .venv/triton-$(TRITON)
TRITON_STAMP := $(TRITON_ENV)/.installed-$(KEY)
test-triton: $(TRITON_STAMP)
	TRITON_INTERPRET=1 $(TRITON_ENV)/bin/python -m pytest -q $(PARALLEL) tests/test_triton_backend.py \
	  tests/test_triton_kernels.py $(ARGS)
	$(TRITON_ENV)/bin/python -m pytest -q tests/test_triton_compile.py $(ARGS)

# Lines and branches, in subprocesses too. What only a GPU reaches counts as missed.
FLOOR := 95
coverage: $(STAMP)
	$(BIN)/python -m coverage erase
	$(MAKE) test ARGS='--cov --cov-append --cov-report='
	$(MAKE) test-emulated ARGS='--cov --cov-append --cov-report='
	$(MAKE) test-triton ARGS='--cov --cov-append --cov-report='
	$(MAKE) test-bridges ARGS='--cov --cov-append --cov-report='
	$(BIN)/python -m coverage report --fail-under=$(FLOOR)

$(TRITON_STAMP): $(STAMP)
	$(call beside,$(TRITON_ENV))
	$(PIP) --python $(TRITON_ENV)/bin/python install --no-deps triton==$(TRITON)
	touch $@

# The frameworks beside the packages of .venv, whose torch stays the one that is used.
BRIDGES_ENV := .venv/bridges
BRIDGES_STAMP := $(BRIDGES_ENV)/.installed-$(KEY)
test-bridges: $(BRIDGES_STAMP)
	OMP_NUM_THREADS=1 $(BRIDGES_ENV)/bin/python -m pytest -q tests/bridges tests/test_docs.py -k "bridges or library" $(ARGS)

$(BRIDGES_STAMP): $(STAMP) requirements/bridges.txt
	$(call beside,$(BRIDGES_ENV))
	$(BIN)/python -c "import importlib.metadata as m; print('torch==' + m.version('torch'))" > $(BRIDGES_ENV)/torch.txt
	$(PIP) --python $(BRIDGES_ENV)/bin/python install -r requirements/bridges.txt -c $(BRIDGES_ENV)/torch.txt
	touch $@

# MindSpore and no torch; the native libraries lie in the source tree. The tests compare with the PyTorch
# front end, which runs in .venv.
MINDSPORE_ENV := .venv/mindspore
MINDSPORE_STAMP := $(MINDSPORE_ENV)/.installed-$(KEY)
MINDSPORE_PYTHON := GLOG_v=3 $(MINDSPORE_ENV)/bin/python
test-mindspore: $(MINDSPORE_STAMP)
	FASTACCUM_TORCH_PYTHON=$(CURDIR)/$(BIN)/python $(MINDSPORE_PYTHON) -m pytest -q -p no:cacheprovider \
	  --confcutdir=tests/on_mindspore tests/on_mindspore $(ARGS)

demo-mindspore: $(MINDSPORE_STAMP)
	$(MINDSPORE_PYTHON) -m fastaccum.mindspore.demo $(ARGS)

bench-mindspore: $(MINDSPORE_STAMP)
	$(MINDSPORE_PYTHON) -m benchmarks.mindspore_bench $(ARGS)

$(MINDSPORE_STAMP): $(STAMP) requirements/mindspore.txt
	$(BIN)/python -m venv --clear --without-pip $(MINDSPORE_ENV)
	$(PIP) --python $(MINDSPORE_ENV)/bin/python install -r requirements/mindspore.txt
	touch $@

# With the peers where they can be installed; where not, the table says so. DeepSpeed looks for ninja in PATH.
PEERS_ENV := .venv/peers
PEERS_STAMP := $(PEERS_ENV)/.installed-$(KEY)
bench: $(PEERS_STAMP)
	PATH="$(CURDIR)/$(BIN):$$PATH" $(PEERS_ENV)/bin/python -m benchmarks $(ARGS)

$(PEERS_STAMP): $(STAMP) requirements/peers.txt
	$(call beside,$(PEERS_ENV))
	$(BIN)/python -c "import importlib.metadata as m; print('torch==' + m.version('torch'))" > $(PEERS_ENV)/torch.txt
	$(PIP) --python $(PEERS_ENV)/bin/python install --no-build-isolation -r requirements/peers.txt -c $(PEERS_ENV)/torch.txt \
	  || echo 'the peers cannot be installed here: make bench runs without them'
	touch $@

# Instructions need valgrind; without it they are left out, and the last line says so.
counters: $(STAMP)
	$(BIN)/python -m benchmarks.counters $(ARGS)

static-proof: $(STAMP)
	$(BIN)/python -m benchmarks.static_proof $(ARGS)

# Sets nothing up, as there may be no network: .venv's Python if it is there, else PYTHON's.
gpu-check:
	$(firstword $(wildcard $(BIN)/python) $(PYTHON)) -m benchmarks.gpu_check $(ARGS)

# mypy needs torch, for its types, and nothing else of .venv.
lint: $(LINT_STAMP) $(TORCH_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	find csrc benchmarks -name '*.h' -o -name '*.cpp' -o -name '*.cu' | xargs $(BIN)/clang-format --dry-run -Werror
	$(BIN)/mypy

# Its packages stand apart from .venv's. The API is read from the sources, so torch is not needed. With --quiet
# warnings would not count.
DOCS_ENV := .venv/docs
docs: $(DOCS_ENV)/.installed
	$(DOCS_ENV)/bin/python -m mkdocs build --strict $(ARGS)

$(DOCS_ENV)/.installed: .venv/pyvenv.cfg requirements/docs.txt
	$(BIN)/python -m venv --without-pip $(DOCS_ENV)
	$(PIP) --python $(DOCS_ENV)/bin/python install -r requirements/docs.txt
	touch $@

# The instrumented build, the tests and the benchmarks lie in a folder of their own: the source tree
# keeps its fast libraries, and cannot be imported by mistake. The sanitizers' run-time libraries
# must be the first in the process, and Python itself leaks by design.
SANITIZED := build/sanitized
sanitize: $(STAMP)
	rm -rf $(SANITIZED) && mkdir -p $(SANITIZED) && cp -r tests benchmarks pyproject.toml $(SANITIZED)
	FASTACCUM_NATIVE=1 FASTACCUM_SANITIZE=address,undefined \
	  $(PIP) install --no-build-isolation --no-deps --target $(SANITIZED) .
	cd $(SANITIZED) && \
	  LD_PRELOAD="$$($${CXX:-g++} -print-file-name=libasan.so) $$($${CXX:-g++} -print-file-name=libubsan.so)" \
	  ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
	  ../../$(BIN)/python -m pytest -q $(PARALLEL) -m "native and quick" $(ARGS)

clean:
	rm -rf .venv .coverage* build dist *.egg-info fastaccum/*.so fastaccum/_build_note.txt
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/pyvenv.cfg:
	$(PYTHON) -m venv .venv

# torch comes first, and exactly the one that was asked for: nothing else may choose it.
$(TORCH_STAMP): .venv/pyvenv.cfg
	rm -f .venv/.torch-* .venv/.installed-*
	$(PIP) install $(TORCH)
	touch $@

$(STAMP): $(TORCH_STAMP) setup.py pyproject.toml $(wildcard requirements/*.txt) $(NATIVE_SOURCES)
	$(PIP) install $(foreach part,build test demo bench cuda,-r requirements/$(part).txt)
	$(PIP) install --no-build-isolation --no-deps --editable .
	touch $@

$(LINT_STAMP): .venv/pyvenv.cfg requirements/lint.txt
	$(PIP) install -r requirements/lint.txt
	touch $@
