# The only set-up a newcomer needs: each target builds .venv first if it is missing. Prerequisites: Python 3.11+ and make.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
# Two at a time: many of them wait for processes of theirs. Each takes one half and then of what the other has left, so that
# tests of one module, which share what was computed for them, mostly stay together.
BESIDE := -n 2 --dist worksteal

.PHONY: setup demo test test-all check docs
setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@echo "setup: filling .venv with the versions of constraints.txt; some minutes, most of them for PyTorch"
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(STAMP)
	@echo "setup: done; $(BIN)/ftrain is there"

demo: setup
	$(BIN)/python -P -m ftrain.cli.demo

test: setup
	$(BIN)/python -P -m pytest $(BESIDE) -m "not slow and not gpu"

test-all: setup
	$(BIN)/python -P -m pytest $(BESIDE) -m "not gpu"

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: setup
	@echo "docs: building site/ from docs/; a broken link or a warning ends it"
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "docs: done; open site/index.html"
