//! Finds a nats-server that is new enough.

use std::{
    env, io,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use tokio::{process::Command, time::timeout};

use crate::version::{self, ServerVersion};

const VARIABLE: &str = "FLOTILLA_NATS_SERVER";
const BINARY_NAME: &str = "nats-server";
/// Installed by the Debian package, relative to the parent of the directory of this program.
const PACKAGED: &str = "lib/flotilla/nats-server";
/// Installed by deploy/fetch-nats-server.sh, relative to the repository.
const FETCHED: &str = ".tools/nats-server";
/// `--version` only prints a line.
const VERSION_LIMIT: Duration = Duration::from_secs(5);

/// The reason why no nats-server can be used.
#[derive(Debug, thiserror::Error)]
pub enum NatsBinaryError {
    #[error(
        "no nats-server found: neither {VARIABLE} nor PATH has one, nor is one installed with this \
         program, as Flotilla's packages do; point {VARIABLE} to nats-server {} or newer of its \
         releases, or in a checkout run deploy/fetch-nats-server.sh (B106)",
        version::MINIMUM
    )]
    NotFound,
    #[error(
        "{} is version {found}, but {} or newer is needed; point {VARIABLE} to a newer one of its \
         releases, or in a checkout run deploy/fetch-nats-server.sh (B105)",
        path.display(),
        version::MINIMUM
    )]
    TooOld { path: PathBuf, found: String },
    #[error("ask {} for its version; is it a nats-server for this machine? (B106)", path.display())]
    Broken {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

/// Finds the nats-server to run: `named`, or else `FLOTILLA_NATS_SERVER` alone; otherwise the first
/// suitable one of PATH, of what is installed with this program, and `.tools/nats-server`. Reports
/// the first candidate's problem if none is new enough.
pub async fn find_binary(named: Option<&Path>) -> Result<PathBuf, NatsBinaryError> {
    let from_environment = || env::var_os(VARIABLE).filter(|path| !path.is_empty());
    if let Some(path) = named.map(Path::to_owned).or_else(|| from_environment().map(PathBuf::from))
    {
        return check_version(path).await;
    }
    let mut first_error = None;
    for path in list_candidates() {
        match check_version(path).await {
            Ok(path) => return Ok(path),
            Err(error) => first_error = first_error.or(Some(error)),
        }
    }
    Err(first_error.unwrap_or(NatsBinaryError::NotFound))
}

/// Lists the executables in the order in which they are tried.
fn list_candidates() -> Vec<PathBuf> {
    let on_path = env::var_os("PATH").unwrap_or_default();
    let on_path = env::split_paths(&on_path).collect::<Vec<_>>();
    let executable = env::current_exe().ok();
    let own_directory = executable.as_deref().and_then(Path::parent);
    let paths = list_paths(&on_path, own_directory, env::current_dir().ok().as_deref());
    paths.into_iter().filter(|path| is_executable(path)).collect()
}

/// Lists the places of a server in the order in which they are tried. Python environments have one
/// beside this program, and the Debian package has one in a directory of its own.
fn list_paths(
    on_path: &[PathBuf],
    own_directory: Option<&Path>,
    here: Option<&Path>,
) -> Vec<PathBuf> {
    let named = on_path.iter().map(PathBuf::as_path).chain(own_directory);
    let packaged = own_directory.and_then(Path::parent).map(|prefix| prefix.join(PACKAGED));
    let above = [own_directory, here].into_iter().flatten().flat_map(Path::ancestors);
    let fetched = above.map(|dir| dir.join(FETCHED));
    named.map(|dir| dir.join(BINARY_NAME)).chain(packaged).chain(fetched).collect()
}

fn is_executable(path: &Path) -> bool {
    path.metadata().is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
}

/// Returns the path if the server there is new enough.
async fn check_version(path: PathBuf) -> Result<PathBuf, NatsBinaryError> {
    let found = match read_version(&path).await {
        Ok(found) => found,
        Err(source) => return Err(NatsBinaryError::Broken { path, source }),
    };
    match ServerVersion::parse(&found) {
        Some(version) if version >= version::MINIMUM => Ok(path),
        _ => Err(NatsBinaryError::TooOld { path, found }),
    }
}

async fn read_version(path: &Path) -> io::Result<String> {
    let mut command = Command::new(path);
    command.arg("--version").stdin(Stdio::null()).stderr(Stdio::null()).kill_on_drop(true);
    let output = timeout(VERSION_LIMIT, command.output())
        .await
        .map_err(|_| io::Error::new(io::ErrorKind::TimedOut, "it did not answer --version"))??;
    let text = String::from_utf8_lossy(&output.stdout);
    text.trim()
        .strip_prefix("nats-server: v")
        .map(str::to_owned)
        .ok_or_else(|| io::Error::other(format!("it printed {:?}", text.trim())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_is_looked_for_on_the_path_and_where_packages_and_checkouts_have_it() {
        let on_path = [PathBuf::from("/opt/bin")];
        let own_directory = Some(Path::new("/usr/bin"));
        let paths = list_paths(&on_path, own_directory, Some(Path::new("/src")));
        let paths: Vec<&str> = paths.iter().filter_map(|path| path.to_str()).collect();
        assert_eq!(
            paths,
            [
                "/opt/bin/nats-server",
                "/usr/bin/nats-server",
                "/usr/lib/flotilla/nats-server",
                "/usr/bin/.tools/nats-server",
                "/usr/.tools/nats-server",
                "/.tools/nats-server",
                "/src/.tools/nats-server",
                "/.tools/nats-server",
            ]
        );
        assert_eq!(list_paths(&[], None, None), Vec::<PathBuf>::new());
    }
}
