//! From a URL to object storage. The traps of `facts/store.md` are answered here: only
//! `AWS_*` is read from the environment, and timeouts and retries fit large files.

use std::{
    collections::BTreeMap,
    path::PathBuf,
    sync::{Arc, Mutex},
    time::Duration,
};

use object_store::{
    BackoffConfig, ClientOptions, ObjectStore, RetryConfig,
    aws::{AmazonS3, AmazonS3Builder, AmazonS3ConfigKey},
    local::LocalFileSystem,
    path::Path,
    prefix::PrefixStore,
};

use crate::{
    door::{Door, DoorObjects},
    error::{Fault, OpenError},
    path::RelativePath,
    upload::journal_directory,
};
use wire::Digest;

/// Covers a whole request with its body, of at most one part: 16 MiB in 300 s is 56 kB/s.
pub(crate) const REQUEST_TIMEOUT: Duration = Duration::from_secs(300);
pub(crate) const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a store may be away. A request is signed once, and S3 refuses signatures older
/// than 15 minutes, so longer would only end in another error.
const RETRY_TIMEOUT: Duration = Duration::from_secs(600);

pub(crate) struct Location {
    /// As the user wrote it, without a slash at its end.
    pub(crate) url: String,
    pub(crate) objects: Arc<dyn ObjectStore>,
    /// The same files, for reads that go around `object_store`'s slow local stream.
    pub(crate) local: Option<LocalFileSystem>,
    /// The same bucket, for what only S3 can do: addresses that are signed.
    pub(crate) bucket: Option<Bucket>,
    /// The same objects, where they are a gateway's.
    pub(crate) door: Option<DoorObjects>,
    /// Where it is written down which parts of uploads are there.
    pub(crate) journals: Option<PathBuf>,
    /// Where this process put large files of trees, which the next tree may have unchanged.
    pub(crate) put: Mutex<BTreeMap<Digest, Path>>,
}

/// A bucket, and where the store begins in it.
#[derive(Debug)]
pub(crate) struct Bucket {
    pub(crate) s3: AmazonS3,
    prefix: Path,
}

impl Bucket {
    pub(crate) fn path(&self, key: &Path) -> Path {
        self.prefix.parts().chain(key.parts()).collect()
    }
}

impl Location {
    pub(crate) fn url_of(&self, key: &Path) -> String {
        format!("{}/{key}", self.url)
    }

    pub(crate) fn fault(&self, key: &Path, source: object_store::Error) -> Fault {
        Fault::new(self.url_of(key), source)
    }
}

pub(crate) async fn open(
    url: &str,
    env: impl IntoIterator<Item = (String, String)>,
) -> Result<Location, OpenError> {
    let url = url.trim_end_matches('/');
    match url.split_once("://") {
        Some(("file", dir)) => open_local(url, dir).await,
        Some(("s3", place)) => open_s3(url, place, env),
        Some((scheme, _)) => {
            let reason = format!("{scheme:?} is not supported, use file:// or s3://");
            Err(refused(url, reason))
        }
        None if url.starts_with('/') => Err(refused(url, format!("write it as file://{url}"))),
        None => {
            Err(refused(url, "write file:///absolute/directory or s3://bucket/prefix".to_owned()))
        }
    }
}

pub(crate) fn through(door: &Door) -> Result<Location, OpenError> {
    let objects = DoorObjects::new(door)?;
    let (url, door) = (door.url(), Some(objects.clone()));
    let journals = journal_directory(|name| std::env::var_os(name));
    Ok(Location {
        url,
        objects: Arc::new(objects),
        local: None,
        bucket: None,
        door,
        journals,
        put: Mutex::default(),
    })
}

fn refused(url: &str, reason: String) -> OpenError {
    OpenError::Url { url: url.to_owned(), reason }
}

async fn open_local(url: &str, dir: &str) -> Result<Location, OpenError> {
    if !dir.starts_with('/') {
        return Err(refused(url, "a directory must be absolute: file:///srv/flotilla".to_owned()));
    }
    let path = PathBuf::from(dir);
    let failed = |source| OpenError::Directory { path: path.clone(), source };
    tokio::fs::create_dir_all(&path).await.map_err(failed)?;
    let settings = |source| OpenError::Settings { url: url.to_owned(), source: Box::new(source) };
    let local = LocalFileSystem::new_with_prefix(&path).map_err(settings)?.with_fsync(true);
    let objects = Arc::new(local.clone());
    let (local, bucket, door, journals) = (Some(local), None, None, None);
    Ok(Location {
        url: url.to_owned(),
        objects,
        local,
        bucket,
        door,
        journals,
        put: Mutex::default(),
    })
}

fn open_s3(
    url: &str,
    place: &str,
    env: impl IntoIterator<Item = (String, String)>,
) -> Result<Location, OpenError> {
    let (bucket, prefix) = place.split_once('/').unwrap_or((place, ""));
    let legal = |b: u8| b.is_ascii_alphanumeric() || b"-._".contains(&b);
    if bucket.is_empty() || !bucket.bytes().all(legal) {
        let reason = "a bucket's name has letters, digits, '-' and '.': s3://bucket/prefix (keys \
                      and the server's address come from AWS_*)";
        return Err(refused(url, reason.to_owned()));
    }
    if !prefix.is_empty() {
        RelativePath::new(prefix).map_err(|error| refused(url, error.to_string()))?;
    }
    let prefix = Path::parse(prefix).map_err(|error| refused(url, error.to_string()))?;
    let settings = |source| OpenError::Settings { url: url.to_owned(), source: Box::new(source) };
    let env: Vec<(String, String)> = env.into_iter().collect();
    let variable = |name: &str| env.iter().find(|(known, _)| known == name);
    let journals = journal_directory(|name| variable(name).map(|(_, value)| value.into()));
    let s3 = s3_builder(url, env)?.with_bucket_name(bucket).build().map_err(settings)?;
    let objects: Arc<dyn ObjectStore> = if prefix.is_root() {
        Arc::new(s3.clone())
    } else {
        Arc::new(PrefixStore::new(s3.clone(), prefix.clone()))
    };
    let bucket = Some(Bucket { s3, prefix });
    Ok(Location {
        url: url.to_owned(),
        objects,
        local: None,
        bucket,
        door: None,
        journals,
        put: Mutex::default(),
    })
}

fn s3_builder(
    url: &str,
    env: impl IntoIterator<Item = (String, String)>,
) -> Result<AmazonS3Builder, OpenError> {
    let mut builder = AmazonS3Builder::new();
    let mut has_credentials = false;
    let mut allow_http = false;
    for (name, value) in env.into_iter().filter(|(name, value)| {
        // Unprefixed names (TOKEN, REGION, …) are read by object_store but are not meant for it.
        name.starts_with("AWS_") && !value.is_empty()
    }) {
        use AmazonS3ConfigKey as Key;
        let Ok(key) = name.to_ascii_lowercase().parse::<Key>() else { continue };
        has_credentials |= matches!(
            key,
            Key::AccessKeyId
                | Key::WebIdentityTokenFile
                | Key::ContainerCredentialsRelativeUri
                | Key::ContainerCredentialsFullUri
                | Key::MetadataEndpoint
                | Key::SkipSignature
        );
        allow_http |=
            matches!(key, Key::Endpoint | Key::S3Endpoint) && value.starts_with("http://");
        builder = builder.with_config(key, value);
    }
    if !has_credentials {
        // Otherwise object_store asks 169.254.169.254 and waits for minutes.
        return Err(OpenError::Credentials { url: url.to_owned() });
    }
    let client = ClientOptions::new()
        .with_timeout(REQUEST_TIMEOUT)
        .with_connect_timeout(CONNECT_TIMEOUT)
        .with_allow_http(allow_http);
    Ok(builder.with_client_options(client).with_retry(retry()))
}

/// How requests to a store are repeated, here and by `door`.
pub(crate) fn retry() -> RetryConfig {
    RetryConfig {
        backoff: BackoffConfig {
            init_backoff: Duration::from_millis(500),
            max_backoff: Duration::from_secs(10),
            base: 2.0,
        },
        max_retries: 200,
        retry_timeout: RETRY_TIMEOUT,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn env(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
        pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect()
    }

    #[tokio::test]
    async fn a_url_we_cannot_use_is_refused_with_a_remedy() {
        for (url, remedy) in [
            ("gs://bucket", "use file:// or s3://"),
            ("/srv/store", "file:///srv/store"),
            ("store", "file:///absolute/directory"),
            ("file://store", "must be absolute"),
            ("s3://", "s3://bucket/prefix"),
            ("s3://key:secret@bucket/x", "AWS_*"),
            ("s3://bucket/../x", "'..'"),
        ] {
            let error = open(url, env(&[])).await.map(|_| ()).unwrap_err().to_string();
            assert!(error.contains(remedy), "{url}: {error}");
        }
    }

    #[test]
    fn only_aws_variables_are_read_and_credentials_are_required() {
        let only_strangers = env(&[("ACCESS_KEY_ID", "a"), ("TOKEN", "b"), ("REGION", "c")]);
        let refused = s3_builder("s3://b", only_strangers);
        assert!(matches!(refused, Err(OpenError::Credentials { .. })));
        let ours =
            env(&[("AWS_ACCESS_KEY_ID", "a"), ("AWS_SECRET_ACCESS_KEY", "b"), ("TOKEN", "t")]);
        let builder = s3_builder("s3://b", ours).unwrap();
        assert_eq!(builder.get_config_value(&AmazonS3ConfigKey::Token), None);
        let key = builder.get_config_value(&AmazonS3ConfigKey::AccessKeyId);
        assert_eq!(key.as_deref(), Some("a"));
    }
}
