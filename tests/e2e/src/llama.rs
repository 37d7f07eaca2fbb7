//! llama.cpp, where it was fetched, and agents that generate with it.

use std::path::{Path, PathBuf};

use crate::{Fleet, Member};

/// The directory of its programs; `None`, said aloud, where there are none.
pub fn llama_cpp() -> Option<String> {
    let fetched = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.tools/llama.cpp/bin");
    let directory = std::env::var_os("FLOTILLA_LLAMA_CPP").map_or(fetched, PathBuf::from);
    let found = directory.join("llama-server").is_file();
    if !found {
        println!("skipped: no llama.cpp; deploy/fetch-llama-cpp.sh fetches one");
        return None;
    }
    Some(directory.canonicalize().expect("a directory").display().to_string())
}

/// An agent that generates with llama.cpp, beside the fleet's own.
pub fn llama_generator(fleet: &Fleet, directory: &str, name: &str) -> Member {
    let home = fleet.path().join("agents").join(name);
    let arguments = [
        "agent",
        "--nats",
        &fleet.nats(),
        "--roles",
        "generator",
        "--name",
        name,
        "--agent-dir",
        &home.display().to_string(),
        "--generator-engine",
        "llama.cpp",
        "--llama-cpp",
        directory,
        "--profile",
        "cpu",
        "--slots",
        "8",
        "--threads",
        "1",
    ];
    Member::start(name, &[], &arguments, [], &fleet.path().join("agents"))
}
