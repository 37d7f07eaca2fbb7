//! Keys that contain a digest of their object's bytes.

use crate::{
    manifest::MANIFEST,
    path::{MANIFEST_SUFFIX_HEX, RelativePath},
};

/// Returns the first hex digits of the digest that the object's bytes must have, if the key
/// contains them: for blobs and the manifests of published trees.
pub(super) fn digest_prefix(key: &RelativePath) -> Option<String> {
    let segments: Vec<&str> = key.as_str().split('/').collect();
    let hex = |text: &str| text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
    match segments[..] {
        ["blobs", _, name] if name.len() == 64 && hex(name) => Some(name.to_owned()),
        ["runs" | "models", .., tree, MANIFEST] => {
            let (_, suffix) = tree.rsplit_once('-')?;
            (suffix.len() == MANIFEST_SUFFIX_HEX && hex(suffix)).then(|| suffix.to_owned())
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_of_blobs_and_of_published_manifests_contain_a_digest() {
        let hex = "ab".repeat(32);
        for (key, expected) in [
            (format!("blobs/ab/{hex}"), Some(hex.as_str())),
            ("runs/r-1/checkpoints/c0-s1-0123456789ab/manifest.json".into(), Some("0123456789ab")),
            ("models/base-0123456789ab/manifest.json".into(), Some("0123456789ab")),
            ("models/base-0123456789ab/config.json".into(), None),
            ("models/of-mine/manifest.json".into(), None),
            ("blobs/ab/short".into(), None),
        ] {
            let key = RelativePath::new(key).unwrap();
            assert_eq!(digest_prefix(&key).as_deref(), expected, "{key}");
        }
    }
}
