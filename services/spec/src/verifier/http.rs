//! A verifier that asks a server.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use wire::v1::verifier::Http;

use super::llm_judge::check_key_variable;
use crate::field_checks::{FieldResult, check_range, ensure_field};

/// A verifier that posts a completion to a server, as the JSON that `command` reads, and reads the
/// verdict from the answer.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct HttpSpec {
    /// Address that receives the requests, without a user or password.
    #[schemars(regex(pattern = r"^https?://[^/?#@\s]+([/?][^#\s]*)?$"))]
    #[schemars(example = "http://127.0.0.1:8080/verify")]
    pub url: String,
    /// Seconds to wait for an answer, including repeated requests while the server is busy.
    #[schemars(range(min = 0.1, max = 3600.0))]
    #[serde(default = "a_minute")]
    pub timeout_s: f64,
    /// Name of the environment variable with the key, which is sent as a bearer token; never the
    /// key itself. Begins with `FLOTILLA_JUDGE_KEY`.
    #[schemars(regex(pattern = "^(FLOTILLA_JUDGE_KEY[A-Z0-9_]*)?$"))]
    #[serde(default)]
    pub key_env: String,
}

fn a_minute() -> f64 {
    60.0
}

impl HttpSpec {
    pub(super) fn check_fields(&self, field: &str) -> FieldResult {
        let at = |name: &str| format!("{field}.{name}");
        let remedy = "must be an address such as http://127.0.0.1:8080/verify, without a user or \
                      password; name a variable with a key as key_env";
        ensure_field(is_plain_address(&self.url), &at("url"), remedy)?;
        check_range(&at("timeout_s"), self.timeout_s, 0.1, 3600.0)?;
        check_key_variable(&at("key_env"), &self.key_env)
    }
}

/// Returns true for an address of HTTP with a host, and without credentials or a fragment.
pub(crate) fn is_plain_address(url: &str) -> bool {
    let rest = url.strip_prefix("http://").or_else(|| url.strip_prefix("https://"));
    let Some(rest) = rest else { return false };
    let host = rest.split(['/', '?']).next().unwrap_or_default();
    let is_text = !rest.contains(|c: char| c == '#' || c.is_whitespace() || c.is_control());
    is_text && !host.is_empty() && !host.contains('@')
}

impl From<&HttpSpec> for Http {
    fn from(spec: &HttpSpec) -> Self {
        let HttpSpec { url, timeout_s, key_env } = spec.clone();
        Self { url, timeout_s, key_env }
    }
}
