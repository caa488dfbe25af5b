# Every target works from a fresh clone with Python 3.11 or later and make.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check install --quiet --no-compile -c constraints.txt
WORKERS ?= 2
NEWEST ?= .venv-newest
ZOO ?= .venv-zoo
TESTS ?= tests

# Where it is set, each process of a test would compile the whole package again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo site test test-all quick slow test-newest test-oldest test-gpu sweep zoo sanitize check tables bench bench-streaming clean

# pip would compile to bytecode on one core. Some libraries have files that are not for this Python.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) -e .[test,check]
	$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
	touch $@

demo: $(VENV)/.installed  ## quantize, save, reload and compare a real trained model
	$(BIN)/python examples/demo.py

site: $(VENV)/.installed  ## the documentation as a web site, into ./site
	$(BIN)/python -m mkdocs build --strict

test: $(VENV)/.installed check  ## lint, types, the quick tests and one case of each slow one
	$(BIN)/python -m pytest -n $(WORKERS) -m "not gpu" --dist worksteal --cases 1

test-all: $(VENV)/.installed check  ## lint, types and every test that needs no GPU
	$(BIN)/python -m pytest -n $(WORKERS) -m "not gpu"

quick: $(VENV)/.installed  ## the tests of a fraction of a second each, in less than a minute
	$(BIN)/python -m pytest -n $(WORKERS) -m "not gpu and not slow" $(TESTS)

slow: $(VENV)/.installed  ## time every test, and write those that `make quick` leaves out
	$(BIN)/python -m pytest -n $(WORKERS) -m "not gpu" --write-slow

test-newest:  ## every test that needs no GPU, or TESTS, on what pip gives a user today
	$(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/pip --disable-pip-version-check install --quiet --upgrade --upgrade-strategy eager -e .[test]
	$(NEWEST)/bin/python -m pytest -n $(WORKERS) -m "not gpu" $(TESTS)

# Beside the environment's Triton, not in its place. Its interpreter needs an older numpy.
test-oldest: $(VENV)/.installed  ## every Triton kernel, compiled by the oldest Triton that pyproject.toml allows
	$(BIN)/pip --disable-pip-version-check install --quiet --no-deps --upgrade --target $(VENV)/oldest \
		'triton==$(shell sed -n 's/^triton = ."triton>=\(.*\)".$$/\1/p' pyproject.toml).*'
	PYTHONPATH=$(VENV)/oldest $(BIN)/python -m pytest -n $(WORKERS) -k compile \
		tests/fused/test_triton.py tests/matmul/test_triton_gemm.py tests/moe/test_experts.py \
		tests/moe/test_triton_top_k.py

# An environment of its own: beside a torch for CPUs torchvision breaks imports of other libraries.
$(ZOO)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(ZOO)
	$(ZOO)/bin/pip --disable-pip-version-check install --quiet -c constraints.txt torch
	$(ZOO)/bin/pip --disable-pip-version-check install --quiet -c constraints.txt -e .[test] scipy
	$(ZOO)/bin/pip --disable-pip-version-check install --quiet -c constraints.txt --no-deps timm torchvision
	touch $@

# Its tests first: those that need timm or torchvision are skipped everywhere else.
zoo: $(ZOO)/.installed  ## hundreds of tiny architectures, into docs/zoo.md; an hour of two cores
	$(ZOO)/bin/python -m pytest -n $(WORKERS) -m "not gpu" tests/zoo tests/conversion/test_roles.py
	$(ZOO)/bin/python tests/zoo --processes $(WORKERS)

check: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python benchmarks/tables.py --check
	$(BIN)/python benchmarks/plot.py --check

# On a GPU machine the environment (torch with CUDA, triton) is the machine's own. A signal does not
# end a call that waits for a kernel for ever; a thread ends the process, and the test is named.
GPU_TESTS = PYTHONPATH=src $(PYTHON) -m pytest -m gpu -n $(WORKERS) --dist worksteal -p no:benchmark --timeout-method thread

test-gpu:
	$(GPU_TESTS)

# Every size at which a kernel is cut another way; `make test-gpu` takes a sample of them.
sweep:
	FP8KIT_SWEEP=all $(GPU_TESTS) \
		tests/quantizers/test_every_edge.py tests/matmul/test_every_edge.py tests/moe/test_every_edge.py

# On a Hopper machine; `pip install nvidia-cuda-sanitizer-api` where there is no CUDA toolkit.
sanitize:
	PYTHONPATH=src $(PYTHON) tests/sanitize.py

tables: $(VENV)/.installed  ## the tables and the plot of the documents, from benchmarks/results
	$(BIN)/python benchmarks/tables.py
	$(BIN)/python benchmarks/plot.py

# On a GPU machine; then `make tables`. The heads of benchmarks/peers.py and
# benchmarks/expert_peers.py say how to bring peers; VLLM is the folder of the second, and
# FLASHINFER that of benchmarks/flashinfer_peer.py.
bench:
	PYTHONPATH=src $(PYTHON) benchmarks/quantizers.py benchmarks/results/quantizers.json
	PYTHONPATH=src $(PYTHON) benchmarks/fused.py benchmarks/results/fused.json
	PYTHONPATH=src $(PYTHON) benchmarks/linear.py benchmarks/results/linear.json --shapes 8b,ds,dit,70b --quick
	PYTHONPATH=src $(PYTHON) benchmarks/linear.py benchmarks/results/linear_odd.json --shapes odd --cases row,block,row_fast --quick
	PYTHONPATH=src $(PYTHON) benchmarks/mx_speed.py benchmarks/results/mx_speed.json --shapes 8b,ds,dit,70b --quick
	PYTHONPATH=src $(PYTHON) benchmarks/experts.py benchmarks/results/experts.json --quick $(if $(VLLM),--vllm $(VLLM)) $(if $(FLASHINFER),--flashinfer $(FLASHINFER))
	PYTHONPATH=src $(PYTHON) benchmarks/host.py benchmarks/results/host.json
	PYTHONPATH=src $(PYTHON) benchmarks/decoder_layer.py benchmarks/results/decoder_layer.json
	PYTHONPATH=src $(PYTHON) benchmarks/compiled.py benchmarks/results/compiled.json
	PYTHONPATH=src $(PYTHON) benchmarks/generation.py llama benchmarks/results/generation_llama.json
	PYTHONPATH=src $(PYTHON) benchmarks/generation.py qwen benchmarks/results/generation_qwen.json --layers 8
	PYTHONPATH=src $(PYTHON) benchmarks/diffusion.py benchmarks/results/diffusion.json

bench-streaming: $(VENV)/.installed  ## needs no GPU, 12 GB of disk and an idle machine
	$(BIN)/python benchmarks/streaming.py benchmarks/results/streaming.json

clean:
	rm -rf site $(VENV) $(NEWEST) $(ZOO) .demo .pytest_cache .mypy_cache .ruff_cache .hypothesis
