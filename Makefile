# Everything runs in .venv, which is made with PYTHON. Packages are installed again when a requirements file changes.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
ARGS ?=

.PHONY: run test test-all tools docs sync clean

run: $(VENV)/.installed  ## the default run; make run ARGS="--env-name Pendulum-v1" gives it flags
	$(RUN) ppo_continuous.py $(ARGS)

test: $(VENV)/.installed-dev  ## the linter and the fast tests
	$(RUN) -m ruff check .
	$(RUN) -m pytest $(ARGS)

test-all: $(VENV)/.installed-dev  ## the linter and all tests, the slow ones too
	$(RUN) -m ruff check .
	$(RUN) -m pytest -m "" $(ARGS)

tools: $(VENV)/.installed-tools  ## what tools/ need besides: Python packages, and brax's viewer's from npm

docs: $(VENV)/.installed-docs  ## the documentation as a site, in site/
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict

sync:  ## copy the common blocks of ppo_continuous.py to the other scripts
	$(PYTHON) tools/sync_blocks.py $(ARGS)

clean:  ## remove what make made; runs/ stays
	rm -rf $(VENV) site .jax_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

# A stamp, not .venv itself: a virtual environment that was left half made has to be made again.
$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit("needs Python 3.11 or later: make PYTHON=..." if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv --clear $(VENV)
	touch $@

$(VENV)/.installed: requirements.txt | $(VENV)/.created
	$(RUN) -m pip install --quiet -r requirements.txt
	touch $@

$(VENV)/.installed-tools: requirements-tools.txt requirements.txt tools/viewer/package-lock.json | $(VENV)/.created
	$(RUN) -m pip install --quiet -r requirements-tools.txt
	npm ci --ignore-scripts --prefix tools/viewer
	touch $@

$(VENV)/.installed-dev: requirements-dev.txt requirements-tools.txt requirements.txt | $(VENV)/.created
	$(RUN) -m pip install --quiet -r requirements-dev.txt
	touch $@

$(VENV)/.installed-docs: requirements-docs.txt | $(VENV)/.created
	$(RUN) -m pip install --quiet -r requirements-docs.txt
	touch $@
