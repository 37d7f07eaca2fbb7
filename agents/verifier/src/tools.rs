//! What this box can judge with: interpreters and compilers, and where they live.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    time::Duration,
};

use serde::{Deserialize, Serialize};
use wire::v1::verifier::How;

use crate::{
    calls::Item,
    language::{Language, asked},
    process,
};

/// To say what it is; a shim may take a while.
const ANSWER_LIMIT: Duration = Duration::from_secs(20);

/// Shown in a sandbox anyway.
const SYSTEM: [&str; 5] = ["/usr", "/lib", "/lib64", "/bin", "/sbin"];

/// Something a verifier may need of its box.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Need {
    Language(Language),
    Pytest,
    /// An executable of the fleet's owner.
    Program(String),
    /// A variable with the key of a judge.
    Key(String),
}

/// A program that runs or compiles what models wrote.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tool {
    pub argv: Vec<String>,
    pub version: String,
    /// Directories it needs besides the system's.
    pub directories: Vec<PathBuf>,
}

/// What there is, by the tag it goes by in the fleet.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tools(pub BTreeMap<String, Tool>);

impl Need {
    pub(crate) fn tag(&self) -> &str {
        match self {
            Self::Language(language) => language.name(),
            Self::Pytest => "pytest",
            Self::Program(program) => program,
            Self::Key(variable) => variable,
        }
    }

    /// What is missing, and what helps.
    pub(crate) fn lacking(&self) -> String {
        match self {
            Self::Language(Language::Python) => "python: install python3".into(),
            Self::Language(Language::C) => "a C compiler: install gcc or clang".into(),
            Self::Language(Language::Cpp) => "a C++ compiler: install g++ or clang".into(),
            Self::Language(Language::Rust) => {
                "rust: install rustc, and a C compiler to link".into()
            }
            Self::Language(Language::Go) => "go: install it from go.dev or the distribution".into(),
            Self::Pytest => "pytest: pip install pytest, for the python it judges with".into(),
            Self::Program(program) => format!("the executable {program}"),
            Self::Key(variable) => format!("the environment variable {variable}, with a key"),
        }
    }

    /// Whether programs are run for it that a model wrote.
    pub(crate) fn is_contained(&self) -> bool {
        matches!(self, Self::Language(_) | Self::Pytest)
    }
}

/// What a verifier needs for these items by its settings and their prompts. What a completion
/// makes of it is not known before: that one cannot be judged here.
pub(crate) fn needs<'a>(
    how: &How,
    items: impl Iterator<Item = &'a Item> + Clone,
) -> BTreeSet<Need> {
    let languages = |setting: &str| {
        let language = |item| asked(setting, item).ok().flatten();
        items.clone().filter_map(language).map(Need::Language).collect()
    };
    match how {
        How::Exact(_) | How::Numeric(_) | How::Regex(_) | How::JsonSchema(_) | How::ToolCall(_) => {
            BTreeSet::new()
        }
        How::Python(_) => [Need::Language(Language::Python)].into(),
        How::Pytest(_) => [Need::Pytest].into(),
        How::Stdio(stdio) => languages(&stdio.language),
        How::Compile(compile) => languages(&compile.language),
        How::Command(command) => {
            command.argv.first().cloned().map(Need::Program).into_iter().collect()
        }
        How::LlmJudge(judge) => Some(&judge.key_env)
            .filter(|key| !key.is_empty())
            .cloned()
            .map(Need::Key)
            .into_iter()
            .collect(),
        How::Chain(chain) => chain
            .stages
            .iter()
            .filter_map(|stage| stage.verifier.as_ref()?.how.as_ref())
            .filter(|how| !matches!(how, How::Chain(_)))
            .flat_map(|how| needs(how, items.clone()))
            .collect(),
    }
}

impl Tools {
    /// Looks for everything. `python` is used instead of the one on `PATH`.
    pub fn find(python: Option<&Path>) -> Self {
        let python = python.map(Path::to_owned).or_else(|| on_path("python3"));
        let (python, pytest) = python.and_then(|path| find_python(&path)).unzip();
        let c = compiler(&["gcc", "clang", "cc"]);
        // It links with the C compiler.
        let rust = c.is_some().then(find_rust).flatten();
        let found = [
            ("python", python),
            ("pytest", pytest.flatten()),
            ("c", c),
            ("c++", compiler(&["g++", "clang++", "c++"])),
            ("rust", rust),
            ("go", find_go()),
        ];
        Self(found.into_iter().filter_map(|(tag, tool)| Some((tag.to_owned(), tool?))).collect())
    }

    pub(crate) fn get(&self, need: &Need) -> Option<&Tool> {
        self.0.get(need.tag())
    }

    pub(crate) fn has(&self, need: &Need) -> bool {
        match need {
            Need::Language(_) | Need::Pytest => self.get(need).is_some(),
            Need::Program(program) => on_path(program).is_some(),
            Need::Key(variable) => std::env::var_os(variable).is_some(),
        }
    }

    /// What a sandbox must show besides the system.
    pub(crate) fn directories(&self) -> Vec<PathBuf> {
        let all: BTreeSet<&PathBuf> = self.0.values().flat_map(|tool| &tool.directories).collect();
        all.into_iter().cloned().collect()
    }

    /// `python 3.11.7, c gcc 12.2.0`
    pub(crate) fn describe(&self) -> String {
        let tool = |(tag, tool): (&String, &Tool)| format!("{tag} {}", tool.version);
        self.0.iter().map(tool).collect::<Vec<_>>().join(", ")
    }
}

/// An executable by its name, or its path.
pub(crate) fn on_path(program: &str) -> Option<PathBuf> {
    let is_file = |path: &PathBuf| path.is_file();
    if program.contains('/') {
        return Some(PathBuf::from(program)).filter(is_file);
    }
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|directory| directory.join(program)).find(is_file)
}

/// What a program says, line by line; `None` when it does not.
fn said(argv: &[&str]) -> Option<Vec<String>> {
    let argv: Vec<String> = argv.iter().map(|&word| word.to_owned()).collect();
    let output = process::run(&argv, Vec::new(), ANSWER_LIMIT).ok()?;
    Some(String::from_utf8_lossy(&output).lines().map(str::to_owned).collect())
}

/// The interpreter behind whatever shim, and pytest for it.
fn find_python(path: &Path) -> Option<(Tool, Option<Tool>)> {
    const ASK: &str = "\
import sys
print(sys.executable, sys.prefix, sys.base_prefix, '%d.%d.%d' % sys.version_info[:3], sep='\\n')
try:
    import pytest
    print(pytest.__version__)
except Exception:
    pass
";
    let said = said(&[path.to_str()?, "-I", "-B", "-c", ASK])?;
    let [executable, prefix, base, version, rest @ ..] = &*said else { return None };
    let python = Tool {
        argv: vec![executable.clone()],
        version: version.clone(),
        directories: outside_system([prefix, base].map(PathBuf::from)),
    };
    let pytest = rest.first().map(|version| Tool { version: version.clone(), ..python.clone() });
    Some((python, pytest))
}

fn compiler(names: &[&str]) -> Option<Tool> {
    names.iter().find_map(|name| {
        let path = on_path(name)?;
        let version = said(&[path.to_str()?, "-dumpfullversion", "-dumpversion"])?;
        Some(Tool {
            argv: vec![path.to_str()?.to_owned()],
            version: format!("{name} {}", version.first()?),
            directories: outside_system([path.canonicalize().ok()?.parent()?.to_owned()]),
        })
    })
}

/// The compiler behind rustup's shim.
fn find_rust() -> Option<Tool> {
    let rustc = on_path("rustc")?;
    let said_root = said(&[rustc.to_str()?, "--print", "sysroot"])?;
    let root = PathBuf::from(said_root.first()?);
    let compiler = root.join("bin/rustc");
    let version = said(&[compiler.to_str()?, "--version"])?;
    Some(Tool {
        argv: vec![compiler.to_str()?.to_owned()],
        version: version.first()?.split(' ').nth(1)?.to_owned(),
        directories: outside_system([root]),
    })
}

fn find_go() -> Option<Tool> {
    let go = on_path("go")?;
    let said = said(&[go.to_str()?, "env", "GOROOT", "GOVERSION"])?;
    let [root, version] = &*said else { return None };
    let root = PathBuf::from(root);
    Some(Tool {
        argv: vec![root.join("bin/go").to_str()?.to_owned()],
        version: version.trim_start_matches("go").to_owned(),
        directories: outside_system([root]),
    })
}

fn outside_system<const N: usize>(directories: [PathBuf; N]) -> Vec<PathBuf> {
    let is_shown = |path: &PathBuf| {
        SYSTEM.iter().any(|system| path.starts_with(system)) || !path.is_absolute()
    };
    let wanted = directories.into_iter().filter(|path| !is_shown(path) && path.exists());
    wanted.collect::<BTreeSet<_>>().into_iter().collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use wire::v1::verifier::{Chain, Command, Python, Stdio, chain::Stage};

    use super::*;

    #[test]
    fn needs_follow_from_settings_and_prompts_not_from_completions() {
        let stdio = How::Stdio(Stdio::default());
        let mut item = Item { completion: "```go\nx\n```".into(), ..Item::example() };
        assert_eq!(needs(&stdio, [&item].into_iter()), BTreeSet::new());
        item.fields.insert("language".into(), json!("C++"));
        let cpp = Need::Language(Language::Cpp);
        assert_eq!(needs(&stdio, [&item].into_iter()), [cpp].into());
        let stage =
            |how| Stage { verifier: Some(wire::v1::Verifier { how: Some(how) }), weight: 1.0 };
        let command = Command { argv: vec!["grade".into()], timeout_s: 1.0 };
        let stages = vec![stage(How::Command(command)), stage(How::Python(Python::default()))];
        let chain = How::Chain(Chain { stages, stop_at_failure: true });
        let python = Need::Language(Language::Python);
        assert_eq!(
            needs(&chain, [&item].into_iter()),
            [Need::Program("grade".into()), python].into()
        );
    }

    #[test]
    fn what_is_found_answers_and_what_is_not_is_not_there() {
        let tools = Tools::find(Some(Path::new("/nonexistent/python")));
        assert!(!tools.has(&Need::Language(Language::Python)));
        assert!(tools.has(&Need::Program("sh".into())));
        assert!(!tools.has(&Need::Program("/nonexistent/grade".into())));
        for tool in tools.0.values() {
            assert!(Path::new(&tool.argv[0]).is_file() && !tool.version.is_empty(), "{tool:?}");
        }
    }
}
