# Needs only make and Python >= 3.11; everything else goes into .venv.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check
# Two levels of set-up: what `make demo` needs, with the C++ engine; then a developer's tools.
DEMO := .venv/.unisono-demo
STAMP := .venv/.unisono-setup
# What Python sees of the C++ engine; written by `make native`.
STUB := src/unisono/_engine.pyi
SITE := .venv/.unisono-extra-docs
RELEASE := .venv/.unisono-extra-release
TORCH := torch==2.13.0
# Kept between builds, so that after an edit only the changed C++ files are compiled.
export SKBUILD_BUILD_DIR := build/{wheel_tag}
WORKERS ?= 4
PYTEST := $(BIN)/python -m pytest -q
PARALLEL = -n $(WORKERS) --dist worksteal
# Where it is set, as in many images, each of the thousand processes of a run of the tests compiles
# all that it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-all servers frameworks peers test-reference test-gpu test-torch test-portable test-arm test-pythons check setup native test-native planted fuzz chaos-mpi chaos-windows fuzz-membership fuzz-cuts fuzz-stores fuzz-signals docs site wheels clean
.DEFAULT_GOAL := help

help:
	@echo "make demo    train on handwritten digits with four processes"
	@echo "make test    run every check, then the tests with a sample of the sweeps"
	@echo "make test-all  run every check and every test, as CI does"
	@echo "make test-reference  group and fault tests once more, on the reference engine"
	@echo "make test-gpu  NCCL and IntraNodeComm on a GPU; without a GPU the kernels' compilation and model"
	@echo "make test-torch  torch's own tests of a backend, on Gloo and on unisono"
	@echo "make test-portable  a sample of the tests as on macOS: Linux's own facilities are hidden"
	@echo "make test-arm  the C++ engine for aarch64, under qemu (Debian, root)"
	@echo "make test-pythons  a wheel and a sample of tests for each Python (PYTHONS='...')"
	@echo "make servers install redis, etcd, Slurm, Open MPI and sshd for tests (Debian, root)"
	@echo "make frameworks  install accelerate, lightning, Ray, Dask and Spark, which some tests use"
	@echo "make peers   install Intel MPI, Open MPI and DeepSpeed's sum for 'unisono bench' (PEERS='...')"
	@echo "make check   format, lint, types, layers, sizes, language (no tests)"
	@echo "make setup   create .venv with unisono, editable, and the tools of a developer"
	@echo "make native  rebuild the C++ engine after an edit (test-native: its own tests)"
	@echo "make planted  plant faults in a copy of the tree; the tests must catch each (ONLY=NAME)"
	@echo "make fuzz    random calls against NumPy (SEED=1 ROUNDS=300)"
	@echo "make chaos-mpi  ranks that are killed, stopped, late or wrong under MPI (ROUNDS=200)"
	@echo "make chaos-windows  ranks that are killed, stopped, late or leave at windows (ROUNDS=200)"
	@echo "make fuzz-membership  random lives of a job whose ranks come and go"
	@echo "make fuzz-cuts  random cuts of hosts and links between them (needs root)"
	@echo "make fuzz-stores  ten minutes of nonsense for store servers and clients"
	@echo "make fuzz-signals  signals at random moments of launches (SEED=1 ROUNDS=300)"
	@echo "make docs    write the generated pages of docs, and the stub of unisono"
	@echo "make site    build the documents with an API reference into build/site"
	@echo "make wheels  build dist/ for each installed Python (PYTHONS='...'), and try each wheel"
	@echo "make clean   remove .venv, caches and build output"

demo: $(DEMO)
	@$(BIN)/unisono run --fold=never -n 4 examples/train_digits.py
	@echo "next: source .venv/bin/activate, then the tutorial, docs/tutorial/1-two-processes.md"

# The checks run beside the tests. Tests that bound a time run last, with nothing beside them.
# A shell lets what runs beside it ignore Ctrl-C, so the trap ends the checks.
test: $(STAMP)
	@make --no-print-directory check >.venv/check.log 2>&1 & trap "kill $$!; exit 130" INT; \
	$(PYTEST) $(PARALLEL) -m "not alone"; tests=$$?; \
	wait $$!; checks=$$?; trap - INT; cat .venv/check.log; \
	test $$tests$$checks = 00 && $(PYTEST) -m alone

test-all: check
	@$(PYTEST) --all $(PARALLEL) -m "not alone"
	@$(PYTEST) --all -m alone

# What tests of stores and launchers start and stop; without them these tests are skipped.
# Slurm loads libpmix.so, which only the package for developers has.
servers:
	@command -v redis-server >/dev/null && command -v etcd >/dev/null && command -v srun >/dev/null \
		&& command -v mpirun.openmpi >/dev/null && test -x /usr/sbin/sshd \
		|| { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && apt-get update -qq \
		&& DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends \
			redis-server etcd-server slurmctld slurmd slurm-client libpmix-dev \
			openmpi-bin openssh-server openssh-client >/dev/null; } \
		|| echo "redis, etcd, Slurm, Open MPI or sshd is not there: tests that need it will be skipped"

# Not in the extra `test`: they are large, and some require torch, which may not be there.
frameworks: $(STAMP)
	@$(PIP) ray distributed pyspark \
		|| echo "Ray, Dask and Spark are not there: tests that need them will be skipped"
	@command -v java >/dev/null || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null \
		&& apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y \
			--no-install-recommends default-jre-headless >/dev/null; } \
		|| echo "java is not there: tests that need Spark will be skipped"
	@$(BIN)/python -c "import torch" 2>/dev/null && $(PIP) '$(TORCH)' accelerate lightning \
		|| echo "accelerate and lightning are not there: tests that need them will be skipped"

# Each in a folder of its own, because wheels of MPI libraries own the same files. DeepSpeed's sum is
# compiled, which takes a minute.
PEERS ?= intel-mpi open-mpi deepspeed
peers: $(STAMP)
	@$(BIN)/python tools/peers.py $(PEERS)

# The tests that run on the native engine by default, on the reference engine.
test-reference: $(STAMP)
	@UNISONO_ENGINE=reference $(PYTEST) --all tests/core tests/beyond tests/faults

# On a machine with a GPU, torch and nccl4py; ranks share the GPU. At most 8 minutes; ends with a table.
# If they are in another environment, or without a network: make test-gpu STAMP= BIN=FOLDER, where
# FOLDER/python has unisono and pytest, too.
LOGS ?= build/gpu-check
test-gpu: $(STAMP)
	@$(BIN)/python -m tests.adapters.nccl.gpu_check --logs $(LOGS)

# torch's own tests of a backend: every one that passes on Gloo passes on unisono. Some 20 minutes.
test-torch: $(STAMP)
	@mkdir -p build
	@for n in 3 4; do \
		$(BIN)/python tests/adapters/torch/suite.py --world-size $$n --backend gloo --save build/gloo-$$n.json; \
		$(BIN)/python tests/adapters/torch/suite.py --world-size $$n --like build/gloo-$$n.json || exit 1; \
	done

# What Linux has and macOS lacks is hidden (tests/support/as_darwin); on macOS nothing is there to
# hide. Some 4 minutes on 2 cores.
PORTABLE := $(addprefix tests/core/,base stores rendezvous transports platform) tests/launcher \
	$(addprefix tests/core/collectives/test_,api.py mismatch.py numbers.py objects.py) \
	$(addprefix tests/core/groups/test_,process_group.py subgroups.py work.py) \
	tests/core/messages/test_p2p.py \
	$(addprefix tests/faults/test_,deadlines.py hangs.py killed.py leaving.py stopped.py)
test-portable: $(STAMP)
	@PYTHONPATH="$(CURDIR)/tests/support/as_darwin" $(PYTEST) $(PARALLEL) -m "not alone" $(PORTABLE)

# Both take minutes, and what they install comes from Debian and PyPI.
test-arm: $(STAMP)
	@$(BIN)/python tools/trees.py arm64

test-pythons: $(STAMP)
	@$(BIN)/python tools/pythons.py $(PYTHONS)
	@test -n "$(PYTHONS)" || $(BIN)/python tools/trees.py python3.14

check: $(STAMP)
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy --no-error-summary
	@$(BIN)/mypy --no-error-summary --platform darwin --no-warn-unreachable --cache-dir .mypy_cache/darwin
	@# IS_LINUX: so that mypy leaves out what runs on Linux alone.
	@$(BIN)/mypy --no-error-summary --platform win32 --no-warn-unreachable --always-false IS_LINUX \
		--cache-dir .mypy_cache/win32
	@$(BIN)/lint-imports --no-logo >.venv/layers.log || { cat .venv/layers.log; exit 1; }
	@$(BIN)/python tools/size.py
	@$(BIN)/python tools/names.py
	@$(BIN)/python tools/prose.py
	@$(BIN)/python tools/tidy.py

docs: $(STAMP)
	@$(BIN)/python tools/stub.py
	@$(BIN)/python tools/mpi4py_stub.py
	@$(BIN)/python tools/api_pages.py
	@$(BIN)/python tools/algorithms_page.py
	@$(BIN)/python tools/compatibility_page.py
	@$(BIN)/python tools/detection_page.py
	@$(BIN)/python tools/environment_page.py
	@$(BIN)/python tools/errors_page.py
	@$(BIN)/python tools/matrix_page.py
	@$(BIN)/python tools/mpi4py_page.py
	@$(BIN)/python tools/pictures.py
	@$(BIN)/python tools/promises_page.py
	@$(BIN)/python benchmarks/tables.py

# Fails on a dead link, and on a public name without a docstring or without a page.
site: $(SITE)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict >.venv/site.log 2>&1 \
		|| { cat .venv/site.log; exit 1; }
	@echo "built build/site/index.html"

# Builds dist/ for each installed Python, and tries each wheel without a compiler. Some 40 s for each.
wheels: $(RELEASE)
	@$(BIN)/python tools/wheels.py $(PYTHONS)

# The packages of dependency groups, for any pip: `pip install --group` needs 25.1.
GROUPS = $(BIN)/python -c "import sys, tomllib; \
	groups = tomllib.load(open('pyproject.toml', 'rb'))['dependency-groups']; \
	print(*(each for name in sys.argv[1:] for each in groups[name] if isinstance(each, str)), sep='\n')"

# The tools of the site and of a release are not needed for anything else.
$(SITE): | $(STAMP)
.venv/.unisono-extra-%: pyproject.toml | $(DEMO)
	@$(GROUPS) $* >.venv/$*.txt
	@$(PIP) -r .venv/$*.txt
	@touch $@

setup: $(STAMP)
	@echo "next: source .venv/bin/activate, then unisono help, make test, and CONTRIBUTING.md"

# What a build needs comes with the first level, because all builds run without pip's isolation.
# Bytecode is compiled at the first import: compiling all of NumPy's takes longer.
# After `git pull` the C++ engine may be that of older sources, so the stub counts, too.
$(DEMO): pyproject.toml $(STUB)
	@echo "1/3 creating .venv"
	@test -x $(BIN)/python || { $(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and \
		'unisono needs Python 3.11 or newer; choose another: make PYTHON=python3.12')" \
		&& $(PYTHON) -m venv .venv; }
	@echo "2/3 installing NumPy, rich, shtab and the build tools (50 MB)"
	@$(BIN)/python -c "import tomllib; file = tomllib.load(open('pyproject.toml', 'rb')); \
		print(*file['build-system']['requires'], *file['project']['dependencies'], \
		*file['project']['optional-dependencies']['cli'], sep='\n')" >.venv/demo.txt
	@$(PIP) --no-compile -r .venv/demo.txt 'cmake>=3.18' ninja
	@echo "3/3 compiling the C++ engine"
	@$(BIN)/python tools/build_engine.py
	@touch $@

# Torch serves only as an oracle in tests, so its absence must not stop anything. The exact
# version matters: it is the one whose behaviour the tests compare with.
$(STAMP): pyproject.toml | $(DEMO)
	@echo "installing the tools of a developer (first time: a minute or two)"
	@$(GROUPS) test dev >.venv/dev.txt
	@$(PIP) -r .venv/dev.txt
	@$(PIP) '$(TORCH)' \
		|| echo "$(TORCH) could not be installed: tests that compare with torch will be skipped"
	@touch $@

# Compiles what changed and installs it. Without pip's isolation, in which every build would be a
# build from nothing; and a compile error is an error here, not a fall-back to pure Python.
# The module knows the digest of its stub: after a change of the interface it is built again.
native: $(STAMP)
	@UNISONO_REQUIRE_NATIVE=1 $(PIP) --no-build-isolation --no-deps \
		-C cmake.define.UNISONO_STRICT=ON -e .
	@$(BIN)/python -m nanobind.stubgen --quiet -m unisono._engine -o build/_engine.pyi
	@$(BIN)/ruff format --quiet build/_engine.pyi
	@cmp -s build/_engine.pyi $(STUB) || { cp build/_engine.pyi $(STUB) && $(MAKE) --no-print-directory native; }
	@touch $(DEMO)

# The C++ tests, once per sanitizer; needs CMake and a compiler, but no Python.
test-native: build/native-asan build/native-tsan
build/native-asan: SANITIZE = address,undefined
build/native-tsan: SANITIZE = thread
build/native-asan build/native-tsan: FORCE
	@mkdir -p $(@D)
	@cmake -S . -B $@ -DUNISONO_TESTS=ON -DUNISONO_STRICT=ON -DUNISONO_SANITIZE=$(SANITIZE) \
		-DCMAKE_BUILD_TYPE=RelWithDebInfo >$@.log 2>&1 || { cat $@.log; exit 1; }
	@cmake --build $@ --parallel $(WORKERS) >$@.log 2>&1 || { cat $@.log; exit 1; }
	@ctest --test-dir $@ --output-on-failure >$@.log 2>&1 || { cat $@.log; exit 1; }
	@echo "$(@F): $$(grep 'tests passed' $@.log)"
FORCE:

# In build/planted, which stays for the next time. Some faults: make planted ONLY="NAME NAME".
planted: $(STAMP)
	@$(BIN)/python tools/planted.py $(ONLY)

SEED ?= 1
ROUNDS ?= 300
fuzz: $(STAMP)
	@$(BIN)/python -m tests.fuzz.fuzzer $(SEED) $(ROUNDS)

# Seconds of waiting in each round; UNISONO_TEST_MPI lists environments with other libraries.
chaos-mpi: $(STAMP)
	@$(BIN)/python -m tests.adapters.mpi.chaos $(ROUNDS)

# Over shared memory, messages, and messages in Python: a round of each.
chaos-windows: $(STAMP)
	@$(BIN)/python -m tests.faults.window_chaos $(ROUNDS)

fuzz-membership: $(STAMP)
	@$(BIN)/python tests/fuzz/membership.py $(SEED) $(ROUNDS)

fuzz-cuts: $(STAMP)
	@$(BIN)/python tests/fuzz/cuts.py $(SEED) $(ROUNDS)

fuzz-stores: $(STAMP)
	@$(BIN)/python tests/core/stores/fuzz.py 600

fuzz-signals: $(STAMP)
	@$(BIN)/python -m tests.fuzz.signal_storm $(SEED) $(ROUNDS)

clean:
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find src tests tools examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
