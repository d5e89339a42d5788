# make demo: train on real digits and look at samples.  make test: all tests.  Both set up their own environment.

# The first Python that is new enough and can make virtual environments. Choose another: make demo PYTHON=python3.12
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
PY := .venv/bin/python
NET := out/demo/network-snapshot-0000115.200-0.100.safetensors

.PHONY: demo test torture bench clean

demo: .venv/installed-demo
	$(PY) -m edm2 dataset digits out/digits.zip
	$(PY) train.py --outdir=out/demo --data=out/digits.zip --preset=digits
	$(PY) sample.py --net=$(NET) --outdir=out/demo/samples --seeds=0-99 --class=0-9 --steps=18 --batch=100 \
		--grid=out/demo/samples.png --scale=5
	$(PY) -m edm2 plot out/demo
	$(PY) -m edm2 metrics recognise --net=$(NET) --data=out/digits.zip

test: .venv/installed-test
	$(PY) -m tests

torture: .venv/installed-test
	$(PY) -m pytest -q -m torture
	TRITON_INTERPRET=1 $(PY) -m pytest -q -m torture tests/test_triton_network.py

bench: .venv/installed-test
	$(PY) -m pytest -q bench

clean:
	rm -rf .venv out

.venv/installed-demo: EXTRAS = digits,plot
.venv/installed-test: EXTRAS = test
.venv/installed-%: pyproject.toml
	@test -n "$(PYTHON)" || { echo "Error: Python 3.11 or newer with the venv module is needed (Debian: apt install python3-venv); or name one: make $(MAKECMDGOALS) PYTHON=/path/to/python"; exit 1; }
	@test -x $(PY) || $(PYTHON) -m venv .venv
	@echo "Installing PyTorch and the rest into .venv: minutes, and on Linux gigabytes ..."
	$(PY) -m pip install --quiet --editable '.[$(EXTRAS)]'
	@touch $@
