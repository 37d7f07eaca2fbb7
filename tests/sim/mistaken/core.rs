//! A core with planted mistakes. `plant.rs` makes its source.

#![allow(warnings, reason = "generated")]

include!(concat!(env!("OUT_DIR"), "/src/lib.rs"));
