# Two commands: `make demo` and `make test`. Both fetch what is missing.

CARGO ?= cargo
NEXTEST := $(shell command -v cargo-nextest 2>/dev/null)

.PHONY: demo build test lint tools bench

demo: tools
	$(CARGO) build --release
	./target/release/flotilla demo $(ARGS)

build:
	$(CARGO) build --release

# Everything CI runs.
test: tools lint
	$(CARGO) build -p flotilla
ifdef NEXTEST
	$(CARGO) nextest run --workspace
else
	$(CARGO) test --workspace --lib --bins --tests
endif

lint:
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets -- -D warnings

# A current nats-server, in .tools unless there is one.
tools:
	@deploy/fetch-nats-server.sh

bench: tools
	$(CARGO) build --release
	./target/release/flotilla bench $(ARGS)
