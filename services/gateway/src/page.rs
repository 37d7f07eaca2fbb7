//! The web page: files that are part of the program, which ask for nothing from elsewhere. What
//! they show, they get by the API like everybody else; so in a closed fleet, too, whoever comes may
//! have them, and sees nothing without a bearer.

use axum::{
    Router,
    body::Body,
    extract::Request,
    http::{HeaderMap, HeaderValue, Response, StatusCode, header},
    routing::get,
};

struct File {
    path: &'static str,
    kind: &'static str,
    bytes: &'static [u8],
}

const HTML: &str = "text/html; charset=utf-8";
const CSS: &str = "text/css; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";
const PICTURE: &str = "image/svg+xml";

/// Files of `services/gateway/page`, at the paths that they are served at.
macro_rules! files {
    ($($path:literal $file:literal $kind:ident),* $(,)?) => {
        &[$(File {
            path: $path,
            kind: $kind,
            bytes: include_bytes!(concat!("../page/", $file)),
        }),*]
    };
}

const FILES: &[File] = files! {
    "/" "index.html" HTML,
    "/ancestry.js" "ancestry.js" SCRIPT,
    "/api.js" "api.js" SCRIPT,
    "/box.js" "box.js" SCRIPT,
    "/chart.js" "chart.js" SCRIPT,
    "/compare.js" "compare.js" SCRIPT,
    "/dialogs.js" "dialogs.js" SCRIPT,
    "/diff.js" "diff.js" SCRIPT,
    "/dom.js" "dom.js" SCRIPT,
    "/fleet.js" "fleet.js" SCRIPT,
    "/format.js" "format.js" SCRIPT,
    "/icon.svg" "icon.svg" PICTURE,
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

/// Nothing from elsewhere, nothing inline, in no other page's frame.
const POLICY: &str =
    "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

pub(crate) fn has(path: &str) -> bool {
    FILES.iter().any(|file| file.path == path)
}

pub(crate) fn routes() -> Router {
    FILES.iter().fold(Router::new(), |router, file| {
        let tag = tag(file.bytes);
        let answer = move |request: Request| {
            let answer = answer(file, &tag, request.headers());
            async { answer }
        };
        router.route(file.path, get(answer))
    })
}

/// Names what a file holds.
fn tag(bytes: &[u8]) -> String {
    let digest = wire::Digest::of(bytes).to_string();
    format!("\"{digest}\"")
}

fn answer(file: &'static File, tag: &str, asked: &HeaderMap) -> Response<Body> {
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
        // Asked for again each time, and sent again when the gateway is another.
        (header::CACHE_CONTROL, "no-cache"),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
    ];
    for (name, value) in fixed {
        headers.insert(name, HeaderValue::from_static(value));
    }
    headers.extend(HeaderValue::from_str(tag).ok().map(|tag| (header::ETAG, tag)));
    response
}
