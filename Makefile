# `make quickstart` and `make test` set up what they need.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

# For `make gpu` on a machine without a network: `make wheels` elsewhere, and bring the folder. A pure wheel is any
# Python's; the compiled ones are for Python $(WHEELS_FOR) on Linux. Name fewer of them where the machine has some.
WHEELS ?= wheels
WHEELS_FOR ?= 3.12
COMPILED ?= cffi cryptography pillow pyyaml scipy
PURE := absl-py antlr4-python3-runtime==4.9.3 attrs autodp filelock dadaptation dog-optimizer dp-accounting hydra-core markdown-it-py \
	mdurl omegaconf opacus opt-einsum packaging prodigyopt pycparser pygments rich schedulefree tabulate tqdm
PLATFORMS := $(foreach glibc,17 24 27 28,--platform manylinux_2_$(glibc)_x86_64) --platform manylinux2014_x86_64
CARRIED := $(wildcard $(WHEELS)/*.whl)
BARE := build/bare
GPU_KEYS := minutes=% device=% steps=% retry=% results=% plots=%

comma := ,
# The suites of the leaderboard's page: those that are published, and those of its block of newer methods.
TASKS := $(patsubst results/published/%/runs.jsonl.xz,%,$(sort $(wildcard results/published/leaderboard*/runs.jsonl.xz)))
NEWER := new_methods,new_methods_head,new_methods_mnist,layers,layers_head,layers_mnist

.PHONY: install quickstart test versions full mutants bench docs leaderboard evidence lint gpu wheels clean

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

quickstart: install
	$(BIN)/dpopt run suite=quickstart
	$(BIN)/dpopt table suite=quickstart
	$(BIN)/dpopt plot suite=quickstart

test: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m pytest --numprocesses auto --dist loadfile

# The default tests under each Python that README names; `python3.12` and so on have to be there.
versions:
	for each in 3.11 3.12 3.13; do $(MAKE) test PYTHON=python$$each VENV=build/python$$each || exit 1; done

full: test
	$(BIN)/python -m pytest -m 'slow and not gpu'
	HYPOTHESIS_PROFILE=full $(BIN)/python -m pytest tests/privacy -k "properties or noise"

mutants: install
	$(BIN)/python tests/mutation list=kernel
	$(BIN)/python tests/mutation list=house

bench: install
	$(BIN)/python benchmarks/speed/ratios.py $(foreach key,$(filter rounds=% store=%,$(MAKEOVERRIDES)),'$(key)')

docs: install
	$(BIN)/python -m sphinx -W --keep-going -b html docs docs/_build

leaderboard: install
	$(BIN)/dpopt leaderboard suite=[$(subst $() ,$(comma),$(TASKS))] results=results/published against=dp_adam to=docs/leaderboard
	$(BIN)/dpopt leaderboard suite=[$(NEWER)] results=results/published against=dp_adam to=docs/leaderboard/newer

evidence: install
	$(BIN)/python docs/evidence.py

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

gpu: $(if $(CARRIED),$(BARE)/.installed,install)
	$(if $(CARRIED),$(BARE)/bin,$(BIN))/python benchmarks/gpu.py $(foreach key,$(filter $(GPU_KEYS),$(MAKEOVERRIDES)),'$(key)')

# An environment around $(PYTHON)'s own and this source tree, so that the torch that is there is used and nothing there
# is changed. (A venv of a venv with --system-site-packages would see the packages of the outermost Python alone.)
$(BARE)/.installed: $(CARRIED)
	$(PYTHON) -m venv --without-pip --clear $(BARE)
	$(PYTHON) -c 'import sys; print("$(CURDIR)", *[path for path in sys.path if path.endswith("-packages")], sep="\n")' \
		> "$$($(BARE)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/around.pth"
	$(BARE)/bin/python -m pip install --quiet --disable-pip-version-check --no-index --no-deps --find-links $(WHEELS) \
		$$(ls $(WHEELS) | sed 's/-.*//')
	touch $@

wheels:
	rm -rf $(WHEELS)
	$(PYTHON) -m pip wheel --quiet --disable-pip-version-check --no-deps --constraint constraints.txt \
		--wheel-dir $(WHEELS) $(PURE)
	$(PYTHON) -m pip download --quiet --disable-pip-version-check --no-deps --constraint constraints.txt \
		--only-binary=:all: --python-version $(WHEELS_FOR) --implementation cp $(PLATFORMS) --dest $(WHEELS) $(COMPILED)
	du -sh $(WHEELS)

clean:
	rm -rf $(VENV) build docs/_build docs/generated $(WHEELS) *.egg-info
