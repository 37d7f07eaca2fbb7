//! The settings that Hugging Face's tools read from the environment.

use std::{
    ffi::OsString,
    fs::File,
    io::{self, Read},
    path::{Path, PathBuf},
};

const DEFAULT_ENDPOINT: &str = "https://huggingface.co";
const TOKEN_BYTES_MAX: u64 = 4096;

#[derive(Clone)]
pub(crate) struct HubSettings {
    pub(crate) endpoint: String,
    pub(crate) token: Option<String>,
    pub(crate) cache: PathBuf,
    pub(crate) offline: bool,
}

impl HubSettings {
    /// Reads the settings, where `variable` looks up an environment variable. Reads the token from
    /// its file if no variable contains it.
    pub(crate) fn from_variables(variable: &dyn Fn(&str) -> Option<OsString>) -> Self {
        let text = |name: &str| {
            let value = variable(name)?.to_string_lossy().trim().to_owned();
            (!value.is_empty()).then_some(value)
        };
        let is_set = |name: &str| {
            let value = text(name).unwrap_or_default().to_lowercase();
            ["1", "on", "yes", "true"].contains(&value.as_str())
        };
        let read_token = || {
            let path = find_path(variable, "HF_TOKEN_PATH");
            read_token_file(&path.unwrap_or_else(|| find_home(variable).join("token"))).ok()?
        };
        let token = text("HF_TOKEN").or_else(read_token);
        Self {
            endpoint: text("HF_ENDPOINT").unwrap_or_else(|| DEFAULT_ENDPOINT.to_owned()),
            token: token.filter(|_| !is_set("HF_HUB_DISABLE_IMPLICIT_TOKEN")),
            cache: find_cache_dir(variable),
            offline: is_set("HF_HUB_OFFLINE"),
        }
    }
}

fn find_cache_dir(variable: &dyn Fn(&str) -> Option<OsString>) -> PathBuf {
    find_path(variable, "HF_HUB_CACHE")
        .or_else(|| find_path(variable, "HUGGINGFACE_HUB_CACHE"))
        .unwrap_or_else(|| find_home(variable).join("hub"))
}

fn find_home(variable: &dyn Fn(&str) -> Option<OsString>) -> PathBuf {
    let user_cache = || {
        let cache = find_path(variable, "XDG_CACHE_HOME");
        cache.unwrap_or_else(|| user_directory(variable).join(".cache"))
    };
    find_path(variable, "HF_HOME").unwrap_or_else(|| user_cache().join("huggingface"))
}

fn user_directory(variable: &dyn Fn(&str) -> Option<OsString>) -> PathBuf {
    let home = variable("HOME").filter(|home| !home.is_empty()).map(PathBuf::from);
    home.or_else(std::env::home_dir).unwrap_or_else(std::env::temp_dir)
}

/// Returns a variable as a path, in which a leading `~` is the user's directory.
fn find_path(variable: &dyn Fn(&str) -> Option<OsString>, name: &str) -> Option<PathBuf> {
    let path = PathBuf::from(variable(name).filter(|value| !value.is_empty())?);
    Some(match path.strip_prefix("~") {
        Ok(rest) => user_directory(variable).join(rest),
        Err(_) => path,
    })
}

fn read_token_file(path: &Path) -> io::Result<Option<String>> {
    let mut text = String::new();
    File::open(path)?.take(TOKEN_BYTES_MAX).read_to_string(&mut text)?;
    let token = text.trim();
    Ok((!token.is_empty()).then(|| token.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(values: &[(&str, &str)]) -> HubSettings {
        let of = |name: &str| values.iter().find(|(other, _)| *other == name);
        HubSettings::from_variables(&|name| of(name).map(|(_, value)| value.into()))
    }

    #[test]
    fn the_cache_is_where_the_hub_s_tools_have_it() {
        let home = ("HOME", "/h");
        for (values, cache) in [
            (vec![home], "/h/.cache/huggingface/hub"),
            (vec![home, ("XDG_CACHE_HOME", "/x")], "/x/huggingface/hub"),
            (vec![home, ("XDG_CACHE_HOME", "/x"), ("HF_HOME", "~/f")], "/h/f/hub"),
            (vec![home, ("HF_HOME", "/f"), ("HUGGINGFACE_HUB_CACHE", "/o")], "/o"),
            (vec![("HUGGINGFACE_HUB_CACHE", "/o"), ("HF_HUB_CACHE", "/c")], "/c"),
            (vec![("HF_HUB_CACHE", ""), ("HF_HOME", "/f")], "/f/hub"),
        ] {
            assert_eq!(settings(&values).cache, Path::new(cache), "{values:?}");
        }
    }

    #[test]
    fn the_token_is_the_variable_s_or_the_file_s() {
        let home = tempfile::tempdir().unwrap();
        let at = home.path().to_str().unwrap();
        assert_eq!(settings(&[("HF_HOME", at)]).token, None);
        std::fs::write(home.path().join("token"), "hf_file\n").unwrap();
        std::fs::write(home.path().join("other"), "hf_other\n").unwrap();
        let other = home.path().join("other");
        let other = ("HF_TOKEN_PATH", other.to_str().unwrap());
        for (values, token) in [
            (vec![("HF_HOME", at)], Some("hf_file")),
            (vec![("HF_HOME", at), other], Some("hf_other")),
            (vec![("HF_HOME", at), ("HF_TOKEN", " hf_variable\n")], Some("hf_variable")),
            (vec![("HF_TOKEN", "hf_variable"), ("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")], None),
        ] {
            assert_eq!(settings(&values).token.as_deref(), token, "{values:?}");
        }
    }

    #[test]
    fn the_hub_is_the_public_one_unless_another_is_named() {
        assert_eq!(settings(&[]).endpoint, "https://huggingface.co");
        assert_eq!(settings(&[("HF_ENDPOINT", "http://mirror")]).endpoint, "http://mirror");
        for (value, offline) in [("1", true), ("Yes", true), ("0", false), ("", false)] {
            assert_eq!(settings(&[("HF_HUB_OFFLINE", value)]).offline, offline, "{value:?}");
        }
    }
}
