# report, test and lint are the only commands a newcomer needs; each sets up what it lacks.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SOURCES := setup.py pyproject.toml constraints.txt $(shell find csrc -name '*.cpp' -o -name '*.h')

.PHONY: help setup test report lint clean

help:
	@echo "make setup    make .venv and install deepfast in editable mode"
	@echo "make test     run the tests"
	@echo "make report   measure, train a 30-layer model, write report/index.html"
	@echo "make lint     check style"

setup: $(VENV)/.installed

# An installed torch is kept, with the triton it came with: pip's constraints apply only where
# none is there yet.
$(VENV)/.installed: $(SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/pip install -q -c constraints.txt torch
	$(BIN)/python -c 'import importlib.metadata as m; print(*(f"{d.name}=={d.version}".split("+")[0] for d in m.distributions() if d.name in ("torch", "triton")), sep="\n")' > $(VENV)/kept.txt
	grep -v -E "^($$(cut -d= -f1 $(VENV)/kept.txt | paste -sd'|'))==" constraints.txt | cat - $(VENV)/kept.txt > $(VENV)/constraints.txt
	$(BIN)/pip install -q -c $(VENV)/constraints.txt setuptools wheel ninja pybind11
	$(BIN)/pip install -q -c $(VENV)/constraints.txt --no-build-isolation -e '.[train,report,dev]'
	$(BIN)/deepfast info
	touch $@

test: setup
	$(BIN)/python -m pytest tests -q

report: setup
	$(BIN)/deepfast report --output report

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(shell find csrc -name '*.cpp' -o -name '*.h')

clean:
	rm -rf build report runs *.egg-info deepfast/*.so
