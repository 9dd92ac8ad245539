# make demo   set up everything and train the built-in model on this machine (writes runs/demo)
# make test   set up everything and run the tests, on up to four cores at a time; with TIERZERO_TEST_ALL=1 in all
#             combinations of what they cross, which takes some minutes more
# make dev    set up everything that .ci/run needs
# make bench  set up everything and run the benchmarks (that of the drive needs fio)
# PYTHON=python3.12 chooses the interpreter; VENV=dir the environment.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
SOURCES := pyproject.toml constraints.txt CMakeLists.txt $(shell find tierzero csrc -name '*.py' -o -name '*.pyi' -o -name '*.cpp' -o -name '*.hpp' -o -name '*.inc')
INSTALL := $(BIN)/pip install --disable-pip-version-check --constraint constraints.txt
ABOUT := the first time takes minutes: torch alone is hundreds of MB to fetch, and the native extension is compiled

# one more than there are cores, as some wait for drives and other processes, but not over four
PROCESSES := $(shell n=$$(getconf _NPROCESSORS_ONLN); echo $$((n < 3 ? n + 1 : 4)))

# torch's threads that wait for others sleep, rather than spin on a core that another process of the tests needs
TOGETHER := OMP_WAIT_POLICY=passive

.PHONY: demo test bench dev clean

demo: $(VENV)/.installed
	$(BIN)/tierzero train --overwrite

test: $(VENV)/.test-installed
	$(TOGETHER) $(BIN)/pytest tests --numprocesses $(PROCESSES) --dist worksteal

bench: $(VENV)/.installed
	$(BIN)/python benchmarks/memory.py
	-$(BIN)/python benchmarks/nvme.py
	$(BIN)/python benchmarks/adam.py
	$(BIN)/python benchmarks/step.py
	$(BIN)/python benchmarks/overlap.py
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/prefetch.py
	-$(BIN)/python benchmarks/plan.py
	$(BIN)/python benchmarks/tune.py
	$(BIN)/python benchmarks/save.py
	$(BIN)/python benchmarks/peers.py

dev: $(VENV)/.dev-installed

$(BIN)/pip:
	@echo "1 of 2: making the environment $(VENV) for $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(BIN)/pip $(SOURCES)
	@echo "2 of 2: installing tierzero and its packages into $(VENV) ($(ABOUT))"
	@$(INSTALL) .
	@touch $@

$(VENV)/.test-installed: $(BIN)/pip $(SOURCES)
	@echo "2 of 2: installing tierzero, its packages and those of its tests into $(VENV) ($(ABOUT))"
	@$(INSTALL) '.[test]'
	@touch $@ $(VENV)/.installed

$(VENV)/.dev-installed: $(BIN)/pip $(SOURCES)
	@echo "2 of 2: installing tierzero, its packages and those of its tests and checks into $(VENV) ($(ABOUT))"
	@$(INSTALL) '.[test,dev]'
	@touch $@ $(VENV)/.test-installed $(VENV)/.installed

clean:
	rm -rf $(VENV) build runs
