//! The interpreters and compilers of this host.

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::OsString,
    path::{Path, PathBuf},
    time::Duration,
};

use serde::{Deserialize, Serialize};
use wire::v1::verifier::{Command, Environment, How, Http, LlmJudge};

use crate::{
    calls::VerifyItem,
    host_process,
    language::{ProgramLanguage, requested_language},
};

/// The shim of a version manager may be slow.
const VERSION_TIMEOUT: Duration = Duration::from_secs(20);

const SYSTEM_DIRECTORIES: [&str; 5] = ["/usr", "/lib", "/lib64", "/bin", "/sbin"];

/// A requirement of a verifier that a host may not meet.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum ToolNeed {
    Language(ProgramLanguage),
    Pytest,
    /// An executable that a spec names, and the paths that it reads in addition to the system.
    Command {
        program: String,
        paths: Vec<String>,
    },
    /// An environment variable with the key of a judge model.
    Key(String),
}

/// A program that runs or compiles code that a model wrote.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VerifierTool {
    pub argv: Vec<String>,
    pub version: String,
    /// Needed in addition to the system's.
    pub directories: Vec<PathBuf>,
}

/// The tools of a host, by their tag in the fleet.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VerifierTools(pub BTreeMap<String, VerifierTool>);

impl ToolNeed {
    pub(crate) fn need_tag(&self) -> &str {
        match self {
            Self::Language(language) => language.display_name(),
            Self::Pytest => "pytest",
            Self::Command { program, .. } => program,
            Self::Key(variable) => variable,
        }
    }

    /// Includes advice.
    pub(crate) fn describe_missing(&self) -> String {
        match self {
            Self::Language(ProgramLanguage::Python) => "python: install python3".into(),
            Self::Language(ProgramLanguage::C) => "a C compiler: install gcc or clang".into(),
            Self::Language(ProgramLanguage::Cpp) => "a C++ compiler: install g++ or clang".into(),
            Self::Language(ProgramLanguage::Rust) => {
                "rust: install rustc, and a C compiler to link".into()
            }
            Self::Language(ProgramLanguage::Go) => {
                "go: install it from go.dev or the distribution".into()
            }
            Self::Pytest => "pytest: pip install pytest, for the python it judges with".into(),
            Self::Command { program, .. } => format!("the executable {program}"),
            Self::Key(variable) => format!("the environment variable {variable}, with a key"),
        }
    }

    pub(crate) fn runs_in_sandbox(&self) -> bool {
        matches!(self, Self::Language(_) | Self::Pytest)
    }
}

/// Returns the needs according to settings and prompts. Needs that depend on the completion are
/// unknown at this point.
pub(crate) fn required_tools<'a>(
    how: &How,
    items: impl Iterator<Item = &'a VerifyItem> + Clone,
) -> BTreeSet<ToolNeed> {
    let languages = |setting: &str| {
        let language = |item| requested_language(setting, item).ok().flatten();
        items.clone().filter_map(language).map(ToolNeed::Language).collect()
    };
    match how {
        How::Exact(_) | How::Numeric(_) | How::Regex(_) | How::JsonSchema(_) | How::ToolCall(_) => {
            BTreeSet::new()
        }
        How::Python(_) => [ToolNeed::Language(ProgramLanguage::Python)].into(),
        How::Pytest(_) => [ToolNeed::Pytest].into(),
        How::Stdio(stdio) => languages(&stdio.language),
        How::Compile(compile) => languages(&compile.language),
        How::Command(Command { argv, paths, .. })
        | How::Environment(Environment { argv, paths, .. }) => {
            let need = |program: &String| ToolNeed::Command {
                program: program.clone(),
                paths: paths.clone(),
            };
            argv.first().map(need).into_iter().collect()
        }
        How::LlmJudge(LlmJudge { key_env, .. }) | How::Http(Http { key_env, .. }) => Some(key_env)
            .filter(|key| !key.is_empty())
            .cloned()
            .map(ToolNeed::Key)
            .into_iter()
            .collect(),
        How::Chain(chain) => chain
            .stages
            .iter()
            .filter_map(|stage| stage.verifier.as_ref()?.how.as_ref())
            .filter(|how| !matches!(how, How::Chain(_)))
            .flat_map(|how| required_tools(how, items.clone()))
            .collect(),
    }
}

impl VerifierTools {
    /// Detects all tools of this host. `python` replaces the interpreter on `PATH`.
    pub fn detect_tools(python: Option<&Path>) -> Self {
        let python = python.map(Path::to_owned).or_else(|| find_executable("python3"));
        let (python, pytest) = python.and_then(|path| find_python(&path)).unzip();
        let c = find_compiler(&["gcc", "clang", "cc"]);
        // rustc links with the C compiler.
        let rust = c.is_some().then(find_rust).flatten();
        let found = [
            ("python", python),
            ("pytest", pytest.flatten()),
            ("c", c),
            ("c++", find_compiler(&["g++", "clang++", "c++"])),
            ("rust", rust),
            ("go", find_go()),
        ];
        Self(found.into_iter().filter_map(|(tag, tool)| Some((tag.to_owned(), tool?))).collect())
    }

    pub(crate) fn get(&self, need: &ToolNeed) -> Option<&VerifierTool> {
        self.0.get(need.need_tag())
    }

    pub(crate) fn meets_need(&self, need: &ToolNeed) -> bool {
        match need {
            ToolNeed::Language(_) | ToolNeed::Pytest => self.get(need).is_some(),
            ToolNeed::Command { program, .. } => find_executable(program).is_some(),
            ToolNeed::Key(variable) => std::env::var_os(variable).is_some(),
        }
    }

    /// Returns directories to show in addition to the system.
    pub(crate) fn sandbox_directories(&self) -> Vec<PathBuf> {
        let all: BTreeSet<&PathBuf> = self.0.values().flat_map(|tool| &tool.directories).collect();
        all.into_iter().cloned().collect()
    }

    /// Lists tools and versions: `python 3.11.7, c gcc 12.2.0`.
    pub(crate) fn list_versions(&self) -> String {
        let tool = |(tag, tool): (&String, &VerifierTool)| format!("{tag} {}", tool.version);
        self.0.iter().map(tool).collect::<Vec<_>>().join(", ")
    }
}

/// Searches `PATH` unless a path is given.
pub(crate) fn find_executable(program: &str) -> Option<PathBuf> {
    let is_file = |path: &PathBuf| path.is_file();
    if program.contains('/') {
        return Some(PathBuf::from(program)).filter(is_file);
    }
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|directory| directory.join(program)).find(is_file)
}

/// Returns the output lines, or `None` if the program fails.
fn query_program(argv: &[&str]) -> Option<Vec<String>> {
    let argv: Vec<OsString> = argv.iter().map(Into::into).collect();
    let output = host_process::run_program(&argv, Vec::new(), VERSION_TIMEOUT).ok()?;
    Some(String::from_utf8_lossy(&output).lines().map(str::to_owned).collect())
}

/// Finds the interpreter behind any shim, and its pytest.
fn find_python(path: &Path) -> Option<(VerifierTool, Option<VerifierTool>)> {
    const ASK: &str = "\
import sys
print(sys.executable, sys.prefix, sys.base_prefix, '%d.%d.%d' % sys.version_info[:3], sep='\\n')
try:
    import pytest
    print(pytest.__version__)
except Exception:
    pass
";
    let lines = query_program(&[path.to_str()?, "-I", "-B", "-c", ASK])?;
    let [executable, prefix, base, version, rest @ ..] = &*lines else { return None };
    let python = VerifierTool {
        argv: vec![executable.clone()],
        version: version.clone(),
        directories: outside_system([prefix, base].map(PathBuf::from)),
    };
    let pytest =
        rest.first().map(|version| VerifierTool { version: version.clone(), ..python.clone() });
    Some((python, pytest))
}

fn find_compiler(names: &[&str]) -> Option<VerifierTool> {
    names.iter().find_map(|name| {
        let path = find_executable(name)?;
        let version = query_program(&[path.to_str()?, "-dumpfullversion", "-dumpversion"])?;
        Some(VerifierTool {
            argv: vec![path.to_str()?.to_owned()],
            version: format!("{name} {}", version.first()?),
            directories: outside_system([path.canonicalize().ok()?.parent()?.to_owned()]),
        })
    })
}

/// Finds the compiler behind rustup's shim.
fn find_rust() -> Option<VerifierTool> {
    let rustc = find_executable("rustc")?;
    let said_root = query_program(&[rustc.to_str()?, "--print", "sysroot"])?;
    let root = PathBuf::from(said_root.first()?);
    let compiler = root.join("bin/rustc");
    let version = query_program(&[compiler.to_str()?, "--version"])?;
    Some(VerifierTool {
        argv: vec![compiler.to_str()?.to_owned()],
        version: version.first()?.split(' ').nth(1)?.to_owned(),
        directories: outside_system([root]),
    })
}

fn find_go() -> Option<VerifierTool> {
    let go = find_executable("go")?;
    let lines = query_program(&[go.to_str()?, "env", "GOROOT", "GOVERSION"])?;
    let [root, version] = &*lines else { return None };
    let root = PathBuf::from(root);
    Some(VerifierTool {
        argv: vec![root.join("bin/go").to_str()?.to_owned()],
        version: version.trim_start_matches("go").to_owned(),
        directories: outside_system([root]),
    })
}

/// Returns the existing directories that a sandbox does not show by default.
fn outside_system<const N: usize>(directories: [PathBuf; N]) -> Vec<PathBuf> {
    let is_shown = |path: &PathBuf| {
        SYSTEM_DIRECTORIES.iter().any(|system| path.starts_with(system)) || !path.is_absolute()
    };
    let wanted = directories.into_iter().filter(|path| !is_shown(path) && path.exists());
    wanted.collect::<BTreeSet<_>>().into_iter().collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use wire::v1::verifier::{Chain, Python, Stdio, chain::Stage};

    use super::*;

    #[test]
    fn needs_follow_from_settings_and_prompts_not_from_completions() {
        let stdio = How::Stdio(Stdio::default());
        let mut item =
            VerifyItem { completion: "```go\nx\n```".into(), ..VerifyItem::example_item() };
        assert_eq!(required_tools(&stdio, [&item].into_iter()), BTreeSet::new());
        item.fields.insert("language".into(), json!("C++"));
        let cpp = ToolNeed::Language(ProgramLanguage::Cpp);
        assert_eq!(required_tools(&stdio, [&item].into_iter()), [cpp].into());
        let stage =
            |how| Stage { verifier: Some(wire::v1::Verifier { how: Some(how) }), weight: 1.0 };
        let paths = vec!["/opt/judge".to_owned()];
        let command =
            Command { argv: vec!["grade".into()], paths: paths.clone(), ..Command::default() };
        let stages = vec![stage(How::Command(command)), stage(How::Python(Python::default()))];
        let chain = How::Chain(Chain { stages, stop_at_failure: true });
        let python = ToolNeed::Language(ProgramLanguage::Python);
        assert_eq!(
            required_tools(&chain, [&item].into_iter()),
            [ToolNeed::Command { program: "grade".into(), paths }, python].into()
        );
    }

    #[test]
    fn what_is_found_answers_and_what_is_not_is_not_there() {
        let tools = VerifierTools::detect_tools(Some(Path::new("/nonexistent/python")));
        assert!(!tools.meets_need(&ToolNeed::Language(ProgramLanguage::Python)));
        assert!(find_executable("sh").is_some() && find_executable("/nonexistent/grade").is_none());
        for tool in tools.0.values() {
            assert!(Path::new(&tool.argv[0]).is_file() && !tool.version.is_empty(), "{tool:?}");
        }
    }
}
