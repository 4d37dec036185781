# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt
REAL := terminal or distributed or process or gpu
ALONE := alone or gpu or terminal
INPUTS := pyproject.toml trainer/pyproject.toml constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test check format bench soak scoreboard screenshots clean

help:
	@echo "make demo    train two ranks with a loader that is too slow, and watch them"
	@echo "make test    run the tests"
	@echo "make check   lint, types, import contracts"
	@echo "make format  let ruff reformat"
	@echo "make bench   print every budget beside its baseline"
	@echo "make soak    run the screen for ten minutes: memory, missed ticks, CPU"
	@echo "make scoreboard  say how often the diagnosis is right"
	@echo "make screenshots  draw the pictures of the documents anew"
	@echo "make clean   remove the virtual environment and caches"

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "gpuwatch needs Python 3.11 or newer; try: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(INPUTS) | $(BIN)/python
	$(PIP) -e . -e './trainer[vision]'
	touch $@

$(VENV)/.installed-dev: $(INPUTS) | $(BIN)/python
	$(PIP) -e '.[dev,integrations]' -e './trainer[vision,text]'
	touch $(VENV)/.installed $@

demo: $(VENV)/.installed
	@$(BIN)/gpuwatch demo

# Most tests are alone with their own functions: several at a time, one more than there are cores,
# for some of them wait. Of those that drive processes a file a core. Those with a terminal or a card,
# and those that compare times with what they must be, have the machine to themselves. All parts
# always run.
test: $(VENV)/.installed-dev
	@failed=0; \
	$(BIN)/python -m pytest -n $$(($$(nproc) + 1)) --maxprocesses 8 -m "not ($(REAL))" || failed=1; \
	$(BIN)/python -m pytest -n $$(nproc) --maxprocesses 4 --dist loadfile -m "($(REAL)) and not ($(ALONE))" || failed=1; \
	$(BIN)/python -m pytest -m "$(ALONE)" || failed=1; \
	exit $$failed

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.installed-dev
	@for file in $(filter-out benchmarks/bench_soak.py,$(wildcard benchmarks/bench_*.py)); do echo "== $$file"; $(BIN)/python $$file || exit 1; done

soak: $(VENV)/.installed-dev
	$(BIN)/python benchmarks/bench_soak.py

scoreboard: $(VENV)/.installed-dev
	$(BIN)/python benchmarks/score.py

screenshots: $(VENV)/.installed-dev
	$(BIN)/python benchmarks/screenshots.py

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
