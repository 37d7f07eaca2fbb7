//! From a request's line and head to what is asked of the store.

use std::ops::Range;

use axum::http::{
    HeaderMap, Method, Uri,
    header::{CONTENT_LENGTH, RANGE},
};
use percent_encoding::percent_decode_str;
use store::{
    PARTS_MAX, Part, RelativePath,
    door_protocol::{PATH, THROUGH},
};
use url::form_urlencoded;

/// Longer than any name of an upload that S3 servers make.
const UPLOAD_BYTES_MAX: usize = 2048;

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Ask {
    /// Does the store answer?
    Hello,
    Get {
        key: RelativePath,
        range: Option<Asked>,
        head: bool,
        through: bool,
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
        part: Part,
        bytes: u64,
    },
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

/// Bytes that are asked for, of an object whose size is not known yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Asked {
    From { first: u64, last: Option<u64> },
    Last(u64),
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum AskError {
    #[error("{0} (G110)")]
    Wrong(String),
    #[error("send Content-Length: the store takes nothing whose size is not known (G110)")]
    Length,
}

impl Asked {
    /// `None` when nothing of it is there.
    pub(super) fn of(self, size: u64) -> Option<Range<u64>> {
        let (start, end) = match self {
            Self::From { first, last } => {
                (first, last.map_or(size, |last| last.saturating_add(1).min(size)))
            }
            Self::Last(count) => (size.saturating_sub(count), size),
        };
        (start < end).then_some(start..end)
    }
}

pub(super) fn parse(method: &Method, uri: &Uri, headers: &HeaderMap) -> Result<Ask, AskError> {
    let Some(key) = key(uri)? else {
        return match *method {
            Method::GET | Method::HEAD => Ok(Ask::Hello),
            _ => Err(wrong("name an object: /store/KEY")),
        };
    };
    let query = Query::of(uri);
    let part = || Ok::<_, AskError>((query.upload()?, query.part()?));
    match *method {
        Method::GET if query.has("list") => {
            Ok(Ask::List { below: key, directories: query.get("list") == Some("directories") })
        }
        Method::GET | Method::HEAD => {
            let range = headers.get(RANGE).and_then(|value| parse_range(value.to_str().ok()?));
            let through = headers.contains_key(THROUGH);
            Ok(Ask::Get { key, range, head: *method == Method::HEAD, through })
        }
        Method::PUT if query.has("upload") => {
            let (upload, index) = part()?;
            let part = Part { upload, index, offset: query.number("offset")? };
            Ok(Ask::PutPart { key, part, bytes: length(headers)? })
        }
        Method::PUT => Ok(Ask::Put { key, bytes: length(headers)? }),
        Method::POST if query.has("begin") => Ok(Ask::Begin { key }),
        Method::POST if query.has("sign") => {
            let part = query.has("upload").then(part).transpose()?;
            Ok(Ask::Sign { key, bytes: query.number("sign")?, part })
        }
        Method::POST if query.has("complete") => {
            let bytes = query.number("complete")?;
            Ok(Ask::Complete { key, upload: query.upload()?, bytes })
        }
        Method::POST if query.has("copy") => {
            let from = query.get("copy").unwrap_or_default();
            let from = RelativePath::new(from).map_err(|error| wrong(&error.to_string()))?;
            Ok(Ask::Copy { from, to: key })
        }
        Method::DELETE if query.has("upload") => Ok(Ask::Abort { key, upload: query.upload()? }),
        Method::DELETE => Ok(Ask::Remove { key }),
        _ => Err(wrong(
            "the store knows GET, HEAD, PUT, DELETE, and POST with begin, sign, complete or copy",
        )),
    }
}

fn wrong(what: &str) -> AskError {
    AskError::Wrong(what.to_owned())
}

fn key(uri: &Uri) -> Result<Option<RelativePath>, AskError> {
    let path = uri.path().strip_prefix(PATH).unwrap_or_default().trim_start_matches('/');
    if path.is_empty() {
        return Ok(None);
    }
    let path = percent_decode_str(path).decode_utf8();
    let path = path.map_err(|_| wrong("the object's name is not UTF-8"))?;
    RelativePath::new(path.trim_end_matches('/'))
        .map(Some)
        .map_err(|error| wrong(&error.to_string()))
}

fn length(headers: &HeaderMap) -> Result<u64, AskError> {
    let length = headers.get(CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse().ok());
    length.ok_or(AskError::Length)
}

/// One range of bytes; what is no such range is no range, as HTTP has it.
fn parse_range(text: &str) -> Option<Asked> {
    let (first, last) = text.strip_prefix("bytes=")?.split_once('-')?;
    if first.is_empty() {
        return Some(Asked::Last(last.parse().ok()?));
    }
    let first = first.parse().ok()?;
    let last = if last.is_empty() { None } else { Some(last.parse().ok()?) };
    last.is_none_or(|last| first <= last).then_some(Asked::From { first, last })
}

struct Query(Vec<(String, String)>);

impl Query {
    fn of(uri: &Uri) -> Self {
        let pairs = form_urlencoded::parse(uri.query().unwrap_or_default().as_bytes());
        Self(pairs.into_owned().collect())
    }

    fn get(&self, name: &str) -> Option<&str> {
        self.0.iter().find(|(found, _)| found == name).map(|(_, value)| value.as_str())
    }

    fn has(&self, name: &str) -> bool {
        self.get(name).is_some()
    }

    fn number(&self, name: &str) -> Result<u64, AskError> {
        let number = self.get(name).and_then(|text| text.parse().ok());
        number.ok_or_else(|| AskError::Wrong(format!("{name}= must be a number of bytes")))
    }

    fn upload(&self) -> Result<String, AskError> {
        match self.get("upload") {
            Some(upload) if !upload.is_empty() && upload.len() <= UPLOAD_BYTES_MAX => {
                Ok(upload.to_owned())
            }
            _ => Err(wrong("upload= must be what beginning it answered")),
        }
    }

    fn part(&self) -> Result<usize, AskError> {
        let index = self.get("part").and_then(|text| text.parse().ok());
        let index = index.filter(|index| *index < PARTS_MAX);
        index.ok_or_else(|| AskError::Wrong(format!("part= must be below {PARTS_MAX}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(line: &str, heads: &[(&str, &str)]) -> Result<Ask, AskError> {
        let (method, uri) = line.split_once(' ').unwrap();
        let mut headers = HeaderMap::new();
        for (name, value) in heads {
            headers.insert(name.parse::<axum::http::HeaderName>().unwrap(), value.parse().unwrap());
        }
        parse(&method.parse().unwrap(), &uri.parse().unwrap(), &headers)
    }

    #[test]
    fn names_are_decoded_once_and_cannot_leave_the_store() {
        let key = RelativePath::new("models/é %2e/x").unwrap();
        assert_eq!(ask("DELETE /store/models/%C3%A9%20%252e/x", &[]), Ok(Ask::Remove { key }));
        for bad in ["/store/../x", "/store/%2e%2e/x", "/store/a%00", "/store/a//b", "/store/a%5Cb"]
        {
            assert!(matches!(ask(&format!("GET {bad}"), &[]), Err(AskError::Wrong(_))), "{bad}");
        }
    }

    #[test]
    fn a_range_is_cut_to_what_is_there() {
        let range = |text: &str| parse_range(text).and_then(|asked| asked.of(10));
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
        assert_eq!(ask("PUT /store/a", &[]), Err(AskError::Length));
        let far = ask("PUT /store/a?upload=u&part=10000&offset=0", &[("content-length", "1")]);
        assert!(matches!(far, Err(AskError::Wrong(_))), "{far:?}");
        let part = Part { upload: "u+/=".into(), index: 3, offset: 48 };
        let key = RelativePath::new("a").unwrap();
        let line = "PUT /store/a?upload=u%2B%2F%3D&part=3&offset=48";
        let asked = ask(line, &[("content-length", "16")]);
        assert_eq!(asked, Ok(Ask::PutPart { key, part, bytes: 16 }));
    }
}
