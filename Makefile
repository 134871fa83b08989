# make demo: train and try a small editing model, about 15 minutes on two CPU cores.
# make test: the test suite.  make lint: style.  Each makes .venv first, and only once.

PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint
demo: .venv/installed
	$(BIN)/python demo/run_demo.py

test: .venv/installed
	$(BIN)/python -m pytest

lint: .venv/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

# The CPU build of torch, where the package index has one, is a tenth of the CUDA build: what is
# installed already, or comes through TORCH=..., satisfies requirements.txt.
.venv/installed: requirements.txt
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed; try make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install $(PIP_FLAGS) $(TORCH) -r requirements.txt
	touch $@
