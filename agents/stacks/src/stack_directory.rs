//! The directory of installed stacks and its links.

use std::{
    fs::{self, File, TryLockError},
    io,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
};

use anyhow::{Context, bail};
use serde::{Deserialize, Serialize};

use crate::copy_files::copy_directory;

const CURRENT: &str = "current";
const PREVIOUS: &str = "previous";
const MANIFEST: &str = "stack.json";
const NAME_BYTES_MAX: usize = 64;

/// A function that creates a Python environment in a directory that does not exist yet.
pub type MakeEnvironment<'a> = dyn FnMut(&Path) -> anyhow::Result<()> + 'a;

/// A directory with a stack in each subdirectory.
#[derive(Debug, Clone)]
pub struct StackDirectory {
    path: PathBuf,
}

/// A stack of this box.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct InstalledStack {
    pub name: String,
    #[serde(flatten)]
    pub programs: StackPrograms,
    /// True if agents start with it.
    pub is_current: bool,
    /// True if a rollback returns to it.
    pub is_previous: bool,
}

/// The programs of a stack.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StackPrograms {
    /// The directory of llama.cpp's programs.
    pub llama_cpp: Option<PathBuf>,
    /// The interpreter of an environment with torch.
    pub python: Option<PathBuf>,
}

impl StackDirectory {
    /// Opens a directory, which need not exist.
    pub fn new(path: PathBuf) -> Self {
        Self { path }
    }

    /// Installs a stack: copies the directory of llama.cpp, calls `make_environment` with the
    /// directory in which to make an environment, or names an interpreter that is there. A stack is
    /// complete or absent; one whose installation was interrupted is removed first.
    ///
    /// # Errors
    /// When the name is taken or unusable, there is nothing to install, another process installs a
    /// stack, or a file cannot be copied.
    pub fn install_stack(
        &self,
        name: &str,
        source: &StackPrograms,
        make_environment: Option<&mut MakeEnvironment<'_>>,
    ) -> anyhow::Result<InstalledStack> {
        check_name(name)?;
        if source.llama_cpp.is_none() && source.python.is_none() && make_environment.is_none() {
            bail!("a stack needs --llama-cpp, --python or --torch (A102)");
        }
        let created = durable_files::create_directory(&self.path, 0o755);
        created.with_context(|| format!("create {}", self.path.display()))?;
        let _lock = self.lock_installations()?;
        let place = self.path.join(name);
        if place.join(MANIFEST).exists() {
            bail!("{}: this stack exists; choose another name (A119)", place.display());
        }
        match fs::remove_dir_all(&place) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(error)
                    .with_context(|| format!("remove the interrupted {}", place.display()))?;
            }
            _ => {}
        }
        // A Python environment contains its own path, so it is created in place.
        fs::create_dir(&place).with_context(|| format!("create {}", place.display()))?;
        let made = self.fill_stack(&place, source, make_environment);
        if made.is_err() {
            // The first error counts.
            let _ = fs::remove_dir_all(&place);
        }
        made?;
        self.read_stack(name)
    }

    /// Locks the directory until the returned file is dropped, because an installation in progress
    /// looks like an interrupted one.
    fn lock_installations(&self) -> anyhow::Result<File> {
        let named = || format!("lock {}", self.path.display());
        let directory = File::open(&self.path).with_context(named)?;
        match directory.try_lock() {
            Ok(()) => Ok(directory),
            Err(TryLockError::WouldBlock) => {
                bail!("another stack is being installed in {}; wait (A119)", self.path.display())
            }
            Err(TryLockError::Error(error)) => Err(error).with_context(named),
        }
    }

    fn fill_stack(
        &self,
        place: &Path,
        source: &StackPrograms,
        make_environment: Option<&mut MakeEnvironment<'_>>,
    ) -> anyhow::Result<()> {
        let mut programs = StackPrograms::default();
        if let Some(from) = &source.llama_cpp {
            let to = place.join("llama.cpp");
            copy_directory(from, &to)?;
            programs.llama_cpp = Some(to);
        }
        if let Some(python) = &source.python {
            if !python.is_file() {
                bail!("--python {}: no such file (A104)", python.display());
            }
            programs.python = Some(std::path::absolute(python)?);
        }
        if let Some(make) = make_environment {
            let to = place.join("python");
            make(&to)?;
            programs.python = Some(to.join("bin/python"));
        }
        let text = serde_json::to_vec_pretty(&programs)?;
        let manifest = place.join(MANIFEST);
        // Written last: a stack without it is incomplete.
        durable_files::replace_file(&manifest, &text, 0o644)
            .with_context(|| format!("write {}", manifest.display()))
    }

    /// Lists the installed stacks by name.
    ///
    /// # Errors
    /// When the directory cannot be read.
    pub fn list_stacks(&self) -> anyhow::Result<Vec<InstalledStack>> {
        let named = || format!("read {}", self.path.display());
        let entries = match fs::read_dir(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.with_context(named)?,
        };
        let mut stacks = Vec::new();
        for entry in entries {
            let name = entry.with_context(named)?.file_name().to_string_lossy().into_owned();
            // Entries without a manifest are other files, or interrupted installations.
            if check_name(&name).is_ok() && self.path.join(&name).join(MANIFEST).is_file() {
                stacks.push(self.read_stack(&name)?);
            }
        }
        stacks.sort_by(|one, other| one.name.cmp(&other.name));
        Ok(stacks)
    }

    /// Returns an installed stack.
    ///
    /// # Errors
    /// When no stack has this name, or its manifest is damaged.
    pub fn read_stack(&self, name: &str) -> anyhow::Result<InstalledStack> {
        check_name(name)?;
        let manifest = self.path.join(name).join(MANIFEST);
        let text = match fs::read(&manifest) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => bail!(
                "there is no stack {name} in {}; `flotilla stack list` lists them (A119)",
                self.path.display()
            ),
            text => text.with_context(|| format!("read {}", manifest.display()))?,
        };
        let programs = serde_json::from_slice(&text)
            .with_context(|| format!("{}: damaged; install it again (A119)", manifest.display()))?;
        let is_linked = |link: &str| self.linked_name(link).as_deref() == Some(name);
        let (is_current, is_previous) = (is_linked(CURRENT), is_linked(PREVIOUS));
        Ok(InstalledStack { name: name.to_owned(), programs, is_current, is_previous })
    }

    /// Returns the stack that agents start with; `None` if no stack is in use.
    ///
    /// # Errors
    /// When the link names a stack that is gone or damaged.
    pub fn current_stack(&self) -> anyhow::Result<Option<InstalledStack>> {
        self.linked_name(CURRENT).map(|name| self.read_stack(&name)).transpose()
    }

    /// Returns true if agents start with this stack.
    pub fn is_in_use(&self, name: &str) -> bool {
        self.linked_name(CURRENT).as_deref() == Some(name)
    }

    /// Makes a stack the current one, and the current one the previous one.
    ///
    /// # Errors
    /// When there is no such stack, or the links cannot be written.
    pub fn use_stack(&self, name: &str) -> anyhow::Result<()> {
        let stack = self.read_stack(name)?;
        if stack.is_current {
            return Ok(());
        }
        if let Some(before) = self.linked_name(CURRENT) {
            self.replace_link(PREVIOUS, &before)?;
        }
        self.replace_link(CURRENT, name)
    }

    /// Switches back to the previous stack, and makes the current one the previous; without a
    /// previous stack, none is in use afterwards. Returns the name of the stack that is then in
    /// use.
    ///
    /// # Errors
    /// When no stack is in use, or the previous one is gone.
    pub fn roll_back(&self) -> anyhow::Result<Option<String>> {
        if let Some(previous) = self.linked_name(PREVIOUS) {
            self.use_stack(&previous)?;
            return Ok(Some(previous));
        }
        let link = self.path.join(CURRENT);
        match fs::remove_file(&link) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                bail!("no stack of {} is in use (A119)", self.path.display())
            }
            removed => removed.with_context(|| format!("remove {}", link.display()))?,
        }
        Ok(None)
    }

    fn linked_name(&self, link: &str) -> Option<String> {
        fs::read_link(self.path.join(link)).ok()?.into_os_string().into_string().ok()
    }

    /// Replaces a link atomically.
    fn replace_link(&self, link: &str, name: &str) -> anyhow::Result<()> {
        let (path, new) = (self.path.join(link), self.path.join(format!(".{link}.new")));
        let _ = fs::remove_file(&new);
        symlink(name, &new)
            .and_then(|()| fs::rename(&new, &path))
            .and_then(|()| durable_files::sync_parent(&path))
            .with_context(|| format!("write {}", path.display()))
    }
}

/// Checks the name of a stack: it becomes part of a path, and must differ from the links' names.
fn check_name(name: &str) -> anyhow::Result<()> {
    let is_plain = name.bytes().all(|it| it.is_ascii_alphanumeric() || b"._-+".contains(&it));
    let is_usable = is_plain && !name.is_empty() && !name.starts_with('.');
    if !is_usable || name.len() > NAME_BYTES_MAX || [CURRENT, PREVIOUS].contains(&name) {
        bail!(
            "{name:?} is no name of a stack: use at most {NAME_BYTES_MAX} letters, digits, dots and \
             hyphens (A101)"
        );
    }
    Ok(())
}
