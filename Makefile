# Needs Python 3.11 or newer (with its venv module) and make; everything else goes into .venv.
#
#   make train    the main job on the embedded text, on RANKS processes of this machine
#   make test     the whole test suite
#   make lint     ruff and mypy
#   make clean    removes .venv and every cache

PYTHON ?= python3
# Pinned: an unpinned "torch" may resolve to a newer build that brings gigabytes of CUDA libraries.
# On a machine with GPUs set TORCH to the build that fits its driver.
TORCH ?= torch==2.13.0
EXTRAS ?= dev,progress,tokenizers,tensorboard,transformers,backport
RANKS ?= 2
TRAIN_FLAGS ?=
TEST_FLAGS ?=

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# One thread per rank: ranks share the cores, and more threads than cores only wait for each other.
export OMP_NUM_THREADS ?= 1

.PHONY: train test lint clean venv
.DELETE_ON_ERROR:

train: $(READY)
	$(BIN)/torchrun --standalone --nproc-per-node $(RANKS) pretrain_gpt.py \
	  --bf16 --optimizer muon --use-distributed-optimizer \
	  --fp8-format e4m3 --fp8-recipe mxfp8 --fp8-param-gather \
	  --reuse-grad-buf-for-mxfp8-param-ag \
	  --overlap-grad-reduce --overlap-param-gather --check-param-sync-interval 20 \
	  --num-layers 2 --hidden-size 192 --num-attention-heads 6 \
	  --seq-length 128 --max-position-embeddings 128 \
	  --micro-batch-size 4 --global-batch-size 16 --train-iters 60 \
	  --lr 2e-3 --min-lr 2e-4 --lr-decay-style cosine --lr-warmup-iters 5 \
	  --log-interval 5 --eval-interval 30 --eval-iters 4 $(TRAIN_FLAGS)

test: $(READY)
	$(BIN)/python -m pytest $(TEST_FLAGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy megatron tools pretrain_gpt.py examples benchmarks tests

venv: $(READY)

$(READY): pyproject.toml setup.py Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "$(PYTHON) is older than Python 3.11; set PYTHON to one that is not"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet '$(TORCH)' numpy
	$(BIN)/python -m pip install --quiet -e '.[$(EXTRAS)]'
	@touch $(READY)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
