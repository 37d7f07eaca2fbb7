# The main targets are `make demo`, `make test` and `make test-all`. They fetch missing tools.
# `make release` and `make static` build files for other hosts.

CARGO ?= cargo
CARGO_TOOLS := PATH="$(CURDIR)/.tools/cargo/bin:$$PATH"

.PHONY: help demo build static notices release test test-all linted-tests test-torch lint \
	check-dependencies tools test-tools python-client goldens spec-reference bench sim fuzz mutants \
	chaos

# Builds contain the commit in their version: 0.1.0+g1234abc. Outside of a checkout it is the
# version of the package.
PACKAGE_VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)
COMMIT := $(shell git describe --always --dirty=.dirty --exclude '*' --abbrev=7 2>/dev/null)
demo build static release bench: export FLOTILLA_VERSION := $(PACKAGE_VERSION)$(if $(COMMIT),+g$(COMMIT))

help:
	@echo "make demo          run a whole fleet on this machine; about a minute after the build"
	@echo "make build         build the release program"
	@echo "make release       build wheels, tarballs, Debian packages: PARTS='wheel', images"
	@echo "make static        build one static binary for any Linux, also without glibc"
	@echo "make test          check formatting and run the quick tests: before each commit"
	@echo "make test-all      run lints and all tests, those of PyTorch included, as CI does"
	@echo "make test-torch    run the tests of the PyTorch trainer alone"
	@echo "make python-client\n                   generate the messages and the sync calls of the Python client again"
	@echo "make goldens       make the goldens of the tests again, with PyTorch and llama.cpp"
	@echo "make lint          check formatting; run clippy and cargo doc with warnings as errors"
	@echo "make check-dependencies\n                   check licences, sources, advisories and unused dependencies"
	@echo "make tools         fetch nats-server, llama.cpp and cargo-nextest"
	@echo "make test-tools    fetch what all tests need: PyTorch, a browser, promtool and others"
	@echo "make spec-reference\n                   write the page and the schema of the keys of run specs"
	@echo "make sim           simulate fleets with faults: SEED=7, or SEEDS=10000"
	@echo "make chaos         kill processes of a real fleet, cut its power: CHAOS_KILLS=1000,\n                   CHAOS_SEED=n, POWER_LOSSES=50, POWER_LOSS_SEED=n,\n                   FLOTILLA_ACROSS_SEEDS=7"
	@echo "make bench         measure this machine: ARGS='engine --json'"
	@echo "make fuzz          fuzz a parser: TARGET=facts SECONDS=60"
	@echo "make mutants       change the cores in one place at a time; unit tests must notice it"

# Built without optimisation, because optimising takes longer than the demo.
demo:
	@deploy/fetch-nats-server.sh
	$(CARGO) run --bin flotilla -- demo $(ARGS)

build:
	$(CARGO) build --release

# One static binary for any Linux of this architecture. Needs a C compiler for musl (Debian's
# musl-tools) and `rustup target add` of MUSL.
MUSL := $(shell uname -m)-unknown-linux-musl
STATIC := target/$(MUSL)/release/flotilla

static:
	CC_$(subst -,_,$(MUSL))=musl-gcc $(CARGO) build --release --bin flotilla --target $(MUSL)

# The notices of the crates in the program, for packages and images.
notices:
	deploy/fetch-cargo-tools.sh cargo-about
	$(CARGO_TOOLS) $(CARGO) about generate --locked --manifest-path services/flotilla/Cargo.toml \
		--output-file target/third-party.txt deploy/notices.hbs

# The files of a release, in target/release-files: see the head of the script.
release:
	deploy/build-release.sh $(PARTS)

# Unit tests, the quicker component tests, and a few whole fleets. The tests of processes need the
# programs, built with the same features as the tests, so that dependencies are compiled once.
BUILT := $(or $(CARGO_TARGET_DIR),target)/debug
QUICK := --workspace --exclude bench --exclude counts --exclude deploy --exclude fuzz --exclude sim \
	--lib --bins $(addprefix --test ,adapters all boxes bus errors gateway golden gguf hub \
	language links skew structure)

test: tools
	$(CARGO) fmt --all --check
	$(CARGO) build $(QUICK)
	$(BUILT)/skipped-tests clear
	$(CARGO_TOOLS) $(CARGO) nextest run $(QUICK); status=$$?; \
		$(BUILT)/skipped-tests list && exit $$status

# All tests. With ALLOWED_SKIPS, a skipped test that is not on that list is an error. Tools are
# fetched while crates are linted and compiled.
LINTED := RUSTC_WORKSPACE_WRAPPER=$(CURDIR)/tests/lint-and-compile.sh

test-all:
	$(CARGO) fmt --all --check
	$(MAKE) --jobs 2 --output-sync=target test-tools linted-tests
	$(BUILT)/skipped-tests clear
	$(LINTED) $(CARGO_TOOLS) $(CARGO) nextest run --workspace --profile all; status=$$?; \
		$(BUILT)/skipped-tests list $(ALLOWED_SKIPS) && exit $$status

linted-tests:
	$(LINTED) $(CARGO) build --workspace --bins --tests

# The tests of the PyTorch trainer. They run on the CPU in an environment in .tools, unless
# FLOTILLA_TORCH_PYTHON names a suitable interpreter.
test-torch: tools
	@FLOTILLA_TORCH_PYTHON=$(FLOTILLA_TORCH_PYTHON) deploy/fetch-torch.sh
	@deploy/fetch-llama-cpp.sh --sources >/dev/null
	$(CARGO) build --workspace --bins --tests
	$(BUILT)/skipped-tests clear
	$(CARGO_TOOLS) $(CARGO) nextest run --workspace --profile all --no-tests fail \
		-E 'binary(pytorch) + binary(torch) + test(/^pytorch::/) + test(plain_hugging_face)' \
		-E 'test(/^pytorch_agrees/)'
	$(BUILT)/skipped-tests list

# Generates the parts of python/flotilla that follow from proto/, docs/ERRORS.md and _async.
python-client:
	@deploy/fetch-test-tools.sh stubs
	.tools/stubs/bin/python python/generate.py

# Makes the files of tests/golden/data again.
TORCH_PYTHON := $(or $(FLOTILLA_TORCH_PYTHON),$(CURDIR)/.tools/torch/bin/python)

goldens:
	@FLOTILLA_TORCH_PYTHON=$(FLOTILLA_TORCH_PYTHON) deploy/fetch-torch.sh
	HF_HUB_OFFLINE=1 $(TORCH_PYTHON) tests/golden/make.py tests/golden/data \
		"$$(deploy/fetch-llama-cpp.sh --sources)" "$$(deploy/fetch-llama-cpp.sh)" $(MODELS)

lint:
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --workspace --no-deps --quiet

# Checks deny.toml's rules and unused dependencies. The advisory database is on GitHub.
ADVISORIES := https://github.com/RustSec/advisory-db

check-dependencies:
	deploy/fetch-cargo-tools.sh cargo-deny cargo-machete
	$(CARGO_TOOLS) $(CARGO) deny --locked check licenses bans sources
	@if timeout 30 git ls-remote --quiet $(ADVISORIES) HEAD >/dev/null 2>&1; then \
		$(CARGO_TOOLS) $(CARGO) deny --locked check advisories; \
	else \
		echo "skipped: advisories, because $(ADVISORIES) cannot be reached"; \
	fi
	$(CARGO_TOOLS) $(CARGO) machete

# Fetches nats-server, llama.cpp and cargo-nextest, unless they are installed.
tools:
	@deploy/fetch-nats-server.sh
	@deploy/fetch-llama-cpp.sh || echo "make: no llama.cpp: tests that need it will be skipped" >&2
	@deploy/fetch-cargo-tools.sh cargo-nextest

# Fetches what all tests need. Some of it is installed by apt-get, as root. The tests of what is
# absent are skipped, and listed at the end of the run.
test-tools: tools
	@deploy/fetch-test-tools.sh || echo "make: tests that need the missing tools will be skipped" >&2
	@FLOTILLA_TORCH_PYTHON=$(FLOTILLA_TORCH_PYTHON) deploy/fetch-torch.sh || \
		echo "make: no PyTorch: tests that need it will be skipped" >&2

# The JSON Schema of run specs beside the examples, and the page of all their keys.
spec-reference:
	FLOTILLA_WRITE_GENERATED=1 $(CARGO) test -p spec --test spec generated::

# Simulates one seed with its trace (make sim SEED=7), or ten thousand seeds.
sim:
	$(CARGO) run --release -p sim -- $(if $(SEED),--seed $(SEED),--seeds $(or $(SEEDS),10000))

# Long chaos tests; CI runs short ones. CHAOS_SEED=n and POWER_LOSS_SEED=n repeat a test.
chaos: tools
	$(CARGO) build -p flotilla -p requirements
	$(BUILT)/skipped-tests clear
	CHAOS_KILLS=$${CHAOS_KILLS:-1000} POWER_LOSSES=$${POWER_LOSSES:-50} \
		FLOTILLA_ACROSS_SEEDS=$${FLOTILLA_ACROSS_SEEDS:-7} \
		$(CARGO) test -p e2e --test all -- --nocapture --test-threads 1 chaos:: power_loss:: \
		across::a_training_comes_to_the_same_digest; \
		status=$$?; $(BUILT)/skipped-tests list && exit $$status

bench: tools
	$(CARGO) build --release -p flotilla -p bench
	target/release/flotilla-bench $(ARGS)

# Coverage-guided fuzzing of one target: make fuzz TARGET=facts SECONDS=60. See docs/FUZZING.md.
TARGET ?= facts
SECONDS ?= 60
FUZZ_DIR := target/fuzz/$(TARGET)

fuzz:
	RUSTC_WORKSPACE_WRAPPER=$(CURDIR)/tests/fuzz/instrument.sh \
		$(CARGO) build -p fuzz --bin libfuzzer --features libfuzzer
	mkdir -p $(FUZZ_DIR)/found
	FUZZ_TARGET=$(TARGET) ./target/debug/libfuzzer $(FUZZ_DIR)/found tests/fuzz/corpus/$(TARGET) \
		-max_total_time=$(SECONDS) -max_len=65536 -timeout=10 -rss_limit_mb=4096 \
		-artifact_prefix=$(FUZZ_DIR)/

# Changes the pure cores in one place after another. Fails if the unit tests miss a change, unless
# .cargo/mutants.toml explains it. MUTANTS='--file services/cycle/src/fold.rs' changes one file.
mutants:
	deploy/fetch-cargo-tools.sh cargo-mutants
	mkdir -p target
# 0: none is missed; 2: some are; 3: some tests hung, which notices a change, too. Such a test may
# allocate without end.
	@ulimit -v 8388608; $(CARGO_TOOLS) $(CARGO) mutants -p agent-core -p cycle --output target \
		$(MUTANTS); status=$$?; [ $$status -eq 0 ] || [ $$status -eq 2 ] || [ $$status -eq 3 ]
	@! grep . target/mutants.out/missed.txt
