# `make demo` runs the whole line on this machine, `make test` its tests. `make` lists the rest.
CONFIG ?= jobs/configs/laptop.yaml
ARGS ?=
# The first Python of the kind that is needed. Another one: make PYTHON=/path/to/python3.11
PYTHON ?= $(shell for p in python3 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null && echo $$p && break; done)
VENV := .venv/bin
# Where this is set (in some containers) every process would compile what it imports anew: minutes in all.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help setup demo serve stop test test-slow check lock

help:
	@echo "make demo       set up, then run $(CONFIG) from dataset to report; leaves nothing running"
	@echo "make serve      the same, and leave the endpoint up"
	@echo "make stop       end what make serve left running"
	@echo "make test       set up, then run the tests (make test-slow: the long ones)"
	@echo "make check      ruff and pyright"
	@echo "make setup      the environment alone, from requirements/*.lock"
	@echo "make lock       resolve requirements/*.in anew"
	@echo "CONFIG=FILE chooses the config, ARGS='key=value ...' overrides it, PYTHON=... the Python (3.11 or 3.12)"

setup:
	@test -n "$(PYTHON)" || { echo "error: no Python 3.11 or 3.12 found: install one, or name it: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) requirements/install.py

demo: setup
	@$(VENV)/python -m cluster.models --config "$(CONFIG)" $(ARGS)
	@$(VENV)/python -m cluster.local run --config "$(CONFIG)" $(ARGS) -- \
		$(VENV)/python -m cluster.submit --config "$(CONFIG)" $(ARGS)

serve: setup
	@$(VENV)/python -m cluster.models --config "$(CONFIG)" $(ARGS)
	@$(VENV)/python -m cluster.local run --keep --config "$(CONFIG)" $(ARGS) -- sh -c \
		'$(VENV)/python -m cluster.submit "$$@" && $(VENV)/python -m cluster.submit --stage serve "$$@"' \
		serve --config "$(CONFIG)" $(ARGS)

stop:
	@test ! -x $(VENV)/python || $(VENV)/python -m cluster.local stop

test: setup
	@$(VENV)/python -m pytest $(ARGS)

test-slow: setup
	@$(VENV)/python -m pytest -m slow $(ARGS)

check: setup
	@$(VENV)/ruff check .
	@$(VENV)/ruff format --check .
	@$(VENV)/pyright

lock: setup
	@$(VENV)/python requirements/lock.py
