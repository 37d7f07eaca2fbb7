# Two commands: `make demo` and `make test`. Both fetch what is missing.

CARGO ?= cargo
NEXTEST := $(shell command -v cargo-nextest 2>/dev/null)

.PHONY: demo build test lint tools bench sim fuzz chaos

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

# A world in trouble, told step by step: make sim SEED=7. Without a seed: ten thousand.
sim:
	$(CARGO) build --release -p sim
	./target/release/sim $(if $(SEED),--seed $(SEED),--seeds $(or $(SEEDS),10000))

# A long campaign of kills; CI runs a short one. CHAOS_SEED=n brings one back.
chaos: tools
	$(CARGO) build -p flotilla
	CHAOS_KILLS=$${CHAOS_KILLS:-200} $(CARGO) test -p e2e --test chaos -- --nocapture

bench: tools
	$(CARGO) build --release
	./target/release/flotilla bench $(ARGS)

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
