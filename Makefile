# The main targets are `make demo` and `make test`. Both fetch missing tools. `make static` and
# `make deb` build files for other hosts.

CARGO ?= cargo
CARGO_TOOLS := PATH="$(CURDIR)/.tools/cargo/bin:$$PATH"
NEXTEST := $(shell command -v cargo-nextest 2>/dev/null)

.PHONY: help demo build static notices deb test test-torch lint check-dependencies tools browser bench sim \
	fuzz chaos

# Builds contain the commit in their version: 0.1.0+g1234abc. Outside of a checkout it is the
# version of the package.
PACKAGE_VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)
COMMIT := $(shell git describe --always --dirty=.dirty --exclude '*' --abbrev=7 2>/dev/null)
demo build static deb bench: export FLOTILLA_VERSION := $(PACKAGE_VERSION)$(if $(COMMIT),+g$(COMMIT))

help:
	@echo "make demo          run a whole fleet on this machine; about a minute after the build"
	@echo "make build         build the release program"
	@echo "make static, deb   build one static binary, a Debian package"
	@echo "make test          run lints and all tests but those of PyTorch"
	@echo "make test-torch    run the tests of the PyTorch trainer (fetches about 2 GB)"
	@echo "make lint          check formatting; run clippy and cargo doc with warnings as errors"
	@echo "make check-dependencies\n                   check licences, sources, advisories and unused dependencies"
	@echo "make tools         fetch nats-server and llama.cpp into .tools"
	@echo "make browser       install chromium for the tests of the web page (root)"
	@echo "make sim           simulate fleets with faults: SEED=7, or SEEDS=10000"
	@echo "make chaos         kill processes of a real fleet: CHAOS_KILLS=200, CHAOS_SEED=n"
	@echo "make bench         measure this machine: ARGS='engine --json'"
	@echo "make fuzz          fuzz a parser: TARGET=facts SECONDS=60"

demo: tools
	$(CARGO) run --release --bin flotilla -- demo $(ARGS)

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

# A Debian package with the static binary, in target/debian. Needs `cargo install cargo-deb`.
# Inspect it with `dpkg-deb --info --contents target/debian/*.deb`.
deb: static notices
	mkdir -p target/completions target/debian
	$(STATIC) man target/man
	$(STATIC) completions bash > target/completions/flotilla.bash
	$(STATIC) completions zsh > target/completions/_flotilla
	$(STATIC) completions fish > target/completions/flotilla.fish
	$(CARGO) deb -p flotilla --no-build --no-strip --target $(MUSL) --output target/debian/

# All checks of CI. The tests of processes need the program, built with the same features as the
# tests, so that dependencies are compiled once.
test: tools lint
	$(CARGO) build --workspace --bins --tests
ifdef NEXTEST
	$(CARGO) nextest run --workspace
else
	$(CARGO) test --workspace --lib --bins --tests
endif

# The tests of the PyTorch trainer, which `make test` skips. They run on the CPU in an environment
# in .tools, unless FLOTILLA_TORCH_PYTHON names a suitable interpreter.
TORCH_PYTHON := $(or $(FLOTILLA_TORCH_PYTHON),$(CURDIR)/.tools/torch/bin/python)

test-torch: tools
	@FLOTILLA_TORCH_PYTHON=$(FLOTILLA_TORCH_PYTHON) deploy/fetch-torch.sh
	cd agents/trainer/python && $(TORCH_PYTHON) -W ignore -m unittest discover -s tests -t .
	$(CARGO) build --workspace --bins --tests
ifdef NEXTEST
	FLOTILLA_TORCH_PYTHON=$(TORCH_PYTHON) $(CARGO) nextest run --workspace --no-tests fail \
		-E 'binary(pytorch) + binary(torch) + test(plain_hugging_face)'
else
	FLOTILLA_TORCH_PYTHON=$(TORCH_PYTHON) $(CARGO) test --workspace --test pytorch --test torch -- \
		--test-threads 1
endif

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

# Fetches nats-server and llama.cpp to .tools, unless they are installed.
tools:
	@deploy/fetch-nats-server.sh
	@deploy/fetch-llama-cpp.sh || echo "make: no llama.cpp: tests that need it will be skipped" >&2

# Installs a browser for the tests of the web page, unless there is one.
browser:
	@deploy/fetch-chromium.sh || echo "make: no chromium: tests that need it will be skipped" >&2

# Simulates one seed with its trace (make sim SEED=7), or ten thousand seeds.
sim:
	$(CARGO) run --release -p sim -- $(if $(SEED),--seed $(SEED),--seeds $(or $(SEEDS),10000))

# A long chaos test; CI runs a short one. CHAOS_SEED=n repeats a test.
chaos: tools
	$(CARGO) build -p flotilla
	CHAOS_KILLS=$${CHAOS_KILLS:-200} $(CARGO) test -p e2e --test chaos -- --nocapture

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
