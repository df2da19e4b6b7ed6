# One way to do a thing, the same for people and for CI. `make help` lists it.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH ?=
ARGS ?=
PYTEST := $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder
STAMP := $(VENV)/.mooncake-installed
unexport VIRTUAL_ENV
# `make test` starts hundreds of Python processes: none of them is to compile the project anew.
unexport PYTHONDONTWRITEBYTECODE
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help install run test coverage chaos test-rdma test-compose images compose-up compose-down stress recovery check \
	format fuzz bench bench-store bench-conductor figures docs clean

help:
	@echo "make install   create .venv (nothing outside it) with everything to run and test"
	@echo "               PYTHON=python3.12   another interpreter (3.11 or newer)"
	@echo "               TORCH='torch ...'   which torch, as pip arguments. Plain PyPI gives Linux x86-64 the"
	@echo "               CUDA build (several GB); a CPU build is some 200 MB:"
	@echo "                 make install TORCH='torch --index-url URL'   (URL: the CPU index pytorch.org names)"
	@echo "                 make install TORCH=/path/to/torch-...whl"
	@echo "make run       the whole mesh on this machine; ARGS='--port 18000 --prefill 2 --decode 2'"
	@echo "make test      all tests, a file to a worker; ARGS='-k store -x -n0', or what a night has time for:"
	@echo "               ARGS='--hypothesis-profile thorough'"
	@echo "make coverage  the same tests, traced with all processes that they start (slower), and the lines run, by package"
	@echo "make chaos     the tests that kill, stop and cut off the processes of real meshes"
	@echo "make stress    writers, readers and killers over several store agents, every byte checked; ARGS='--seconds 600'"
	@echo "make recovery  seconds until index and inventory agree after Redis or an agent was lost, under load"
	@echo "make test-rdma the tests of the RDMA transport, in a guest with four Soft-RoCE devices (RDMA_VM=PATH runs it)"
	@echo "make images    the container images; wheels/ is filled with a CPU build of torch first (TORCH= as above)"
	@echo "make compose-up    images, and a mesh in containers, ready; ARGS='--scale prefill=2 --scale decode=2'"
	@echo "make compose-down  ends it; ARGS=--volumes forgets the model too"
	@echo "make test-compose  the tests of the images and of the mesh in containers (needs Docker)"
	@echo "make fuzz      schemathesis against a live mesh, by its own OpenAPI description; ARGS='--seconds 60'"
	@echo "make check     lint, format, types, import contracts (needs no network once installed)"
	@echo "make format    let ruff rewrite what it can"
	@echo "make bench     print a table of measurements, write benchmarks/results/*.json"
	@echo "make bench-store  transfers and the store beside raw sockets, memcpy and the peers, which it installs into"
	@echo "               .venv-peers (NIXL's with the torch of make install); ARGS='store --rounds 3'"
	@echo "make bench-conductor  the index and the scheduling decision, lookups beside a compiled radix tree (minutes)"
	@echo "make figures   the paper's figures, simulated: docs/figures/ and docs/evaluation.md; ARGS='--only 5,13',"
	@echo "               TRACES=../shared/traces is the folder of the published traces (minutes)"
	@echo "make docs      rewrite the generated parts of docs/"
	@echo "make clean     remove caches and build output (not .venv)"

# Asking for another torch than the installed one makes the stamp stale.
ifneq ($(TORCH),)
ifneq ($(TORCH),$(shell cat $(STAMP) 2>/dev/null))
.PHONY: $(STAMP)
endif
endif

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c 'import sys; sys.exit("Python 3.11 or newer is needed (make install PYTHON=...)" if sys.version_info < (3, 11) else 0)'
	$(if $(TORCH),$(BIN)/pip install $(TORCH))
	@grep -v '^torch==' constraints.txt > $(VENV)/constraints.txt
	$(BIN)/pip install -q -c constraints.txt hatchling editables
	$(BIN)/pip install $(if $(TORCH),-c $(VENV)/constraints.txt,-c constraints.txt) --no-build-isolation -e '.[engine,plots,test,clients]'
	@printf '%s' '$(TORCH)' > $(STAMP)

run: $(STAMP)
	@exec $(BIN)/mooncake up $(ARGS)

test: $(STAMP)
	$(PYTEST) -m "not chaos" $(ARGS)

coverage: $(STAMP)
	@rm -f .coverage .coverage.*
	$(PYTEST) -m "not chaos" --cov --cov-report= $(ARGS)
	@$(BIN)/python tests/coverage_by_package.py

chaos: $(STAMP)
	$(PYTEST) -m chaos $(ARGS)

stress: $(STAMP)
	@$(BIN)/python -m benchmarks.stress $(ARGS)

recovery: $(STAMP)
	@$(BIN)/python -m benchmarks.recovery $(ARGS)

# The guest sees this folder and the virtual environment as they are; its first start builds a kernel (minutes).
RDMA_VM ?= ../shared/tools/rdma-vm
RDMA_TIMEOUT ?= 600
RDMA_TESTS ?= tests/rdma
test-rdma: $(STAMP)
	@test -x $(RDMA_VM) || { echo "there is no $(RDMA_VM): RDMA_VM=PATH names what starts a guest with RDMA devices"; exit 2; }
	$(RDMA_VM) --nics 4 --memory 3072 --timeout $(RDMA_TIMEOUT) --dir $(CURDIR) -- \
		$(BIN)/python -m pytest -p no:cacheprovider -m rig $(RDMA_TESTS) $(ARGS)

COMPOSE ?= $(shell docker compose version >/dev/null 2>&1 && echo docker compose || echo docker-compose)
# Images hold Python 3.11. Where pip's own indexes have no CPU build, TORCH says where one is. It must have the version of
# constraints.txt: of another one the image would not take it, but CUDA from the index. wheels/.filled remembers that
# version and TORCH; another one of either fills wheels/ anew.
TORCH_PIN := $(shell sed -n 's/^torch==\([0-9.]*\).*/\1/p' constraints.txt)
FILLED_PIN := $(shell sed -n 1p wheels/.filled 2>/dev/null)
FILLED_TORCH := $(shell sed -n 2p wheels/.filled 2>/dev/null)
WANTED_TORCH := $(or $(TORCH),$(FILLED_TORCH))
ifneq ($(TORCH_PIN) $(WANTED_TORCH),$(FILLED_PIN) $(FILLED_TORCH))
.PHONY: wheels/.filled
endif
wheels/.filled:
	@rm -f wheels/*.whl wheels/.filled
	$(PYTHON) -m pip download --no-deps --only-binary=:all: --python-version 3.11 -d wheels -c constraints.txt \
		$(or $(WANTED_TORCH),torch==$(TORCH_PIN)+cpu) || \
		{ echo "no CPU build of torch $(TORCH_PIN) was found: make images TORCH='torch --index-url URL' (URL: the CPU index"; \
		  echo "that pytorch.org names), or TORCH=/path/to/torch-$(TORCH_PIN)...whl; plain 'docker compose build' takes what PyPI"; \
		  echo "has (CUDA, several GB)"; exit 2; }
	@printf '%s\n' '$(TORCH_PIN)' '$(WANTED_TORCH)' > $@

images: wheels/.filled
	$(COMPOSE) build $(ARGS)

compose-up: wheels/.filled
	$(COMPOSE) up --build --wait $(ARGS)
	@echo "ready: curl http://127.0.0.1:$${PORT:-8000}/v1/models"

compose-down:
	$(COMPOSE) --profile '*' down --remove-orphans $(ARGS)

test-compose: $(STAMP) wheels/.filled
	$(COMPOSE) build -q
	COMPOSE="$(COMPOSE)" $(BIN)/python -m pytest -m rig tests/compose $(ARGS)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

fuzz: $(STAMP)
	$(BIN)/python -m tests.clients.fuzz $(ARGS)

bench: $(STAMP)
	$(BIN)/python -m benchmarks $(ARGS)

bench-store: $(STAMP)
	$(BIN)/python -m benchmarks.store --torch="$$(cat $(STAMP))" $(ARGS)

bench-conductor: $(STAMP)
	$(BIN)/python -m benchmarks.index $(ARGS)

TRACES ?= ../shared/traces
figures: $(STAMP)
	$(BIN)/python -m simulator.figures --traces $(TRACES) $(ARGS)

docs: $(STAMP)
	$(BIN)/mooncake config-docs --output docs/configuration.md
	$(BIN)/python docs/modules.py
	$(BIN)/python docs/api.py

clean:
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .coverage .coverage.* build dist wheels/*.whl wheels/.filled
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
