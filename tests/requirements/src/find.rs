//! Programs, environments and rights that tests need.

use std::{
    fs::File,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Command,
};

use crate::skip_test;

/// Returns a program on PATH or in `.tools` of this repository.
pub fn find_program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let fetched = ["bin", "cargo/bin", ""].map(|place| tools_directory().join(place));
    let mut candidates = std::env::split_paths(&path).chain(fetched).map(|place| place.join(name));
    candidates.find(|candidate| is_executable(candidate))
}

/// Returns a program on PATH or in `.tools`. Records this test as skipped and returns `None`
/// without it.
pub fn require_program(name: &str) -> Option<PathBuf> {
    require(name, &fetch_remedy(name), find_program(name))
}

/// Returns a program of the system's directories, which every sandbox shows. Records this test as
/// skipped and returns `None` without it.
pub fn require_system_program(name: &str) -> Option<PathBuf> {
    let places = ["/usr/local/bin", "/usr/bin", "/bin"].map(Path::new);
    let found = places.into_iter().map(|place| place.join(name)).find(|path| is_executable(path));
    require(name, &fetch_remedy(name), found)
}

/// Returns the directory with llama-server and llama-perplexity: what `FLOTILLA_LLAMA_CPP` names,
/// or otherwise the first of PATH and `.tools`, as `deploy/fetch-llama-cpp.sh`. Records this test
/// as skipped and returns `None` without it.
pub fn require_llama_cpp() -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut candidates: Vec<PathBuf> = match std::env::var_os("FLOTILLA_LLAMA_CPP") {
        Some(named) => vec![named.into()],
        None => {
            std::env::split_paths(&path).chain([tools_directory().join("llama.cpp/bin")]).collect()
        }
    };
    candidates.retain(|place| has_llama_cpp(place));
    let found = candidates.first().and_then(|place| place.canonicalize().ok());
    require("llama.cpp", "run deploy/fetch-llama-cpp.sh", found)
}

/// Returns the directory of a llama.cpp that computes on Vulkan with a driver for CPUs. Records this
/// test as skipped and returns `None` without it.
pub fn require_llama_cpp_with_vulkan() -> Option<PathBuf> {
    let directory = tools_directory().join("llama.cpp-vulkan/bin");
    let found = has_llama_cpp(&directory).then_some(directory);
    require("llama.cpp-vulkan", "run deploy/fetch-llama-cpp.sh --vulkan", found)
}

/// Returns the directory with llama.cpp's sources, which contain its converters: what
/// `FLOTILLA_LLAMA_CPP_SOURCES` names, or the one in `.tools`. Records this test as skipped and
/// returns `None` without it.
pub fn require_llama_cpp_sources() -> Option<PathBuf> {
    let named = std::env::var_os("FLOTILLA_LLAMA_CPP_SOURCES").map(PathBuf::from);
    let fetched = std::fs::read_dir(tools_directory()).into_iter().flatten().flatten();
    let mut candidates: Vec<PathBuf> = named.into_iter().collect();
    candidates.extend(fetched.map(|entry| entry.path()));
    candidates.retain(|directory| directory.join("convert_hf_to_gguf.py").is_file());
    let found = candidates.into_iter().next();
    require("llama.cpp-sources", "run deploy/fetch-llama-cpp.sh --sources", found)
}

fn has_llama_cpp(directory: &Path) -> bool {
    let programs = ["llama-perplexity", "llama-server"];
    programs.iter().all(|name| is_executable(&directory.join(name)))
}

/// Returns the Python with torch: what `FLOTILLA_TORCH_PYTHON` names, or the one of `make
/// test-torch`. Records this test as skipped and returns `None` without it.
pub fn require_torch_python() -> Option<PathBuf> {
    let named = std::env::var_os("FLOTILLA_TORCH_PYTHON").map(PathBuf::from);
    let found = named.or_else(|| find_environment("torch", "deploy", &["requirements-torch.txt"]));
    require("torch", "run deploy/fetch-torch.sh", found)
}

/// Returns the Python of an environment in `.tools` that was made from these files of
/// `tests/e2e/python`, as they are now.
pub fn find_python_environment(name: &str, requirements: &[&str]) -> Option<PathBuf> {
    find_environment(name, "tests/e2e/python", requirements)
}

/// Returns the Python of an environment, see [`find_python_environment`]. Records this test as
/// skipped and returns `None` without it.
pub fn require_python_environment(name: &str, requirements: &[&str]) -> Option<PathBuf> {
    let found = find_python_environment(name, requirements);
    require(&format!(".tools/{name}"), &fetch_remedy(name), found)
}

/// Returns the first of these programs whose container engine answers. Records this test as skipped
/// and returns `None` without one.
pub fn require_container_engine(programs: &[&str]) -> Option<PathBuf> {
    let answers = |program: &PathBuf| {
        let asked = Command::new(program).arg("info").output();
        asked.is_ok_and(|output| output.status.success())
    };
    let found = programs.iter().filter_map(|name| find_program(name)).find(answers);
    let remedy = format!("{}, and start its engine", fetch_remedy("docker"));
    require("docker", &remedy, found)
}

/// Returns true for root. Records this test as skipped otherwise.
pub fn require_root() -> bool {
    let root = is_root().then_some(());
    require("root", "run the tests as root", root).is_some()
}

/// Returns true if FUSE file systems can be mounted. Records this test as skipped otherwise.
pub fn require_fuse() -> bool {
    let device = File::options().read(true).write(true).open("/dev/fuse");
    let usable = (is_root() && device.is_ok()).then_some(());
    require("fuse", "run the tests as root, with /dev/fuse", usable).is_some()
}

/// Returns true if ordinary users can create the namespaces that contain programs, with a /proc of
/// their own. Records this test as skipped otherwise.
pub fn require_namespaces() -> bool {
    let namespaces = ["--user", "--pid", "--mount", "--net", "--ipc", "--uts", "--cgroup"];
    let mut unshare = ordinary_user_command("unshare");
    unshare.args(namespaces).args(["--map-root-user", "--fork", "--mount-proc", "true"]);
    let created = unshare.output().is_ok_and(|output| output.status.success());
    let remedy = "permit user namespaces, and a private /proc in containers";
    require("namespaces", remedy, created.then_some(())).is_some()
}

/// Builds a command of an ordinary user, also for root.
pub fn ordinary_user_command(program: &str) -> Command {
    if !is_root() {
        return Command::new(program);
    }
    let mut command = Command::new("setpriv");
    command.args(["--reuid=65534", "--regid=65534", "--clear-groups", program]);
    command
}

fn require<T>(lacking: &str, remedy: &str, found: Option<T>) -> Option<T> {
    if found.is_none() {
        skip_test(lacking, remedy);
    }
    found
}

/// Returns the Python of a complete environment: its list of requirements, written last, is that of
/// these files of a directory.
fn find_environment(name: &str, directory: &str, requirements: &[&str]) -> Option<PathBuf> {
    let environment = tools_directory().join(name);
    let files = repository_root().join(directory);
    let read_file = |file: &&str| std::fs::read_to_string(files.join(file)).ok();
    let wanted: String = requirements.iter().map(read_file).collect::<Option<_>>()?;
    let installed = std::fs::read_to_string(environment.join("requirements.txt"));
    (installed.ok()? == wanted).then(|| environment.join("bin/python"))
}

fn fetch_remedy(tool: &str) -> String {
    format!("run deploy/fetch-test-tools.sh {tool}")
}

fn is_executable(path: &Path) -> bool {
    path.metadata().is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

fn tools_directory() -> PathBuf {
    repository_root().join(".tools")
}

fn repository_root() -> &'static Path {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2);
    root.expect("this crate lies in tests/requirements")
}
