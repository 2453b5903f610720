# Two commands do everything: `make demo` and `make test`. Both set the machine up first.
PY := .venv/bin/python
.PHONY: gpu-check setup demo test test-slow test-fast bench lint format docs fuzz soak clean

setup:
	@bash scripts/setup.sh

demo: setup
	$(PY) examples/demo.py

# tests/parallel runs on several ranks: tests/test_parallel.py launches it under mpirun and horovodrun. Launches get the
# machine to themselves, everything else runs two at a time.
test: setup
	$(PY) -m pytest tests/single -m "not slow" -q -n 2 --dist worksteal --durations=10
	$(PY) -m pytest tests --ignore=tests/parallel --ignore=tests/single -m "not slow" --durations=25

# the long ones: exhaustive sweeps, 2^31 elements, four ranks, packaging
test-slow: setup
	$(PY) -m pytest tests --ignore=tests/parallel -m slow --durations=25

test-fast: setup
	$(PY) -m pytest tests/single -m "not slow" -q -n 2 --dist worksteal

CPP := $(wildcard cuda/*.h cuda/*.inc cuda/*.cpp cuda/*.cu tests/*/*.h tests/*/*.cpp)
lint: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	.venv/bin/clang-format --dry-run --Werror $(CPP)
	$(PY) -m mypy

format: setup
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	.venv/bin/clang-format -i $(CPP)

docs: setup
	$(PY) -m mkdocs build --strict --quiet
	@echo "docs: open out/docs/index.html"

bench: setup
	$(PY) benchmarks/run_all.py

# Malformed bytes for the kernels, under sanitizers: make fuzz SECONDS=3600
SECONDS ?= 600
fuzz: setup
	$(PY) tests/fuzz/fuzz.py --seconds $(SECONDS)

# For the first person who has a GPU: one text file to send back; docs/install.md says what it means
gpu-check: setup
	$(PY) -m horovod_aps.tools.gpu_check

# A long run on two ranks: memory, handles, names, replicas; its figures are in docs/reliability.md
soak: setup
	$(PY) benchmarks/soak.py

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache out
