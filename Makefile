# Two commands do everything: `make demo` and `make test`. Both set the machine up first.
PY := .venv/bin/python
.PHONY: setup demo test test-fast parallel bench lint docs fuzz soak clean

setup:
	@bash scripts/setup.sh

demo: setup
	$(PY) examples/demo.py

test: setup
	$(PY) -m pytest tests --ignore=tests/parallel

test-fast: setup
	$(PY) -m pytest tests/single -m "not slow" -q

lint: setup
	$(PY) -m ruff check .
	$(PY) -m mypy

docs: setup
	$(PY) -m mkdocs build --strict --quiet
	@echo "docs: open out/docs/index.html"

bench: setup
	$(PY) benchmarks/run_all.py

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache out
