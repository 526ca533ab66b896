# Each command sets up what it lacks.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SOURCES := setup.py pyproject.toml constraints.txt deepfast/build.py deepfast/launches.py $(shell find csrc -name '*.cpp' -o -name '*.cu' -o -name '*.h' -o -name '*.py')

# The Python of `make gpu`: that of `make setup` if it exists, else PYTHON.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))

.PHONY: help setup wheel test test-all test-avx2 front-end cuda-check report gpu docs lint clean

help:
	@echo "make setup    make .venv and install deepfast in editable mode"
	@echo "make wheel    build a wheel with the compiled CPU ops for this Python into dist"
	@echo "make test     run the fast tests: 4 minutes on 2 cores"
	@echo "make test-all run all tests, also those marked slow"
	@echo "make front-end  compile every variant of the Triton kernels to Triton IR: no GPU"
	@echo "make cuda-check  compile the CUDA kernels for every architecture: no GPU, no spills"
	@echo "make report   measure, train a 30-layer model, write report/index.html: about 9 minutes"
	@echo "make gpu      on a GPU: stages in the order of their worth, or some with STAGE='right ratio';"
	@echo "              each takes under four minutes and adds to bench/results; installs nothing"
	@echo "make docs     build the site of docs/ into build/site; broken links are errors"
	@echo "make lint     check style and types"

setup: $(VENV)/.installed

# An installed torch is kept, with its triton: constraints.txt decides only if there is none yet.
# Torch comes first and alone, because its CUDA builds demand a triton of their own. Triton 3.6's
# interpreter fails with numpy 2.4. The ops compile while pip fetches the packages of tests and
# training. A build that fails is an error, but without a compiler the package works on torch's ops.
# The tests read models of timm and a plain form of fla-core, which ask for torchvision and einops.
# Torchvision would bring a torch of its own; the test of timm has a stand-in.
$(VENV)/.installed: $(SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/pip install -q "$$(grep ^torch== constraints.txt)"
	$(BIN)/python -c 'import importlib.metadata as m; print(*(f"{d.name}=={d.version}".split("+")[0] for d in m.distributions() if d.name in ("torch", "triton")), sep="\n")' > $(VENV)/kept.txt
	grep -v -E "^($$(cut -d= -f1 $(VENV)/kept.txt | paste -sd'|'))==" constraints.txt | cat - $(VENV)/kept.txt > $(VENV)/constraints.txt
	! grep -q '^triton==3\.6\.' $(VENV)/kept.txt || sed -i 's/^numpy==.*/numpy<2.4/' $(VENV)/constraints.txt
	$(BIN)/pip install -q -c $(VENV)/constraints.txt 'setuptools>=77' ninja pybind11 rich
	$(BIN)/python -m deepfast build > $(VENV)/build.log 2>&1 & \
	  $(BIN)/pip install -q -c $(VENV)/constraints.txt --no-build-isolation -e '.[train,report,integrations,dev]'; \
	  status=$$?; wait; exit $$status
	$(BIN)/pip install -q -c $(VENV)/constraints.txt --no-deps timm fla-core einops
	$(BIN)/deepfast build || test -z "$${CXX:-$$(command -v g++ clang++)}"
	$(BIN)/deepfast info
	touch $@

# Compiled against the torch of .venv; the wheel serves every torch since 2.10.
wheel: setup
	DEEPFAST_BUILD=1 DEEPFAST_BUILD_CUDA=0 $(BIN)/pip wheel -q --no-build-isolation --no-deps -w dist .

PYTEST = $(BIN)/python -m pytest -q -n auto --maxprocesses 8 --dist loadfile

test: setup
	$(PYTEST) -m "not slow" tests

test-all: setup
	$(PYTEST) tests

# The fast tests of the ops again, as on a processor without AVX-512.
test-avx2: setup
	@if $(BIN)/python -c 'import sys, torch; sys.exit("AVX512" not in torch.backends.cpu.get_cpu_capability())'; then \
	  DEEPFAST_CPU_CAPABILITY=avx2 ATEN_CPU_CAPABILITY=avx2 $(PYTEST) -m "not slow" tests/ops; \
	else echo "test-avx2: the processor has no AVX-512, so make test was the same run"; fi

cuda-check: setup
	$(BIN)/python -m tests.cuda.ptxas

# The Triton of .venv and that of the oldest torch that is served.
front-end: setup
	test -d $(VENV)/triton-3.6.0 || $(BIN)/pip install -q --no-deps --target $(VENV)/triton-3.6.0 triton==3.6.0
	$(BIN)/python -m tests.kernels.front_end & first=$$!; \
	  PYTHONPATH=$(VENV)/triton-3.6.0 $(BIN)/python -m tests.kernels.front_end; \
	  status=$$?; wait $$first && exit $$status

report: setup
	$(BIN)/deepfast report --output report

# A copy of a clone may lack the link to the kernels.
gpu:
	test -e deepfast/kernels/__init__.py || ln -sfn ../kernels deepfast/kernels
	$(GPU_PYTHON) -m bench.gpu $(if $(STAGE),--stage $(STAGE)) $(GPU_ARGS)

# Needs neither torch nor the compiled ops.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

$(VENV)/.docs: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt $$($(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])')
	touch $@

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror \
	  $(shell find csrc tests/cuda -name '*.cpp' -o -name '*.cu' -o -name '*.h')
	$(BIN)/mypy

clean:
	rm -rf build report runs *.egg-info deepfast/*.so
