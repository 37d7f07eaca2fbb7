//! What tests need of a machine. A test that lacks something is recorded as skipped, because test
//! runners count it as passed. `skipped-tests` lists the records at the end of a run.

mod find;
mod ports;
mod skips;

pub use find::{
    find_program, find_python_environment, ordinary_user_command, require_container_engine,
    require_fuse, require_llama_cpp, require_llama_cpp_sources, require_llama_cpp_with_vulkan,
    require_namespaces, require_program, require_python_environment, require_root,
    require_system_program, require_torch_python,
};
pub use ports::free_ports;
pub use skips::{AllowedSkips, SkippedTest, clear_skipped_tests, read_skipped_tests, skip_test};
