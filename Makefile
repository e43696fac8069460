# make demo    set up, then the main job on the embedded default: train, evaluate, print
# make test    set up, then the tests
# make help    the rest
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEMO ?= outputs/demo
AUDIT := $(VENV)/audit
PINS ?= constraints.txt

.PHONY: help demo test test-slow lint audit format bench clean

help:
	@echo "make demo       set up, train HASS on the bundled target, decode held-out prompts, print both"
	@echo "make test       set up, run the tests (under 12 minutes on 2 cores)"
	@echo "make test-slow  the tests that take minutes each or need extra files"
	@echo "make lint       ruff and the type check of the public API"
	@echo "make audit      known vulnerabilities of the pinned packages (asks pypi.org)"
	@echo "make format     let ruff rewrite layout"
	@echo "make bench      training steps against the literal ones, then decoding with and without the drafter (after make demo)"
	@echo "make clean      remove the environment"

# torch is asked for by its exact version first: a range may bring gigabytes of another build
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check "$$(grep '^torch==' constraints.txt)" -c constraints.txt
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $(READY)

demo: $(READY)
	rm -rf $(DEMO)
	$(BIN)/python train.py variant=hass hydra.run.dir=$(DEMO)
	$(BIN)/eaglelab evaluate run=$(DEMO)

test: $(READY)
	$(BIN)/python -m pytest

test-slow: $(READY)
	$(BIN)/python -m pytest -m slow

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Not a part of lint: it needs a database on the network. Its tool has an environment of its own.
audit:
	@test -x $(AUDIT)/bin/pip-audit || { $(PYTHON) -m venv $(AUDIT) && $(AUDIT)/bin/python -m pip install -q pip-audit; }
	@$(AUDIT)/bin/pip-audit --strict --no-deps --disable-pip --progress-spinner off -r $(PINS) 2> $(AUDIT)/told; \
	code=$$?; grep "known vulnerabilit" $(AUDIT)/told && exit $$code; tail -n 1 $(AUDIT)/told; \
	echo "audit: not made, since no database of vulnerabilities answers; run it again where pypi.org can be reached"; exit 1

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)
	$(BIN)/eaglelab bench split=false
	$(BIN)/eaglelab evaluate run=$(DEMO) tree=chain limit=40
	$(BIN)/eaglelab evaluate run=$(DEMO) tree=static limit=40

clean:
	rm -rf $(VENV)
