//! Parses the method, path, query and headers of an HTTP request to a request to the store.

use std::ops::Range;

use axum::http::{
    HeaderMap, Method, Uri,
    header::{CONTENT_LENGTH, RANGE},
};
use percent_encoding::percent_decode_str;
use store::{
    PARTS_MAX, PartPosition, RelativePath,
    proxy_protocol::{RELAY_HEADER, STORE_PATH},
};
use url::form_urlencoded;

/// The ids of S3 servers are shorter.
const UPLOAD_ID_BYTES_MAX: usize = 2048;

#[derive(Debug, PartialEq, Eq)]
pub(super) enum StoreRequest {
    Hello,
    /// `head` requests only the headers; `without_redirect` prohibits a redirect to a signed URL.
    Get {
        key: RelativePath,
        range: Option<ByteRange>,
        head: bool,
        without_redirect: bool,
    },
    List {
        below: RelativePath,
        directories: bool,
    },
    Put {
        key: RelativePath,
        bytes: u64,
    },
    Begin {
        key: RelativePath,
    },
    PutPart {
        key: RelativePath,
        part: PartPosition,
        bytes: u64,
    },
    /// A signed URL for an object, or for a part of an upload.
    Sign {
        key: RelativePath,
        bytes: u64,
        part: Option<(String, usize)>,
    },
    Complete {
        key: RelativePath,
        upload: String,
        bytes: u64,
    },
    Abort {
        key: RelativePath,
        upload: String,
    },
    Copy {
        from: RelativePath,
        to: RelativePath,
    },
    Remove {
        key: RelativePath,
    },
}

/// The requested bytes of an object of unknown size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ByteRange {
    /// `last` is inclusive; without it, to the end.
    From { first: u64, last: Option<u64> },
    /// A number of bytes at the end.
    Last(u64),
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum StoreRequestError {
    #[error("{0} (G110)")]
    Invalid(String),
    #[error("missing Content-Length: the store needs the size of an upload (G110)")]
    NoLength,
}

impl ByteRange {
    /// Returns `None` if the range is empty.
    pub(super) fn resolve_range(self, size: u64) -> Option<Range<u64>> {
        let (start, end) = match self {
            Self::From { first, last } => {
                (first, last.map_or(size, |last| last.saturating_add(1).min(size)))
            }
            Self::Last(count) => (size.saturating_sub(count), size),
        };
        (start < end).then_some(start..end)
    }
}

pub(super) fn parse_request(
    method: &Method,
    uri: &Uri,
    headers: &HeaderMap,
) -> Result<StoreRequest, StoreRequestError> {
    let Some(key) = parse_key(uri)? else {
        return match *method {
            Method::GET | Method::HEAD => Ok(StoreRequest::Hello),
            _ => Err(invalid_request("no object key: use /store/KEY")),
        };
    };
    let query = QueryPairs::from_uri(uri);
    let part = || Ok::<_, StoreRequestError>((query.parse_upload_id()?, query.parse_part_index()?));
    match *method {
        Method::GET if query.has_key("list") => Ok(StoreRequest::List {
            below: key,
            directories: query.get("list") == Some("directories"),
        }),
        Method::GET | Method::HEAD => {
            let range = headers.get(RANGE).and_then(|value| parse_range(value.to_str().ok()?));
            let without_redirect = headers.contains_key(RELAY_HEADER);
            Ok(StoreRequest::Get { key, range, head: *method == Method::HEAD, without_redirect })
        }
        Method::PUT if query.has_key("upload") => {
            let (upload, index) = part()?;
            let part = PartPosition { upload, index, offset: query.parse_number("offset")? };
            Ok(StoreRequest::PutPart { key, part, bytes: parse_length(headers)? })
        }
        Method::PUT => Ok(StoreRequest::Put { key, bytes: parse_length(headers)? }),
        Method::POST if query.has_key("begin") => Ok(StoreRequest::Begin { key }),
        Method::POST if query.has_key("sign") => {
            let part = query.has_key("upload").then(part).transpose()?;
            Ok(StoreRequest::Sign { key, bytes: query.parse_number("sign")?, part })
        }
        Method::POST if query.has_key("complete") => {
            let bytes = query.parse_number("complete")?;
            Ok(StoreRequest::Complete { key, upload: query.parse_upload_id()?, bytes })
        }
        Method::POST if query.has_key("copy") => {
            let from = query.get("copy").unwrap_or_default();
            let from =
                RelativePath::new(from).map_err(|error| invalid_request(&error.to_string()))?;
            Ok(StoreRequest::Copy { from, to: key })
        }
        Method::DELETE if query.has_key("upload") => {
            Ok(StoreRequest::Abort { key, upload: query.parse_upload_id()? })
        }
        Method::DELETE => Ok(StoreRequest::Remove { key }),
        _ => Err(invalid_request(
            "use GET, HEAD, PUT, DELETE, or POST with begin, sign, complete or copy",
        )),
    }
}

fn invalid_request(what: &str) -> StoreRequestError {
    StoreRequestError::Invalid(what.to_owned())
}

/// Returns `None` for the store itself.
fn parse_key(uri: &Uri) -> Result<Option<RelativePath>, StoreRequestError> {
    let path = uri.path().strip_prefix(STORE_PATH).unwrap_or_default().trim_start_matches('/');
    if path.is_empty() {
        return Ok(None);
    }
    let path = percent_decode_str(path).decode_utf8();
    let path = path.map_err(|_| invalid_request("the object's name is not UTF-8"))?;
    RelativePath::new(path.trim_end_matches('/'))
        .map(Some)
        .map_err(|error| invalid_request(&error.to_string()))
}

fn parse_length(headers: &HeaderMap) -> Result<u64, StoreRequestError> {
    let length = headers.get(CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse().ok());
    length.ok_or(StoreRequestError::NoLength)
}

/// Parses one range of bytes. Other values are ignored, as HTTP requires.
fn parse_range(text: &str) -> Option<ByteRange> {
    let (first, last) = text.strip_prefix("bytes=")?.split_once('-')?;
    if first.is_empty() {
        return Some(ByteRange::Last(last.parse().ok()?));
    }
    let first = first.parse().ok()?;
    let last = if last.is_empty() { None } else { Some(last.parse().ok()?) };
    last.is_none_or(|last| first <= last).then_some(ByteRange::From { first, last })
}

struct QueryPairs(Vec<(String, String)>);

impl QueryPairs {
    fn from_uri(uri: &Uri) -> Self {
        let pairs = form_urlencoded::parse(uri.query().unwrap_or_default().as_bytes());
        Self(pairs.into_owned().collect())
    }

    fn get(&self, name: &str) -> Option<&str> {
        self.0.iter().find(|(found, _)| found == name).map(|(_, value)| value.as_str())
    }

    fn has_key(&self, name: &str) -> bool {
        self.get(name).is_some()
    }

    fn parse_number(&self, name: &str) -> Result<u64, StoreRequestError> {
        let number = self.get(name).and_then(|text| text.parse().ok());
        number
            .ok_or_else(|| StoreRequestError::Invalid(format!("{name}= must be a number of bytes")))
    }

    fn parse_upload_id(&self) -> Result<String, StoreRequestError> {
        match self.get("upload") {
            Some(upload) if !upload.is_empty() && upload.len() <= UPLOAD_ID_BYTES_MAX => {
                Ok(upload.to_owned())
            }
            _ => Err(invalid_request("upload= must be the id that begin returned")),
        }
    }

    fn parse_part_index(&self) -> Result<usize, StoreRequestError> {
        let index = self.get("part").and_then(|text| text.parse().ok());
        let index = index.filter(|index| *index < PARTS_MAX);
        index.ok_or_else(|| StoreRequestError::Invalid(format!("part= must be below {PARTS_MAX}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(line: &str, heads: &[(&str, &str)]) -> Result<StoreRequest, StoreRequestError> {
        let (method, uri) = line.split_once(' ').unwrap();
        let mut headers = HeaderMap::new();
        for (name, value) in heads {
            headers.insert(name.parse::<axum::http::HeaderName>().unwrap(), value.parse().unwrap());
        }
        parse_request(&method.parse().unwrap(), &uri.parse().unwrap(), &headers)
    }

    #[test]
    fn names_are_decoded_once_and_cannot_leave_the_store() {
        let key = RelativePath::new("models/é %2e/x").unwrap();
        assert_eq!(
            ask("DELETE /store/models/%C3%A9%20%252e/x", &[]),
            Ok(StoreRequest::Remove { key })
        );
        for bad in ["/store/../x", "/store/%2e%2e/x", "/store/a%00", "/store/a//b", "/store/a%5Cb"]
        {
            assert!(
                matches!(ask(&format!("GET {bad}"), &[]), Err(StoreRequestError::Invalid(_))),
                "{bad}"
            );
        }
    }

    #[test]
    fn a_range_is_cut_to_what_is_there() {
        let range = |text: &str| parse_range(text).and_then(|asked| asked.resolve_range(10));
        assert_eq!(range("bytes=0-3"), Some(0..4));
        assert_eq!(range("bytes=8-99"), Some(8..10));
        assert_eq!(range("bytes=4-"), Some(4..10));
        assert_eq!(range("bytes=-3"), Some(7..10));
        assert_eq!(range("bytes=10-"), None);
        for none in ["bytes=3-2", "bytes=x-", "lines=1-2", "bytes=0-1,3-4"] {
            assert_eq!(parse_range(none), None, "{none}");
        }
    }

    #[test]
    fn what_is_sent_has_a_length_and_a_part_a_number() {
        assert_eq!(ask("PUT /store/a", &[]), Err(StoreRequestError::NoLength));
        let far = ask("PUT /store/a?upload=u&part=10000&offset=0", &[("content-length", "1")]);
        assert!(matches!(far, Err(StoreRequestError::Invalid(_))), "{far:?}");
        let part = PartPosition { upload: "u+/=".into(), index: 3, offset: 48 };
        let key = RelativePath::new("a").unwrap();
        let line = "PUT /store/a?upload=u%2B%2F%3D&part=3&offset=48";
        let asked = ask(line, &[("content-length", "16")]);
        assert_eq!(asked, Ok(StoreRequest::PutPart { key, part, bytes: 16 }));
    }
}
