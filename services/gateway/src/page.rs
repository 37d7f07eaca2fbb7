//! The web page: files that are embedded in the program and load nothing from other hosts. They get
//! their data from the API like every client. In a closed fleet the files are public, but show no
//! data without a bearer.

use axum::{
    Router,
    body::Body,
    extract::Request,
    http::{HeaderMap, HeaderValue, Response, StatusCode, header},
    routing::get,
};

/// A file of the page, with the path that serves it.
struct PageFile {
    path: &'static str,
    kind: &'static str,
    bytes: &'static [u8],
}

const HTML: &str = "text/html; charset=utf-8";
const CSS: &str = "text/css; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";
const SVG: &str = "image/svg+xml";

/// Embeds files of `services/gateway/page` with the paths that they are served at.
macro_rules! files {
    ($($path:literal $file:literal $kind:ident),* $(,)?) => {
        &[$(PageFile {
            path: $path,
            kind: $kind,
            bytes: include_bytes!(concat!("../page/", $file)),
        }),*]
    };
}

const PAGE_FILES: &[PageFile] = files! {
    "/" "index.html" HTML,
    "/ancestry.js" "ancestry.js" SCRIPT,
    "/api.js" "api.js" SCRIPT,
    "/box.js" "box.js" SCRIPT,
    "/channels.js" "channels.js" SCRIPT,
    "/chart.js" "chart.js" SCRIPT,
    "/compare.js" "compare.js" SCRIPT,
    "/dialogs.js" "dialogs.js" SCRIPT,
    "/diff.js" "diff.js" SCRIPT,
    "/dom.js" "dom.js" SCRIPT,
    "/fleet.js" "fleet.js" SCRIPT,
    "/format.js" "format.js" SCRIPT,
    "/icon.svg" "icon.svg" SVG,
    "/lineage.js" "lineage.js" SCRIPT,
    "/page.css" "page.css" CSS,
    "/page.js" "page.js" SCRIPT,
    "/parts.js" "parts.js" SCRIPT,
    "/route.js" "route.js" SCRIPT,
    "/run.js" "run.js" SCRIPT,
    "/samples.js" "samples.js" SCRIPT,
    "/scale.js" "scale.js" SCRIPT,
    "/series.js" "series.js" SCRIPT,
    "/spec.js" "spec.js" SCRIPT,
    "/store.js" "store.js" SCRIPT,
    "/timeline.js" "timeline.js" SCRIPT,
};

/// The content security policy: loads nothing from other hosts and nothing inline, and forbids
/// embedding in frames.
const SECURITY_POLICY: &str =
    "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

pub(crate) fn has_path(path: &str) -> bool {
    PAGE_FILES.iter().any(|file| file.path == path)
}

pub(crate) fn build_routes() -> Router {
    PAGE_FILES.iter().fold(Router::new(), |router, file| {
        let tag = content_etag(file.bytes);
        let answer = move |request: Request| {
            let answer = file_response(file, &tag, request.headers());
            async { answer }
        };
        router.route(file.path, get(answer))
    })
}

/// Returns the digest of a file in quotes.
fn content_etag(bytes: &[u8]) -> String {
    let digest = wire::Digest::hash_bytes(bytes).to_string();
    format!("\"{digest}\"")
}

/// Returns a file, or 304 if the client already has this version.
fn file_response(file: &'static PageFile, tag: &str, asked: &HeaderMap) -> Response<Body> {
    let has_it =
        asked.get(header::IF_NONE_MATCH).is_some_and(|has| has.as_bytes() == tag.as_bytes());
    let body = if has_it { Body::empty() } else { Body::from(file.bytes) };
    let mut response = Response::new(body);
    if has_it {
        *response.status_mut() = StatusCode::NOT_MODIFIED;
    }
    let headers = response.headers_mut();
    let fixed = [
        (header::CONTENT_TYPE, file.kind),
        // Browsers revalidate each time, as a new gateway version has new files.
        (header::CACHE_CONTROL, "no-cache"),
        (header::CONTENT_SECURITY_POLICY, SECURITY_POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
    ];
    for (name, value) in fixed {
        headers.insert(name, HeaderValue::from_static(value));
    }
    headers.extend(HeaderValue::from_str(tag).ok().map(|tag| (header::ETAG, tag)));
    response
}
