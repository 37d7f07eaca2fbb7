//! Creates a Python environment with the versions of torch that a profile names.

use std::{path::Path, process::Command};

use anyhow::{Context, bail};
use hardware::HardwareProfile;
use process::{RunLimits, run_program};

/// Creates the Python environment `directory` with the versions of torch that a profile names, by
/// `uv`.
///
/// # Errors
/// When none are known, or `uv` is absent or fails.
pub fn install_torch(profile: &HardwareProfile, directory: &Path) -> anyhow::Result<()> {
    let commands = torch_commands(profile, directory).with_context(|| {
        format!("no torch is known to work with the profile {}; pass --python (A119)", profile.name)
    })?;
    for words in commands {
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]);
        if let Err(error) = run_program(&mut command, Vec::new(), RunLimits::INSTALLATION, |_| ()) {
            bail!("{}: {}: {} (A119)", words.join(" "), error.problem, error.stderr.trim());
        }
    }
    Ok(())
}

/// Returns the `uv` commands that create the environment `directory` with the stack of a profile.
/// Returns `None` if the profile has no known stack. Without an index of its own, they are PyPI's.
pub(crate) fn torch_commands(
    profile: &HardwareProfile,
    directory: &Path,
) -> Option<Vec<Vec<String>>> {
    let stack = profile.stack.as_ref()?;
    let at = directory.display().to_string();
    let words = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
    let create = words(&["uv", "venv", "--python", &stack.python, &at]);
    let python = directory.join("bin/python").display().to_string();
    let mut install = words(&["uv", "pip", "install", "--python", &python]);
    if let Some(index) = &profile.python.index {
        install.extend(words(&["--index", index]));
    }
    install.push(format!("torch=={}", stack.torch));
    install.extend(stack.packages.iter().cloned());
    Some(vec![create, install])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_versions_of_the_profile_are_installed_from_its_index() {
        let mi50 = HardwareProfile::load_named("gfx906").unwrap();
        let commands = torch_commands(&mi50, Path::new("/s/python")).unwrap();
        assert_eq!(commands[0].join(" "), "uv venv --python 3.12 /s/python");
        let install = commands[1].join(" ");
        let begin = "uv pip install --python /s/python/bin/python --index \
                     https://download.pytorch.org/whl/rocm6.3 torch==2.9.1+rocm6.3 transformers==";
        assert!(install.starts_with(begin), "{install}");
        let cuda = HardwareProfile::load_named("cuda").unwrap();
        let install = torch_commands(&cuda, Path::new("/s/python")).unwrap()[1].join(" ");
        let begin = "uv pip install --python /s/python/bin/python torch==2.15.0 transformers==";
        assert!(install.starts_with(begin), "{install}");
        let cpu = HardwareProfile::load_named("cpu").unwrap();
        assert_eq!(torch_commands(&cpu, Path::new("/s")), None);
    }
}
