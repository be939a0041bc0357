# All targets run in .venv, which is made with PYTHON. Packages have the tested versions in constraints.txt. They are
# installed again when constraints.txt or pyproject.toml changes.
PYTHON ?= python3
VENV := .venv
CONSTRAIN := -c constraints.txt
RUN := $(VENV)/bin/python
# Python compiles what is imported, when it is imported first, and keeps it.
unexport PYTHONDONTWRITEBYTECODE
INSTALL := $(RUN) -m pip install --quiet --no-compile $(CONSTRAIN)
ARGS ?=

.PHONY: run test test-all newest tools docs pins sync clean

run: $(VENV)/.installed  ## train with the defaults; make run ARGS="--env-name Pendulum-v1" passes flags
	$(RUN) ppo_continuous.py $(ARGS)

test: $(VENV)/.installed-dev  ## run the linter, the checker of types and the fast tests
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check --quiet .
	$(RUN) -m basedpyright --pythonpath $(RUN)
	$(RUN) -m pytest $(ARGS)

test-all: $(VENV)/.installed-dev  ## run the linter, the checker of types and all tests, including slow tests
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check --quiet .
	$(RUN) -m basedpyright --pythonpath $(RUN)
	$(RUN) -m pytest -m "" $(ARGS)

newest:  ## run the fast tests with the newest versions of all packages, in a new environment
	rm -rf .venv-newest
	$(MAKE) test VENV=.venv-newest CONSTRAIN=

tools: $(VENV)/.installed-tools  ## install the command `onejit`, and packages for trackers and figures
	$(RUN) -m pip install --quiet --no-deps --editable .

docs: $(VENV)/.installed-docs  ## build the documentation as a site in site/
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict

pins: $(VENV)/.created  ## write requirements.txt, and constraints.txt with the newest versions at the date in the scripts' headers
	$(RUN) -m pip install --quiet uv
	$(RUN) -m uv pip compile --quiet --upgrade --universal --fork-strategy fewest --python-version 3.11 \
		--exclude-newer "$$(sed -n 's/^# exclude-newer = "\(.*\)"/\1/p' ppo_continuous.py)" \
		--no-annotate --custom-compile-command "make pins" --output-file constraints.txt \
		--extra dev --extra docs --extra envs --extra export pyproject.toml
	$(RUN) tools/requirements.py > requirements.txt

sync:  ## copy the common blocks of ppo_continuous.py to the other scripts
	$(PYTHON) tests/sync_blocks.py $(ARGS)

clean:  ## remove everything that make made; runs/ stays
	rm -rf $(VENV) .venv-newest .cache site .jax_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

# A stamp file, not .venv itself, because an incomplete virtual environment must be made again.
$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit("needs Python 3.11 or later: make PYTHON=..." if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv --clear $(VENV)
	touch $@

$(VENV)/.installed: constraints.txt requirements.txt | $(VENV)/.created
	$(INSTALL) -r requirements.txt
	touch $@

$(VENV)/.installed-%: constraints.txt pyproject.toml | $(VENV)/.created
	$(RUN) tools/requirements.py $* > $(VENV)/requirements-$*.txt
	$(INSTALL) -r $(VENV)/requirements-$*.txt
	touch $@
