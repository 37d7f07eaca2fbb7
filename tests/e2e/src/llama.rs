//! llama.cpp, and agents that generate with it.

use std::path::{Path, PathBuf};

use crate::{Fleet, Member};

/// Returns the directory of the llama.cpp programs. Prints why and returns `None` without them.
pub fn find_llama_cpp() -> Option<String> {
    let fetched = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.tools/llama.cpp/bin");
    let directory = std::env::var_os("FLOTILLA_LLAMA_CPP").map_or(fetched, PathBuf::from);
    let exists = directory.join("llama-server").is_file();
    if !exists {
        println!("skipped: no llama.cpp; deploy/fetch-llama-cpp.sh fetches one");
        return None;
    }
    Some(directory.canonicalize().expect("a directory").display().to_string())
}

/// Starts a generator that uses llama.cpp, in addition to the agents of the fleet.
pub fn start_llama_generator(fleet: &Fleet, directory: &str, name: &str) -> Member {
    let home = fleet.path().join("agents").join(name);
    let arguments = [
        "agent",
        "--nats",
        &fleet.nats_url(),
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
