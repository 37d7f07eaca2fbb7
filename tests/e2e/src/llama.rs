//! llama.cpp, and agents that generate with it.

use std::path::Path;

use requirements::{require_llama_cpp, require_llama_cpp_with_vulkan};

use crate::{Fleet, Member, write_script};

/// Returns the directory of the llama.cpp programs. Records this test as skipped and returns `None`
/// without them.
pub fn find_llama_cpp() -> Option<String> {
    require_llama_cpp().map(|directory| directory.display().to_string())
}

/// Returns the directory of a llama.cpp that computes on Vulkan with a driver for CPUs. Records this
/// test as skipped and returns `None` without it.
pub fn find_llama_cpp_with_vulkan() -> Option<String> {
    require_llama_cpp_with_vulkan().map(|directory| directory.display().to_string())
}

/// Writes a llama.cpp that starts the programs of another one, the server after the lines
/// `before_server` of a shell. Returns its directory.
pub fn write_llama_cpp(directory: &Path, programs: &str, before_server: &str) -> String {
    std::fs::create_dir_all(directory).expect("a directory");
    for (name, before) in [("llama-server", before_server), ("llama-perplexity", "")] {
        write_script(&directory.join(name), &format!("{before}\nexec '{programs}/{name}' \"$@\""));
    }
    directory.display().to_string()
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
