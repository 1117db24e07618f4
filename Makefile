# The two commands: `make demo` trains a small GPT through all lanes, `make test` runs the tests.
# Each first makes .venv and installs the package there, unless that is done. They need Python 3.11+.
#
#   make demo            make test            make check           make bench           make docs
#   make bench-input     make bench-checkpoint    make bench-kernels    make bench-comm (as root)
#   make bench-explain   make bench-optim         make bench-plan (as root)
#   make bench-meter     make bench-faults        make bench-chaos (as root)
#   make test-dev        make test-matrix         make ahead            make resources
#   make docs            make check-package       make release-notes VERSION=0.1.0
#   make mutate: takes each wait out of the sources in turn, and sees a test fail (docs/testing.md)
#   make demo ARGS=--baseline    make test ARGS='tests/input -x'    make test PYTHON=python3.12
# Tests run in two processes: many of them wait, for ranks that start or for what is late on purpose.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python

.PHONY: demo test test-dev test-matrix check check-package docs ahead mutate release-notes resources bench bench-chaos bench-input bench-checkpoint bench-comm bench-explain bench-faults bench-kernels bench-meter bench-optim bench-plan install clean
.DEFAULT_GOAL := test

demo: install
	$(RUN) examples/train_gpt.py $(ARGS)

test: export OMP_NUM_THREADS ?= 1
test: install
	$(RUN) -m pytest -n 2 --dist worksteal --durations=15 $(ARGS)

mutate: export OMP_NUM_THREADS ?= 1
mutate: install
	PYTHONPATH=src $(RUN) -m tests.mutation $(ARGS)

# Python's development mode, in processes that tests start, too: unclosed files, and what nobody awaited, fail.
test-dev: export PYTHONDEVMODE := 1
test-dev: test

# The suite on other releases of torch with their Tritons, each in an environment of its own: some 6 GB.
# All are tried, whatever becomes of the first. make test-matrix TORCHES='2.11.0 2.15.0'
TORCHES ?= 2.11.0 2.12.1 2.14.1
test-matrix:
	$(MAKE) --keep-going $(TORCHES:%=test-torch-%)

test-torch-%: export OMP_NUM_THREADS ?= 1
test-torch-%: .matrix/%/.installed
	@.matrix/$*/bin/python -c 'import torch, triton; print("torch", torch.__version__, "triton", triton.__version__)' \
	  || { echo "torch $* does not import on this machine, see above: it stays untested here" >&2; exit 1; }
	.matrix/$*/bin/python -m pytest -n 2 --dist worksteal $(ARGS)

# All that does not belong to torch is as in development. torch's requirements may name an older setuptools.
.PRECIOUS: .matrix/%/.installed
.matrix/%/.installed: pyproject.toml constraints.txt
	@$(NEEDS_PYTHON) && $(NEEDS_ENSUREPIP)
	$(PYTHON) -m venv .matrix/$*
	grep -vE '^(torch|triton|setuptools)==' constraints.txt >.matrix/$*/constraints.txt
	.matrix/$*/bin/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	.matrix/$*/bin/python -m pip install --quiet --disable-pip-version-check -c .matrix/$*/constraints.txt \
	  torch==$* -e '.[dev]'
	@touch $@

# Kernels compiled for GPUs that are not here: for docs/resources.md, and whatever launch code can choose (hours).
resources: install
	$(RUN) benchmarks/compile_ahead.py

ahead: install
	$(RUN) benchmarks/compile_ahead.py --all $(ARGS)

check: install
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy src

docs: install
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict $(ARGS)

# With a network: every extra resolves, and the wheel works in an empty environment outside of the checkout.
check-package: install
	.ci/check-package

release-notes: # of the version in src/overlapkit/__init__.py, or of VERSION=
	@$(PYTHON) .ci/release_notes.py $(VERSION)

bench: install
	$(RUN) benchmarks/step.py $(ARGS)

# With the peers, DALI among them: some 300 MB. SPDL also needs FFmpeg's libraries. HolisticTraceAnalysis comes
# without its requirements, which bring JupyterLab.
bench-explain: BARE := HolisticTraceAnalysis==0.5.0
bench-chaos bench-input bench-checkpoint bench-comm bench-explain bench-faults bench-kernels bench-meter bench-optim bench-plan: install
	$(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	$(if $(BARE),$(RUN) -m pip install --quiet --disable-pip-version-check --no-deps $(BARE))
	$(RUN) benchmarks/$(@:bench-%=%).py $(ARGS)

install: $(VENV)/.installed

clean:
	rm -rf $(VENV) .matrix build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(VENV)/.installed: pyproject.toml constraints.txt $(VENV)/.made
	$(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

# A .venv that is there and has pip is used as it is.
$(VENV)/.made:
	@if ! $(RUN) -m pip --version >/dev/null 2>&1; then \
	    $(NEEDS_PYTHON) && $(NEEDS_ENSUREPIP) && echo "making $(VENV)" && $(PYTHON) -m venv $(VENV); \
	fi
	@touch $@

define NEEDS_PYTHON
{ $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
  || { echo "overlapkit needs Python 3.11 or newer; $(PYTHON) is: $$($(PYTHON) --version 2>&1 || true)." \
       "Name another one: make PYTHON=python3.12" >&2; exit 1; }; }
endef

# Debian's and Ubuntu's python3 leaves out ensurepip, without which venv cannot put pip into .venv.
define NEEDS_ENSUREPIP
{ $(PYTHON) -c 'import ensurepip' 2>/dev/null || { \
    package=$$($(PYTHON) -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])'); \
    if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
      echo "$(PYTHON) cannot make virtual environments: installing Debian's $$package"; \
      apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq $$package </dev/null >/dev/null; \
    else \
      echo "$(PYTHON) cannot make virtual environments; install them first: sudo apt-get install $$package" >&2; \
      exit 1; \
    fi; }; }
endef
