# The two commands of the README are `make run` and `make test`. Everything sets up .venv by itself and is quick the
# second time.
PYTHON ?= python3
VENV ?= .venv
BUILD ?= build

export PYTHON
export PATH := $(abspath $(VENV))/bin:$(PATH)
# Tests and demo are small: more threads than cores only make two processes on one machine wait for each other.
export OMP_NUM_THREADS ?= 1

NATIVE_SOURCES := CMakeLists.txt $(shell find native -name '*.cpp' -o -name '*.hpp' -o -name 'CMakeLists.txt' 2>/dev/null)
STAMPS := $(VENV)/.stamps

.PHONY: help run test native-test sanitize lint types imports format-check python-test break-rules bench constraints \
        clean setup
.DEFAULT_GOAL := help

help:
	@echo "make run          a KV cache handed over on both lanes, and the incident refused"
	@echo "make test         lint, types, imports, C++ tests, Python tests"
	@echo "make bench        speed of both lanes against memcpy and a plain C stream"
	@echo "make native-test  C++ tests only     make sanitize  the same under ASan + UBSan, and TSan"
	@echo "make lint         ruff, mypy, import contracts, clang-format"
	@echo "make break-rules  takes each safety rule out and demands that its tests fail (docs/safety.md)"
	@echo "make clean        removes build outputs and the virtual environment"

setup: $(STAMPS)/installed

$(STAMPS)/system: scripts/system-packages
	@scripts/system-packages
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/python: $(STAMPS)/system pyproject.toml constraints.txt scripts/setup-python scripts/requirements.py
	@scripts/setup-python $(VENV)
	@mkdir -p $(STAMPS) && touch $@

# Editable, so that Python changes need no install; the C++ core is rebuilt when its sources change.
$(STAMPS)/installed: $(STAMPS)/python $(NATIVE_SOURCES)
	@echo "Building the C++ core"
	@$(VENV)/bin/python -m pip install -qq --no-deps --no-build-isolation -e .
	@touch $@

run: setup
	@$(VENV)/bin/kvxfer demo --lane both

bench: setup
	@$(VENV)/bin/kvxfer bench --lane local
	@$(VENV)/bin/kvxfer bench --lane tcp

test: lint native-test python-test

lint: setup format-check types imports
	@ruff check .

types: setup
	@mypy

imports: setup
	@lint-imports --no-logo --no-cache

format-check: setup
	@scripts/check-format clang-format

native-test: setup
	@mkdir -p $(BUILD)
	@scripts/native-tests $(BUILD)/tests

sanitize: setup
	@mkdir -p $(BUILD)
	@scripts/native-tests $(BUILD)/tests-asan address,undefined
	@scripts/native-tests $(BUILD)/tests-tsan thread

python-test: setup
	@$(VENV)/bin/python -m pytest

break-rules: setup
	@$(VENV)/bin/python scripts/break-rules --work $(BUILD)/rules

constraints: setup
	@scripts/freeze $(VENV) > constraints.new && mv constraints.new constraints.txt

clean:
	rm -rf $(BUILD) $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
